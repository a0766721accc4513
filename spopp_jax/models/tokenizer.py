"""What a policy reads and writes ids with: words of the games, or pretrained.

Pretrained tokenizers are transformers' fast ones, which are imported when the
first is loaded (`pip install spopp_jax[models]`).
"""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import tokenizers

from spopp_jax.models import word_tokenizer

# What transformers and vLLM may look for; only tokenizer.json must be there.
FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  'generation_config.json',
)
# Ends of a turn or text in the families that are known here.
_STOP_TOKENS = (
  '<|im_end|>',
  '<|endoftext|>',
  '<|eot_id|>',
  '<|eom_id|>',
  '<|end_of_text|>',
)


class Tokenizer(Protocol):
  """The tokenizer of a policy directory."""

  @property
  def vocab_size(self) -> int:
    """Number of ids, the highest one plus 1."""

  @property
  def fingerprint(self) -> str:
    """Sha256 hex digest of the vocabulary and the splitting rules."""

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """The ids that end a turn."""

  @property
  def files(self) -> dict[str, bytes]:
    """Name -> content of what a policy directory holds of it."""

  def encode(self, text: str) -> np.ndarray:
    """Returns [T] int32; text never gives a special token."""

  def decode(self, tokens: Iterable[int]) -> str:
    """Returns the text of ids, special tokens included."""


class PretrainedTokenizer:
  """A fast tokenizer of transformers and the files that it was read from.

  The stop ids are `eos_token_id` of generation_config.json where that names
  any; else the tokenizer's own end of sequence and, of `<|im_end|>`,
  `<|endoftext|>`, `<|eot_id|>`, `<|eom_id|>` and `<|end_of_text|>`, those that
  are special tokens of it.
  """

  def __init__(self, fast: Any, files: Mapping[str, bytes]):
    """Takes a `PreTrainedTokenizerFast` and the files it was made from.

    Raises:
      ValueError: eos_token_id of generation_config.json names no id, or there
        is nothing that could end a turn.
    """
    self._fast = fast
    self._files = dict(files)
    ids = fast.get_vocab().values()
    self._vocab_size = 1 + max(ids)
    self._special = {
      token.content: token_id
      for token_id, token in fast.added_tokens_decoder.items()
      if token.special
    }
    self._fingerprint = hashlib.sha256(
      fast.backend_tokenizer.to_str().encode()
    ).hexdigest()
    self._stop_ids = self._find_stop_ids()

  @classmethod
  def load(cls, directory: str | pathlib.Path) -> 'PretrainedTokenizer':
    """Reads the tokenizer files of a directory; nothing is downloaded.

    Raises:
      ValueError: naming the file or directory that transformers cannot read.
      ModuleNotFoundError: transformers is not installed.
    """
    directory = pathlib.Path(directory)
    files = {
      name: (directory / name).read_bytes()
      for name in FILES
      if (directory / name).is_file()
    }
    if 'tokenizer.json' not in files:
      raise ValueError(f'{directory} has no tokenizer.json')
    transformers = _package()
    try:
      fast = transformers.AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
      )
    except Exception as error:  # transformers raises of many kinds
      raise ValueError(
        f'transformers cannot read the tokenizer in {directory}: {error}'
      ) from error
    if not fast.is_fast:
      raise ValueError(
        f'the tokenizer in {directory} ({type(fast).__name__}) must be a fast '
        'one'
      )
    try:
      return cls(fast, files)
    except ValueError as error:
      raise ValueError(f'{directory}: {error}') from error

  @property
  def vocab_size(self) -> int:
    """Number of ids, the highest one plus 1; the model may have more."""
    return self._vocab_size

  @property
  def fingerprint(self) -> str:
    """Sha256 hex digest of the vocabulary and the splitting rules."""
    return self._fingerprint

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """The ids that end a turn, in increasing order."""
    return self._stop_ids

  @property
  def files(self) -> dict[str, bytes]:
    """The files as they were read, by name."""
    return dict(self._files)

  def special_id(self, token: str) -> int:
    """Returns the id of a special token; ValueError when it is none."""
    if token not in self._special:
      raise ValueError(
        f'{token} is no special token of this tokenizer; there are '
        + ', '.join(self._special)
      )
    return self._special[token]

  def encode(self, text: str) -> np.ndarray:
    """Returns [T] int32.

    Text that spells a special token (`<|im_end|>`) is split like any other
    text. Tokens that were added but are not special (`<think>`) are found.

    Raises:
      ValueError: half a character, which no text in UTF-8 has.
    """
    word_tokenizer.check_text(text)
    ids = self._fast.encode(
      text, add_special_tokens=False, split_special_tokens=True
    )
    return np.asarray(ids, np.int32)

  def decode(self, tokens: Iterable[int]) -> str:
    """Returns the text of ids as it is, without any cleaning of spaces.

    Ids without a token, which a padded vocabulary has, give no text.
    """
    return self._fast.decode(
      [int(token) for token in tokens],
      skip_special_tokens=False,
      clean_up_tokenization_spaces=False,
    )

  def _find_stop_ids(self) -> tuple[int, ...]:
    name = 'generation_config.json'
    if name in self._files:
      try:
        said = json.loads(self._files[name])['eos_token_id']
      except KeyError:
        said = None
      except (ValueError, TypeError) as error:
        raise ValueError(f'cannot read {name}: {error}') from error
      if said is not None:
        ids = said if isinstance(said, list) else [said]
        if not ids or not all(
          type(i) is int and 0 <= i < self.vocab_size for i in ids
        ):
          raise ValueError(
            f'eos_token_id ({said!r}) of {name} must be one or more ids in '
            f'[0, {self.vocab_size})'
          )
        return tuple(sorted(set(ids)))
    found = {self._special[t] for t in _STOP_TOKENS if t in self._special}
    if self._fast.eos_token_id is not None:
      found.add(self._fast.eos_token_id)
    if not found:
      raise ValueError(
        f'nothing can end a turn: give eos_token_id in {name}, or eos_token in '
        'tokenizer_config.json'
      )
    return tuple(sorted(found))


def load(directory: str | pathlib.Path) -> Tokenizer:
  """Returns the tokenizer whose tokenizer.json the directory holds.

  One whose model is a list of words is `WordTokenizer`, any other is
  `PretrainedTokenizer`.

  Raises:
    ValueError: naming the file that is missing, broken or does not fit.
    ModuleNotFoundError: transformers is needed and not installed.
  """
  path = pathlib.Path(directory) / 'tokenizer.json'
  if isinstance(word_tokenizer.read(path).model, tokenizers.models.WordLevel):
    return word_tokenizer.WordTokenizer.load(path)
  return PretrainedTokenizer.load(directory)


def _package() -> Any:
  try:
    import transformers
  except ModuleNotFoundError as error:
    if error.name != 'transformers':
      raise
    raise ModuleNotFoundError(
      'pretrained tokenizers are read by the package transformers: '
      'pip install spopp_jax[models]',
      name='transformers',
    ) from error
  return transformers
