"""A word-level tokenizer with whole entities, and the episode's template.

Small policies learn household text in minutes when an entity ("mug 1") and a
two-word command ("go to") are one token each. Built with `tokenizers`, saved
as tokenizer.json beside the model.
"""

import hashlib
import json
import pathlib
from collections.abc import Iterable

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

PAD, UNKNOWN, BEGIN, TURN, END = '<pad>', '<unk>', '<begin>', '<turn>', '<end>'
_SPECIAL = (PAD, UNKNOWN, BEGIN, TURN, END)
# Leftmost alternative first: fixed phrases of the game's texts, a numbered
# entity, a word, a punctuation mark.
_PHRASES = (
  r'-= Welcome to TextWorld, ALFRED! =-',
  r'You are in the middle of a room\. Looking quickly around you, you see an?',
  r'\.\s+Your task is to:',
  r'You arrive at',
  r'You are facing the',
  r'\. Next to it, you see nothing\.',
  r'\. On the',
  r'\. The',
  r'is closed\.',
  r'is open\. In it',
  r', you see nothing\.',
  r', you see an?',
  r', and an?',
  r', an?',
  r'You pick up the',
  r'You move the',
  r'You open the',
  r'You close the',
  r'You are carrying: an?',
  r'You are not carrying anything\.',
  r'Nothing happens\.',
  r"There's nothing special about",
  r'from the',
  r'to the',
  r'go to',
)
_WORDS = r'[a-zA-Z]+ \d+|[a-zA-Z]+|\d+|[^\sa-zA-Z\d]'


def check_text(text: str) -> None:
  """Raises ValueError where a text holds half a character."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(f'text holds half a character: {error}') from error


class WordTokenizer:
  """Maps text to ids and sampled ids back to the command they spell.

  Every token of the text is separated by white space when decoded, which
  gives commands back exactly ("take mug 1 from desk 1").
  """

  def __init__(self, tokenizer: tokenizers.Tokenizer):
    self._tokenizer = tokenizer
    missing = [t for t in _SPECIAL if tokenizer.token_to_id(t) is None]
    if missing:
      raise ValueError(
        f'the tokenizer lacks {", ".join(missing)}; build it with '
        'WordTokenizer.build'
      )
    vocabulary = tokenizer.get_vocab()
    self.begin_id: int = vocabulary[BEGIN]
    self.turn_id: int = vocabulary[TURN]
    self.end_id: int = vocabulary[END]

  @classmethod
  def build(cls, texts: Iterable[str]) -> 'WordTokenizer':
    """Returns a tokenizer that knows every word of the texts.

    Args:
      texts: observations and commands that cover the words in use.
    """
    splitter = _splitter()
    words = sorted(
      {word for text in texts for word, _ in splitter.pre_tokenize_str(text)}
    )
    vocabulary = {word: i for i, word in enumerate((*_SPECIAL, *words))}
    tokenizer = tokenizers.Tokenizer(
      models.WordLevel(vocabulary, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = splitter
    return cls(tokenizer)

  @classmethod
  def load(cls, path: str | pathlib.Path) -> 'WordTokenizer':
    """Reads a tokenizer.json; ValueError names a missing or broken file."""
    tokenizer = read(path)
    try:
      return cls(tokenizer)
    except ValueError as error:
      raise ValueError(f'{path}: {error}') from error

  @property
  def files(self) -> dict[str, bytes]:
    """What a policy directory holds of it; transformers reads it there."""
    settings = {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'clean_up_tokenization_spaces': False,
      'pad_token': PAD,
      'unk_token': UNKNOWN,
      'bos_token': BEGIN,
      'eos_token': END,
    }
    return {
      'tokenizer.json': self._tokenizer.to_str(pretty=True).encode(),
      'tokenizer_config.json': json.dumps(settings, indent=2).encode() + b'\n',
    }

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """The ids that end a turn: `<end>` alone."""
    return (self.end_id,)

  @property
  def vocab_size(self) -> int:
    """Number of ids."""
    return self._tokenizer.get_vocab_size()

  @property
  def fingerprint(self) -> str:
    """Sha256 hex digest of the vocabulary and the splitting rules."""
    return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

  def encode(self, text: str) -> np.ndarray:
    """Returns [T] int32 ids; unknown words become `<unk>`.

    Raises:
      ValueError: half a character, which no text in UTF-8 has.
    """
    check_text(text)
    return np.asarray(self._tokenizer.encode(text).ids, np.int32)

  def decode(self, tokens: Iterable[int]) -> str:
    """Returns the tokens' texts joined by single spaces."""
    words = (self._tokenizer.id_to_token(int(t)) for t in tokens)
    return ' '.join(word or UNKNOWN for word in words)

  def prompt(self, observation: str) -> np.ndarray:
    """Returns [T] int32: `<begin>`, the first observation, `<turn>`."""
    ids = self.encode(observation)
    return np.concatenate([[self.begin_id], ids, [self.turn_id]]).astype(
      np.int32
    )

  def observation(self, observation: str, turn: np.ndarray) -> np.ndarray:
    """Returns [T] int32 appended after a turn: the text, `<turn>`.

    Args:
      observation: what the turn led to.
      turn: the ids of that turn; nothing is closed, also after a cut one.
    """
    del turn
    ids = self.encode(observation)
    return np.concatenate([ids, [self.turn_id]]).astype(np.int32)

  def action(self, command: str) -> np.ndarray:
    """Returns [T] int32: a command as a policy spells it, with `<end>`."""
    return np.concatenate([self.encode(command), [self.end_id]]).astype(
      np.int32
    )

  def action_text(self, tokens: np.ndarray) -> str:
    """Returns the command that sampled ids spell, without the end token."""
    return self.decode([t for t in tokens if t != self.end_id])


def read(path: str | pathlib.Path) -> tokenizers.Tokenizer:
  """Reads a tokenizer.json of any kind; ValueError names a broken file."""
  try:
    text = pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'cannot read the tokenizer {path}: {error}') from error
  try:
    return tokenizers.Tokenizer.from_str(text)
  except Exception as error:
    raise ValueError(f'{path} is not a tokenizer: {error}') from error


def _splitter() -> pre_tokenizers.PreTokenizer:
  pattern = '|'.join((*(phrase + r'(?!\w)' for phrase in _PHRASES), _WORDS))
  # Inverted and removed: what no alternative matches (white space) is dropped.
  return pre_tokenizers.Split(
    tokenizers.Regex(pattern), behavior='removed', invert=True
  )
