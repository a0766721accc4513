import json
import pathlib

import hypothesis
import pytest

from spopp_jax.models import tool_calls

FACTS = json.loads(
  (pathlib.Path(__file__).parents[1] / 'golden' / 'chat.json').read_text(
    'utf-8'
  )
)
FORMATS = {'qwen3': tool_calls.JSON, 'qwen3_5': tool_calls.XML}
TOOLS = next(case['tools'] for case in FACTS['cases'] if case['tools'])


def tool(name, **properties):
  parameters = {'type': 'object', 'properties': properties}
  return {
    'type': 'function',
    'function': {'name': name, 'parameters': parameters},
  }


def json_call(body):
  return f'<tool_call>\n{body}\n</tool_call>'


def xml_call(name, **texts):
  parameters = ''.join(
    f'<parameter={key}>\n{text}\n</parameter>\n' for key, text in texts.items()
  )
  return (
    f'<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>'
  )


@pytest.mark.parametrize('family', FORMATS)
def test_calls_are_written_and_read_as_the_families_do(family):
  form, spoken = FORMATS[family], FACTS['spoken'][family]
  calls = [tool_calls.ToolCall(**call) for call in FACTS['calls']]
  assert form.write(calls) == spoken
  answer = form.parse(f'I look.\n\n{spoken}', TOOLS)
  assert answer.text == 'I look.'
  assert [
    {'name': call.name, 'arguments': call.arguments} for call in answer.calls
  ] == FACTS['calls']
  assert [call.problem for call in answer.calls] == ['', '']
  assert '\n'.join(call.text for call in answer.calls) == spoken


@pytest.mark.parametrize('family', FORMATS)
@pytest.mark.parametrize('text', ['', '  \n', 'No call.', 'a < b > c {"x": 1}'])
def test_a_turn_without_calls_is_text(family, text):
  answer = FORMATS[family].parse(text, TOOLS)
  assert answer == tool_calls.Answer(text.strip(), ())


def test_json_strings_may_hold_tags():
  code = 'print("</tool_call><tool_call>")'
  body = json.dumps({'name': 'python', 'arguments': {'code': code}})
  answer = tool_calls.JSON.parse(json_call(body) * 2, TOOLS)
  assert [call.arguments for call in answer.calls] == [{'code': code}] * 2
  assert [call.problem for call in answer.calls] == ['', '']


GOOD = '{"name": "python", "arguments": {"code": "1"}}'


@pytest.mark.parametrize(
  'body, name, words',
  [
    ('{"name": "python", "arguments"', '', 'not a JSON object'),
    ('', '', 'not a JSON object'),
    ('python(1)', '', 'not a JSON object'),
    ('[' * 100_000, '', 'not a JSON object'),
    (f'{{"name": {"1" * 5000}}}', '', 'not a JSON object'),
    ('{"name": "python", "arguments": {"code": NaN}}', '', 'NaN is no JSON'),
    (
      '{"name": "python", "arguments": {"code": "1", "code": "2"}}',
      '',
      'a key is there twice',
    ),
    ('["python"]', '', 'a JSON object is needed'),
    ('{"arguments": {}}', '', r'name (None) must be'),
    ('{"name": 3, "arguments": {}}', '', 'name (3) must be'),
    ('{"name": "python"}', 'python', 'arguments (None) must be an object'),
    (
      '{"name": "python", "arguments": "{}"}',
      'python',
      "arguments ('{}') must be an object",
    ),
    (
      '{"name": "python", "arguments": {}, "id": 1}',
      'python',
      "only name and arguments, not 'id'",
    ),
    (
      '{"name": "pyton", "arguments": {}}',
      'pyton',
      "there is no tool 'pyton'; there are weather, python",
    ),
    (f'{GOOD} {GOOD}', '', '</tool_call> expected, not \'{"name"'),
    (f'{GOOD}<tool_call>', '', "</tool_call> expected, not '<tool_call>"),
  ],
)
def test_a_json_call_that_cannot_be_made_says_why(body, name, words):
  text = f'Before {json_call(body)}\n{json_call(GOOD)}'
  *broken, last = tool_calls.JSON.parse(text, TOOLS).calls
  assert (last.name, last.arguments) == ('python', {'code': '1'})
  assert last.problem == ''
  assert words in broken[0].problem
  assert broken[0].name == name
  assert broken[0].arguments == {}
  assert broken[0].text.startswith('<tool_call>')
  # Every character of the turn is in the text or in a call.
  assert ''.join(call.text for call in broken) in text


