"""Tool calls as Qwen3 (JSON) and Qwen3.5 (XML) write them, read and written.

What a policy writes is data: a call that cannot be made comes back with its
text and what is wrong with it. No call is dropped, and nothing is raised.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_OPEN, _CLOSE = '<tool_call>', '</tool_call>'
_TAGS = re.compile(f'{_OPEN}|{_CLOSE}')
_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
  'string': str,
  'integer': int,
  'number': (int, float),
  'boolean': bool,
  'array': list,
  'object': dict,
  'null': type(None),
}
# As Python and as JSON spell them; Qwen3.5 is shown the former.
_WORDS = {'True': True, 'False': False, 'None': None}


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """One call.

  Attributes:
    name: of the tool; '' when it cannot be told.
    arguments: by parameter; empty when there is a problem.
    text: the call as it was written, tags included.
    problem: what keeps the call from being made; '' when nothing does.
  """

  name: str
  arguments: Mapping[str, Any]
  text: str = ''
  problem: str = ''


@dataclasses.dataclass(frozen=True)
class Answer:
  """A turn's text, taken apart.

  Attributes:
    text: what stands outside the calls, without white space around it.
    calls: in order, those with problems included.
  """

  text: str
  calls: tuple[ToolCall, ...]


@dataclasses.dataclass(frozen=True)
class ToolFormat:
  """How a family writes tools and calls.

  Attributes:
    name: json or xml.
    tags: what shows a call, or the rest of one.
    system: (system text, tools) -> the system turn's text.
    write: calls -> the text of a turn that makes them.
    read: (text, index behind the opening tag) -> name, arguments and the index
      before the closing tag.
  """

  name: str
  tags: re.Pattern[str]
  system: Callable[[str, Sequence[Mapping[str, Any]]], str]
  write: Callable[[Sequence[ToolCall]], str]
  read: Callable[[str, int], tuple[str, Any, int]]

  def results(self, texts: Sequence[str]) -> str:
    """Returns the text of the one user turn that holds tools' results."""
    return '\n'.join(
      f'<tool_response>\n{text}\n</tool_response>' for text in texts
    )

  def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Answer:
    """Takes a sampled turn apart.

    Args:
      text: the turn without its thinking block and end token.
      tools: what may be called, in OpenAI's form. JSON has types of its own;
        XML parameters get those of the tool's schema.

    Returns:
      The calls, and the text around them. A tag without its partner is a call
      with a problem.
    """
    known = {t['function']['name']: t['function'] for t in tools}
    outside, calls, start = [], [], 0
    while tag := self.tags.search(text, start):
      outside.append(text[start : tag.start()])
      if tag[0] == _OPEN:
        call, start = self._call(text, tag.start(), known)
      else:
        start = _end_of_broken(text, tag.end())
        call = _broken(text[tag.start() : start], f'{tag[0]} outside a call')
      calls.append(call)
    outside.append(text[start:])
    return Answer(''.join(outside).strip(), tuple(calls))

  def _call(
    self, text: str, start: int, known: Mapping[str, Mapping[str, Any]]
  ) -> tuple[ToolCall, int]:
    """Returns the call whose opening tag is at `start`, and where it ends."""
    try:
      name, arguments, stop = self.read(text, start + len(_OPEN))
      stop = _expect(text, stop, _CLOSE)
    except _Malformed as problem:
      stop = _end_of_broken(text, start + len(_OPEN))
      return _broken(text[start:stop], str(problem), problem.name), stop
    written = text[start:stop]
    try:
      if name not in known:
        raise _Malformed(
          f'there is no tool {name!r}; there are '
          + (', '.join(known) or 'none at all')
        )
      if self.name == 'xml':
        arguments = _typed(arguments, known[name])
    except _Malformed as problem:
      return _broken(written, str(problem), name), stop
    return ToolCall(name, arguments, written), stop


def check(tools: Sequence[Mapping[str, Any]]) -> None:
  """Refuses descriptions of tools that calls could not be held against.

  Raises:
    ValueError: a name is missing or there twice; a parameter has a type that
      JSON has not.
  """
  names = []
  for tool in tools:
    try:
      function = tool['function']
      names.append(function['name'])
      properties = function.get('parameters', {}).get('properties', {})
      kinds = {key: _types(schema) for key, schema in properties.items()}
    except (TypeError, KeyError, AttributeError) as error:
      raise ValueError(
        f'a tool must have function.name and JSON schemas in '
        f'function.parameters.properties: {tool!r} ({error!r})'
      ) from error
    for key, types in kinds.items():
      if strange := [kind for kind in types if kind not in _JSON_TYPES]:
        raise ValueError(
          f'{names[-1]}: the type of {key} ({strange[0]!r}) must be one of '
          + ', '.join(_JSON_TYPES)
        )
  if len(set(names)) < len(names):
    raise ValueError(f'tools must have different names, not {names}')


