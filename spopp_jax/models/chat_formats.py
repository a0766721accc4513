"""How each family of models writes a conversation, as text around its turns.

A conversation grows at its end only: an opening, a sampled turn, what follows
it, the next sampled turn. What was sampled is never written again, so thinking
stays in the history. The families' own templates do not all do so:

- Qwen3 and Qwen3.5 drop the thinking of turns before the last user message,
  and give the last turn an empty thinking block if it has none. Within the
  tool calls of one user message they keep it, as here.
- Llama 3 puts the day's date into its system turn. Here it is always the
  template's own fallback, 26 Jul 2024, so that runs repeat.

Otherwise the texts are those of the templates (`tests/golden/chat.json`).
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spopp_jax.models import tool_calls

_MARK = re.compile(r'(<\|[a-z_]+\|>)')


class Mark(str):
  """A special token, as opposed to text that spells one."""

  __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Message:
  """What is shown to the policy.

  Attributes:
    role: user, or tool for the result of one tool call.
    text: its words.
  """

  role: str
  text: str

  def __post_init__(self):
    if self.role not in ('user', 'tool'):
      raise ValueError(f'role ({self.role!r}) must be user or tool')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFormat:
  """The texts around messages; `<|name|>` in them is a special token.

  Attributes:
    name: key in FORMATS.
    begin: starts a conversation.
    system: starts the system turn.
    user: starts a user's turn.
    assistant: starts a turn to be sampled, thinking block included.
    ends: tokens that end a turn; the first is written when none was sampled.
      None of them: a turn just stops.
    after_end: stands between the end of a turn and the next.
    default_system: words of the system turn when none are given; '' leaves
      the turn out.
    system_begin: words that every system turn starts with; the turn is then
      always there.
    thinks: answers may begin with a thinking block, which is no part of what
      the environment is told.
    trims: white space around messages is dropped.
    tools: how tool calls are written; None when the family has no such format
      here.
  """

  name: str
  begin: str = ''
  system: str
  user: str
  assistant: str
  ends: tuple[str, ...]
  after_end: str
  default_system: str = ''
  system_begin: str = ''
  thinks: bool = False
  trims: bool = False
  tools: tool_calls.ToolFormat | None = None

  @property
  def marks(self) -> tuple[str, ...]:
    """The special tokens that a tokenizer must have."""
    texts = (self.begin, self.system, self.user, self.assistant, *self.ends)
    found = (mark for text in texts for mark in _MARK.findall(text))
    return tuple(dict.fromkeys(found))

  def opening(
    self,
    messages: Sequence[Message],
    *,
    system: str = '',
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> list[str]:
    """Returns the pieces up to the first turn to be sampled.

    Args:
      messages: what stands before it.
      system: words of the system turn; '' takes the format's own.
      tools: descriptions of tools in OpenAI's form (`type`, `function` with
        `name`, `description` and the JSON schema `parameters`).

    Returns:
      `Mark`s and texts; joined, they are the prompt in characters.

    Raises:
      ValueError: tools, and the format has none.
    """
    words = self._trim(system) or self.default_system
    if tools:
      words = self._tools().system(words, tools)
    words = self.system_begin + words
    turn = self._turn(self.system, words) if words else []
    return [*_control(self.begin), *turn, *self._turns(messages)]

  def following(
    self, messages: Sequence[Message], *, end_sampled: bool
  ) -> list[str]:
    """Returns the pieces from a sampled turn up to the next to be sampled.

    Args:
      messages: what the turn led to.
      end_sampled: False when the turn was cut before one of `ends`.

    Raises:
      ValueError: a tool's result, and the format has no tools.
    """
    end = [] if end_sampled else _control(''.join(self.ends[:1]))
    return [*end, *_control(self.after_end), *self._turns(messages)]

  def answer(self, text: str) -> str:
    """Returns a sampled turn's text without its thinking block.

    That is all after the last `</think>`; nothing when a turn was cut while
    thinking.
    """
    if not self.thinks:
      return text
    _, closed, answer = text.rpartition('</think>')
    if not closed:
      opened = '<think>' in text or self.assistant.endswith('<think>\n')
      return '' if opened else text
    return answer.lstrip('\n')

  def _turns(self, messages: Sequence[Message]) -> list[str]:
    pieces: list[str] = []
    results: list[str] = []
    for i, message in enumerate(messages):
      text = self._trim(message.text)
      if message.role == 'tool':
        results.append(text)
        if i + 1 < len(messages) and messages[i + 1].role == 'tool':
          continue
        text, results = self._tools().results(results), []
      pieces += self._turn(self.user, text)
    return [*pieces, *_control(self.assistant)]

  def _turn(self, start: str, text: str) -> list[str]:
    end = ''.join(self.ends[:1]) + self.after_end
    return [*_control(start), text, *_control(end)]

  def _trim(self, text: str) -> str:
    return text.strip() if self.trims else text

  def _tools(self) -> tool_calls.ToolFormat:
    if self.tools is None:
      having = ', '.join(n for n, f in FORMATS.items() if f.tools is not None)
      raise ValueError(
        f'the chat format {self.name} has no tools; these have: {having}'
      )
    return self.tools


def _control(text: str) -> list[str]:
  """Splits a text of the format itself into `Mark`s and text."""
  return [
    Mark(piece) if _MARK.fullmatch(piece) else piece
    for piece in _MARK.split(text)
    if piece
  ]


def _chatml(name: str, *, thought: str = '', **fields: Any) -> ChatFormat:
  return ChatFormat(
    name=name,
    system='<|im_start|>system\n',
    user='<|im_start|>user\n',
    assistant=f'<|im_start|>assistant\n{thought}',
    ends=('<|im_end|>',),
    after_end='\n',
    **fields,
  )


def _by_name(formats: Iterable[ChatFormat]) -> dict[str, ChatFormat]:
  return {chat_format.name: chat_format for chat_format in formats}


_NO_THOUGHT = '<think>\n\n</think>\n\n'
_LLAMA3_HEADER = '<|start_header_id|>{}<|end_header_id|>\n\n'
FORMATS = _by_name(
  (
    # Base models: a question and its answer, up to the end of the text.
    ChatFormat(
      name='plain',
      system='',
      user='Question: ',
      assistant='Answer:',
      ends=(),
      after_end='\n',
    ),
    # Qwen3 opens its thinking block itself, or is given an empty one.
    _chatml('qwen3', thinks=True, tools=tool_calls.JSON),
    _chatml(
      'qwen3_nothink', thought=_NO_THOUGHT, thinks=True, tools=tool_calls.JSON
    ),
    # Qwen3.5 is given the opening; its small models by default an empty block.
    _chatml(
      'qwen3_5',
      thought='<think>\n',
      thinks=True,
      trims=True,
      tools=tool_calls.XML,
    ),
    _chatml(
      'qwen3_5_nothink',
      thought=_NO_THOUGHT,
      thinks=True,
      trims=True,
      tools=tool_calls.XML,
    ),
    _chatml(
      'smollm2',
      default_system='You are a helpful AI assistant named SmolLM, trained by '
      'Hugging Face',
    ),
    ChatFormat(
      name='llama3',
      begin='<|begin_of_text|>',
      system=_LLAMA3_HEADER.format('system'),
      user=_LLAMA3_HEADER.format('user'),
      assistant=_LLAMA3_HEADER.format('assistant'),
      ends=('<|eot_id|>', '<|eom_id|>'),
      after_end='',
      system_begin='Cutting Knowledge Date: December 2023\n'
      'Today Date: 26 Jul 2024\n\n',
      trims=True,
    ),
  )
)
