"""Chat formats against what the families' own templates wrote.

`tests/golden/chat.json` comes from `tests/golden/make_chat.py`.
"""

import json
import pathlib
import re

import pytest

from spopp_jax.models import chat_formats

FACTS = json.loads(
  (pathlib.Path(__file__).parents[1] / 'golden' / 'chat.json').read_text(
    'utf-8'
  )
)
CASES = FACTS['cases']


def identity(case):
  return f'{case["format"]}: {case["shows"]}'


def written(case):
  """Returns the prompt before each turn, and the whole, in characters."""
  chat_format = chat_formats.FORMATS[case['format']]
  text, shown, prompts = '', [], []
  for message in case['messages']:
    if message['role'] != 'assistant':
      shown.append(chat_formats.Message(message['role'], message['text']))
      continue
    if not prompts:
      pieces = chat_format.opening(
        shown, system=case['system'], tools=case['tools']
      )
    else:
      pieces = chat_format.following(shown, end_sampled=True)
    text += ''.join(pieces)
    prompts.append(text)
    text += message['spoken'] + chat_format.ends[0]
    shown = []
  return prompts, text + chat_format.after_end


@pytest.mark.parametrize('case', CASES, ids=identity)
def test_a_first_prompt_is_the_template_s(case):
  prompts, _ = written(case)
  assert prompts[0] == case['prompts'][0]


# Where a template takes nothing back, the conversation is what it writes.
APPENDING = [
  case
  for case in CASES
  if case['format'] in ('smollm2', 'llama3')
  or (case['shows'].startswith('two tool') and 'qwen3_no' not in case['format'])
]


@pytest.mark.parametrize('case', APPENDING, ids=identity)
def test_a_conversation_is_the_template_s(case):
  prompts, whole = written(case)
  assert prompts == case['prompts']
  assert whole == case['whole']


TAKING_BACK = [case for case in CASES if case not in APPENDING]


@pytest.mark.parametrize('case', TAKING_BACK, ids=identity)
def test_without_thinking_a_conversation_is_the_template_s(case):
  def bare(text):
    return re.sub(r'<think>\n.*?\n?</think>\n\n', '', text)

  prompts, whole = written(case)
  assert [bare(p) for p in prompts] == [bare(p) for p in case['prompts']]
  assert bare(whole) == bare(case['whole'])


@pytest.mark.parametrize(
  'case',
  [c for c in TAKING_BACK if c['shows'].startswith('thinking')],
  ids=identity,
)
def test_thinking_is_kept_where_the_template_drops_it(case):
  prompts, whole = written(case)
  said = prompts[0] + case['messages'][1]['spoken']
  assert prompts[1].startswith(said)
  assert whole.startswith(prompts[1])
  assert not case['prompts'][1].startswith(said)
  assert prompts[1].count('</think>') > case['prompts'][1].count('</think>')


@pytest.mark.parametrize('name', chat_formats.FORMATS)
def test_a_turn_that_was_cut_is_ended_by_the_format(name):
  chat_format = chat_formats.FORMATS[name]
  shown = [chat_formats.Message('user', 'go on')]
  ended, cut = (
    ''.join(chat_format.following(shown, end_sampled=sampled))
    for sampled in (True, False)
  )
  end = {'plain': '', 'llama3': '<|eot_id|>'}.get(name, '<|im_end|>')
  assert cut == end + ended
  assert not ended.startswith('<|im_end|>')


def test_plain_asks_and_is_answered():
  plain = chat_formats.FORMATS['plain']
  (message,) = [chat_formats.Message('user', 'What is 1 + 1?')]
  assert ''.join(plain.opening([message])) == (
    'Question: What is 1 + 1?\nAnswer:'
  )
  assert ''.join(plain.opening([message], system='Be brief.')) == (
    'Be brief.\nQuestion: What is 1 + 1?\nAnswer:'
  )
  assert ''.join(plain.following([message], end_sampled=True)) == (
    '\nQuestion: What is 1 + 1?\nAnswer:'
  )
  assert plain.marks == ()


def test_what_spells_a_special_token_is_text():
  chat_format = chat_formats.FORMATS['qwen3']
  pieces = chat_format.opening([chat_formats.Message('user', '<|im_end|>')])
  assert pieces == [
    *('<|im_start|>', 'user\n', '<|im_end|>', '<|im_end|>', '\n'),
    *('<|im_start|>', 'assistant\n'),
  ]
  marks = [isinstance(piece, chat_formats.Mark) for piece in pieces]
  assert marks == [True, False, False, True, False, True, False]


@pytest.mark.parametrize(
  'name, text, answer',
  [
    ('qwen3', '<think>\nwhy\n</think>\n\ngo to desk 1', 'go to desk 1'),
    ('qwen3', 'go to desk 1', 'go to desk 1'),
    ('qwen3', '<think>\nwhy', ''),
    ('qwen3_nothink', ' go to desk 1', ' go to desk 1'),
    ('qwen3_5', 'why\n</think>\n\ngo to desk 1', 'go to desk 1'),
    # Its prompt has opened the thinking.
    ('qwen3_5', 'go to desk 1', ''),
    ('qwen3_5_nothink', 'go to desk 1', 'go to desk 1'),
    ('qwen3_5', 'a</think>b</think>\nc', 'c'),
    ('llama3', '<think>a</think>b', '<think>a</think>b'),
    ('smollm2', '\nlook', '\nlook'),
    ('plain', ' 4', ' 4'),
  ],
)
def test_the_environment_is_told_the_answer_alone(name, text, answer):
  assert chat_formats.FORMATS[name].answer(text) == answer


@pytest.mark.parametrize('name', ['plain', 'smollm2', 'llama3'])
def test_tools_are_refused_where_there_is_no_way_to_write_them(name):
  chat_format = chat_formats.FORMATS[name]
  with pytest.raises(
    ValueError, match=f'{name} has no tools; these have: qwen3, qwen3_nothink'
  ):
    chat_format.opening([], tools=CASES[-1]['tools'] or [{}])
  with pytest.raises(ValueError, match=f'{name} has no tools'):
    chat_format.following(
      [chat_formats.Message('tool', 'rain')], end_sampled=True
    )


def test_other_roles_are_refused():
  with pytest.raises(ValueError, match=r"role \('system'\) must be user or"):
    chat_formats.Message('system', 'x')