class _Malformed(Exception):
  """What is wrong with a call; never leaves this module."""

  def __init__(self, problem: str, name: str = ''):
    super().__init__(problem)
    self.name = name


def _broken(text: str, problem: str, name: str = '') -> ToolCall:
  return ToolCall(name, {}, text, problem)


def _end_of_broken(text: str, start: int) -> int:
  """Returns where a broken call ends: after its closing tag or at the next."""
  if tag := _TAGS.search(text, start):
    return tag.start() if tag[0] == _OPEN else tag.end()
  return len(text)


def _expect(text: str, start: int, token: str, name: str = '') -> int:
  """Returns the index behind white space and a token, or raises."""
  start = _skip_space(text, start)
  if not text.startswith(token, start):
    found = repr(text[start : start + 20]) if start < len(text) else 'the end'
    raise _Malformed(f'{token} expected, not {found}', name)
  return start + len(token)


def _skip_space(text: str, start: int) -> int:
  while start < len(text) and text[start].isspace():
    start += 1
  return start


def _read_json(text: str, start: int) -> tuple[str, Any, int]:
  """Reads `{"name": ..., "arguments": {...}}`; strings may hold any tag."""
  start = _skip_space(text, start)
  try:
    call, stop = _DECODER.raw_decode(text, start)
  except (ValueError, RecursionError) as error:
    raise _Malformed(f'not a JSON object: {error}') from error
  if not isinstance(call, dict):
    raise _Malformed(f'a JSON object is needed, not {text[start:stop][:80]}')
  name = call.get('name')
  if not isinstance(name, str) or not name:
    raise _Malformed(f'name ({name!r}) must be the name of a tool')
  arguments = call.get('arguments')
  if not isinstance(arguments, dict):
    raise _Malformed(f'arguments ({arguments!r}) must be an object', name)
  try:
    json.dumps(arguments, ensure_ascii=False).encode()
  except UnicodeEncodeError as error:
    raise _Malformed(
      f'arguments hold half a character: {error}', name
    ) from error
  surplus = sorted(call.keys() - {'name', 'arguments'})
  if surplus:
    raise _Malformed(f'only name and arguments, not {surplus[0]!r}', name)
  return name, arguments, stop


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  fields = dict(pairs)
  if len(fields) < len(pairs):
    raise ValueError('a key is there twice')
  return fields


def _no_number(text: str) -> Any:
  raise ValueError(f'{text} is no JSON')


def _finite(text: str) -> float:
  number = float(text)
  if math.isinf(number):
    raise ValueError(f'{text} is too large')
  return number


_DECODER = json.JSONDecoder(
  object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite
)


def _read_xml(text: str, start: int) -> tuple[str, Any, int]:
  """Reads `<function=name>` and its parameters, each a text still."""
  name, start = _tag_value(text, _expect(text, start, '<function='))
  arguments: dict[str, str] = {}
  while True:
    start = _skip_space(text, start)
    if text.startswith('</function>', start):
      return name, arguments, start + len('</function>')
    start = _expect(text, start, '<parameter=', name)
    key, start = _tag_value(text, start, name)
    stop = text.find('</parameter>', start)
    value = text[start:stop]
    if stop < 0 or '<parameter=' in value:
      raise _Malformed(f'<parameter={key}> is not closed', name)
    if key in arguments:
      raise _Malformed(f'<parameter={key}> is there twice', name)
    arguments[key] = value.removeprefix('\n').removesuffix('\n')
    start = stop + len('</parameter>')


def _tag_value(text: str, start: int, name: str = '') -> tuple[str, int]:
  """Returns the name in a tag and the index behind the tag."""
  found = re.compile(r'\s*([^\s<>]+)\s*>').match(text, start)
  if not found:
    raise _Malformed(
      f'a name and > expected: {text[start : start + 20]!r}', name
    )
  return found[1], found.end()


