"""A conversation in ids: a pretrained tokenizer and a chat format joined."""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spopp_jax.models import chat_formats, tool_calls
from spopp_jax.models import tokenizer as tokenizer_lib


class ChatTemplate:
  """Writes what stands around sampled turns; a `sampler.rollout.Template`.

  Prompt and observations are ids to be appended. Sampled ids are neither
  changed nor encoded anew, so what a policy was shown is always what it had
  been shown, what it sampled, and more.

  A special token comes from the format alone: text that spells one is text.
  Between two special tokens all text is encoded at once, as the family's own
  template is.
  """

  def __init__(
    self,
    tokenizer: tokenizer_lib.PretrainedTokenizer,
    chat_format: chat_formats.ChatFormat,
    *,
    system: str = '',
    tools: Sequence[Mapping[str, Any]] = (),
  ):
    """Joins the two.

    Args:
      tokenizer: has the format's special tokens.
      chat_format: one of `chat_formats.FORMATS`.
      system: words of the system turn; '' takes the format's own.
      tools: what the policy may call, in OpenAI's form.

    Raises:
      ValueError: a special token is missing; tools that are not described
        well, or that the format has no way to write.
    """
    tool_calls.check(tools)
    self._tokenizer = tokenizer
    self._format = chat_format
    self._tools = tuple(tools)
    self._opening = functools.partial(
      chat_format.opening, system=system, tools=self._tools
    )
    try:
      self._marks = {m: tokenizer.special_id(m) for m in chat_format.marks}
    except ValueError as error:
      raise ValueError(
        f'the chat format {chat_format.name} does not fit: {error}'
      ) from error
    ends = {self._marks[end] for end in chat_format.ends}
    self._stop_ids = tuple(sorted({*tokenizer.stop_ids, *ends}))
    self._ends = ends
    self._fingerprint = self._digest()

  @property
  def fingerprint(self) -> str:
    """Sha256 hex digest of vocabulary, format, system text and tools."""
    return self._fingerprint

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """The ids that end a turn: the tokenizer's and the format's."""
    return self._stop_ids

  def prompt(self, observation: str) -> np.ndarray:
    """Returns [k] int32 up to the first turn to be sampled.

    Args:
      observation: the first user's text.
    """
    return self._ids(self._opening([chat_formats.Message('user', observation)]))

  def observation(self, observation: str, turn: np.ndarray) -> np.ndarray:
    """Returns [k] int32 from the turn just sampled to the next to be sampled.

    Args:
      observation: what the turn led to: a tool's result if there are tools and
        the turn calls one, else the next user's text.
      turn: [n] int32; its sampled ids.
    """
    calls: Sequence[tool_calls.ToolCall] = ()
    if self._tools:
      calls = self.parse(turn).calls
    role = 'tool' if calls else 'user'
    return self.following([chat_formats.Message(role, observation)], turn)

  def following(
    self, messages: Sequence[chat_formats.Message], turn: np.ndarray
  ) -> np.ndarray:
    """Returns [k] int32 as `observation`, for any number of messages.

    Args:
      messages: tools' results in the order of the calls, users' texts.
      turn: [n] int32; the ids that were sampled before.
    """
    end_sampled = len(turn) > 0 and int(turn[-1]) in self._ends
    return self._ids(self._format.following(messages, end_sampled=end_sampled))

  def action_text(self, tokens: np.ndarray) -> str:
    """Returns what a turn says, without thinking and end token.

    Args:
      tokens: [n] int32; sampled ids.
    """
    if len(tokens) and int(tokens[-1]) in self._stop_ids:
      tokens = tokens[:-1]
    return self._format.answer(self._tokenizer.decode(tokens))

  def parse(self, tokens: np.ndarray) -> tool_calls.Answer:
    """Returns what a turn says and calls.

    Args:
      tokens: [n] int32; sampled ids.

    Raises:
      ValueError: there are no tools.
    """
    if not self._tools or self._format.tools is None:
      raise ValueError('there are no tools that could be called')
    return self._format.tools.parse(self.action_text(tokens), self._tools)

  def _ids(self, pieces: Sequence[str]) -> np.ndarray:
    ids: list[int] = []
    text = ''
    for piece in (*pieces, None):
      if piece is not None and not isinstance(piece, chat_formats.Mark):
        text += piece
        continue
      if text:
        ids.extend(self._tokenizer.encode(text).tolist())
        text = ''
      if piece is not None:
        ids.append(self._marks[piece])
    return np.asarray(ids, np.int32)

  def _digest(self) -> str:
    """Hashes what is written around words, so wording counts as well."""
    role = 'tool' if self._tools else 'user'
    shown = [
      chat_formats.Message(role, ' word '),
      chat_formats.Message(role, ''),
    ]
    parts = [
      self._tokenizer.fingerprint,
      self._stop_ids,
      self._format.name,
      self._opening([chat_formats.Message('user', ' word ')]),
      self._format.following(shown, end_sampled=False),
      self._format.following(shown, end_sampled=True),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