@pytest.mark.parametrize(
  'family, text, problems',
  [
    ('qwen3', '<tool_call>\n{"name": "py', ['not a JSON object']),
    ('qwen3', f'<tool_call>\n{GOOD}', ['</tool_call> expected, not the end']),
    ('qwen3', 'So </tool_call>', ['</tool_call> outside a call']),
    (
      'qwen3',
      f'<tool_call>\n{GOOD}\n<tool_call>\n{GOOD}\n</tool_call>',
      ['</tool_call> expected', ''],
    ),
    (
      'qwen3_5',
      '<function=python>\n<parameter=code>\n1\n</parameter>\n</function>',
      ['<function= outside a call'],
    ),
    ('qwen3_5', '<tool_call>\n<function=python>', ['not the end']),
    (
      'qwen3_5',
      '<tool_call>\n<function=python>\n<parameter=code>\n1',
      ['<parameter=code> is not closed'],
    ),
    (
      'qwen3_5',
      '<tool_call>\n<function=python>\n</tool_call>' + xml_call('python'),
      ["<parameter= expected, not '</tool_call>", ''],
    ),
  ],
)
def test_no_call_is_dropped_silently(family, text, problems):
  calls = FORMATS[family].parse(text, TOOLS).calls
  assert len(calls) == len(problems)
  for call, problem in zip(calls, problems, strict=True):
    assert problem in call.problem
    assert bool(call.problem) == bool(problem)
    assert call.text in text


PIECES = (
  *('<tool_call>', '</tool_call>', '<function=python>', '</function>'),
  *('<parameter=code>', '</parameter>', '\n', ' ', '1', '"', '{', '}', 'x'),
  *(GOOD, '{"name": "python", "arguments": ', '<function=', '[', '\\u12'),
)


@pytest.mark.parametrize('family', FORMATS)
@hypothesis.given(
  hypothesis.strategies.lists(hypothesis.strategies.sampled_from(PIECES))
)
def test_whatever_is_written_every_character_is_somewhere(family, pieces):
  text = ''.join(pieces)
  answer = FORMATS[family].parse(text, TOOLS)
  parts = [answer.text, *(call.text for call in answer.calls)]
  assert sorted(''.join(''.join(parts).split())) == sorted(
    ''.join(text.split())
  )
  assert bool(answer.calls) >= ('<tool_call>' in text)
  assert '<tool_call>' not in answer.text
  for call in answer.calls:
    assert call.text in text
    assert call.problem or call.name == 'python'


SCHEMAS = {
  'text': {'type': 'string'},
  'count': {'type': 'integer'},
  'ratio': {'type': 'number'},
  'on': {'type': 'boolean'},
  'items': {'type': 'array'},
  'fields': {'type': 'object'},
  'maybe': {'type': ['integer', 'null']},
  'either': {'anyOf': [{'type': 'boolean'}, {'type': 'number'}]},
  'free': {'description': 'no type'},
}


@pytest.mark.parametrize(
  'key, text, value',
  [
    ('text', '12', '12'),
    ('text', '', ''),
    ('text', ' a\n\nb ', ' a\n\nb '),
    ('text', '\nfirst and last lines\n', '\nfirst and last lines\n'),
    ('text', '</function> <b>', '</function> <b>'),
    ('count', '12', 12),
    ('count', ' -3 ', -3),
    ('ratio', '2', 2),
    ('ratio', '-2.5e1', -25.0),
    ('on', 'true', True),
    ('on', 'False', False),
    ('items', '[1, "é"]', [1, 'é']),
    ('fields', '{"a": {}}', {'a': {}}),
    ('maybe', '7', 7),
    ('maybe', 'null', None),
    ('maybe', 'None', None),
    ('either', 'True', True),
    ('either', '0.5', 0.5),
    ('free', '12', '12'),
  ],
)
def test_xml_parameters_have_the_types_of_the_schema(key, text, value):
  tools = [tool('f', **SCHEMAS)]
  (call,) = tool_calls.XML.parse(xml_call('f', **{key: text}), tools).calls
  assert call.problem == ''
  assert call.arguments == {key: value}
  assert type(call.arguments[key]) is type(value)