def _typed(
  texts: Mapping[str, str], function: Mapping[str, Any]
) -> dict[str, Any]:
  """Gives XML parameters the types of the tool's schema."""
  properties = function.get('parameters', {}).get('properties', {})
  arguments = {}
  for key, text in texts.items():
    if key not in properties:
      raise _Malformed(
        f'there is no parameter {key!r}; there are '
        + (', '.join(properties) or 'none at all')
      )
    types = _types(properties[key])
    arguments[key] = text if 'string' in types else _value(key, text, types)
  return arguments


def _types(schema: Mapping[str, Any]) -> list[str]:
  """Returns the JSON types that a schema allows; text where it says none."""
  if 'anyOf' in schema:
    return [kind for option in schema['anyOf'] for kind in _types(option)]
  kinds = schema.get('type', 'string')
  return [kinds] if isinstance(kinds, str) else list(kinds)


def _value(key: str, text: str, types: Sequence[str]) -> Any:
  text = text.strip()
  try:
    value = _WORDS[text] if text in _WORDS else _DECODER.decode(text)
  except (ValueError, RecursionError):
    value = text
  for kind in types:
    # True is an int to Python, not to JSON.
    is_bool = isinstance(value, bool)
    if isinstance(value, _JSON_TYPES[kind]) and is_bool == (kind == 'boolean'):
      return value
  raise _Malformed(f'{key} ({text[:80]!r}) must be {" or ".join(types)}')


def _json(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False)


def _write_json(calls: Sequence[ToolCall]) -> str:
  return '\n'.join(
    f'{_OPEN}\n{{"name": "{call.name}", "arguments": '
    f'{_json(dict(call.arguments))}}}\n{_CLOSE}'
    for call in calls
  )


def _write_xml(calls: Sequence[ToolCall]) -> str:
  """Writes containers as JSON, other values as Python does."""
  return '\n'.join(
    f'{_OPEN}\n<function={call.name}>\n'
    + ''.join(
      f'<parameter={key}>\n'
      f'{_json(value) if isinstance(value, dict | list) else value}\n'
      '</parameter>\n'
      for key, value in call.arguments.items()
    )
    + f'</function>\n{_CLOSE}'
    for call in calls
  )


def _list_of(tools: Sequence[Mapping[str, Any]]) -> str:
  lines = ''.join(f'\n{_json(dict(tool))}' for tool in tools)
  return f'<tools>{lines}\n</tools>'


def _json_system(text: str, tools: Sequence[Mapping[str, Any]]) -> str:
  """Returns the system text, then what Qwen3 is told about its tools."""
  before = f'{text}\n\n' if text else ''
  return (
    f'{before}# Tools\n\nYou may call one or more functions to assist with the '
    'user query.\n\nYou are provided with function signatures within '
    f'<tools></tools> XML tags:\n{_list_of(tools)}\n\nFor each function call, '
    'return a json object with function name and arguments within '
    f'{_OPEN}{_CLOSE} XML tags:\n{_OPEN}\n{{"name": <function-name>, '
    f'"arguments": <args-json-object>}}\n{_CLOSE}'
  )


def _xml_system(text: str, tools: Sequence[Mapping[str, Any]]) -> str:
  """Returns what Qwen3.5 is told about its tools, then the system text."""
  example = (
    f'{_OPEN}\n<function=example_function_name>\n'
    '<parameter=example_parameter_1>\nvalue_1\n</parameter>\n'
    '<parameter=example_parameter_2>\nThis is the value for the second '
    'parameter\nthat can span\nmultiple lines\n</parameter>\n</function>\n'
    f'{_CLOSE}'
  )
  reminders = (
    'Function calls MUST follow the specified format: an inner '
    '<function=...></function> block must be nested within '
    f'{_OPEN}{_CLOSE} XML tags',
    'Required parameters MUST be specified',
    'You may provide optional reasoning for your function call in natural '
    'language BEFORE the function call, but NOT after',
    'If there is no function call available, answer the question like normal '
    'with your current knowledge and do not tell the user about function calls',
  )
  lines = ''.join(f'\n- {reminder}' for reminder in reminders)
  after = f'\n\n{text}' if text else ''
  return (
    '# Tools\n\nYou have access to the following functions:\n\n'
    f'{_list_of(tools)}\n\nIf you choose to call a function ONLY reply in the '
    f'following format with NO suffix:\n\n{example}\n\n<IMPORTANT>\nReminder:'
    f'{lines}\n</IMPORTANT>{after}'
  )


JSON = ToolFormat('json', _TAGS, _json_system, _write_json, _read_json)
XML = ToolFormat(
  'xml',
  re.compile('</?tool_call>|<function=|<parameter='),
  _xml_system,
  _write_xml,
  _read_xml,
)