@pytest.mark.parametrize(
  'texts, words',
  [
    ({'count': '1.5'}, "count ('1.5') must be integer"),
    ({'count': 'True'}, "count ('True') must be integer"),
    ({'count': '1_000'}, 'must be integer'),
    ({'count': '٣'}, 'must be integer'),
    ({'count': '9' * 5000}, 'must be integer'),
    ({'ratio': 'NaN'}, "ratio ('NaN') must be number"),
    ({'ratio': ''}, "ratio ('') must be number"),
    ({'on': '1'}, "on ('1') must be boolean"),
    ({'items': '{}'}, "items ('{}') must be array"),
    ({'items': '[' * 100_000}, 'must be array'),
    ({'fields': '{"a": 1, "a": 2}'}, 'must be object'),
    ({'maybe': 'x'}, "maybe ('x') must be integer or null"),
    ({'cuont': '1'}, "there is no parameter 'cuont'; there are text, count"),
    (
      {'text': 'a\n<parameter=count>\n1'},
      '<parameter=text> is not closed',
    ),
  ],
)
def test_an_xml_call_that_cannot_be_made_says_why(texts, words):
  tools = [tool('f', **SCHEMAS)]
  text = xml_call('f', **texts)
  (call,) = tool_calls.XML.parse(text, tools).calls
  assert words in call.problem
  assert (call.name, call.arguments, call.text) == ('f', {}, text)


def test_an_xml_parameter_twice_or_a_broken_tag_is_a_problem():
  tools = [tool('f', text={'type': 'string'})]

  def problem(inside):
    text = f'<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>'
    (call,) = tool_calls.XML.parse(text, tools).calls
    return call.problem

  one = '<parameter=text>\na\n</parameter>\n'
  assert problem(one) == ''
  assert problem(one * 2) == '<parameter=text> is there twice'
  assert 'a name and > expected' in problem('<parameter=>\na\n</parameter>\n')
  assert '<parameter= expected' in problem(f'{one}words')
  (call,) = tool_calls.XML.parse(xml_call('g'), tools).calls
  assert call.problem == "there is no tool 'g'; there are f"


def test_one_line_calls_are_read_too():
  text = (
    '<tool_call><function=f><parameter=text>a</parameter></function>'
    '</tool_call>'
  )
  tools = [tool('f', text={'type': 'string'})]
  (call,) = tool_calls.XML.parse(text, tools).calls
  assert (call.arguments, call.problem) == ({'text': 'a'}, '')


@pytest.mark.parametrize(
  'tools, words',
  [
    ([{'name': 'f'}], 'must have function.name'),
    ([{'function': {}}], 'must have function.name'),
    ([tool('f', a=3)], 'must have function.name and JSON schemas'),
    ([tool('f', a={'type': 'int'})], r"f: the type of a \('int'\) must be one"),
    ([tool('f'), tool('f')], r"different names, not \['f', 'f'\]"),
  ],
)
def test_tools_that_are_not_described_well_are_refused(tools, words):
  with pytest.raises(ValueError, match=words):
    tool_calls.check(tools)
  tool_calls.check([tool('f', **SCHEMAS), {'function': {'name': 'g'}}])


@pytest.mark.parametrize(
  'value, words', [(r'"\ud800"', 'half a character'), ('1e400', 'too large')]
)
def test_values_that_no_tool_can_take_are_named(value, words):
  body = '{"name": "go", "arguments": {"to": ' + value + '}}'
  (call,) = tool_calls.JSON.parse(json_call(body), [tool('go')]).calls
  assert words in call.problem
