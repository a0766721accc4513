"""Which tokens the rows of a cache hold, and who can take them over."""

from collections.abc import Sequence

import numpy as np

NOBODY = -1


class CachedTokens:
  """The tokens in the cache of every slot, open or closed.

  A prompt that begins as another row does need not be fed: the row is copied.
  Where a row cannot be cut back (a recurrent state), it must be such a
  beginning as a whole.
  """

  def __init__(self, num_slots: int, max_context: int, *, can_cut: bool):
    """Starts with empty rows.

    Args:
      num_slots: rows.
      max_context: tokens that a row holds at most.
      can_cut: a row's first tokens are of use without the rest.
    """
    self._tokens = np.full((num_slots, max_context), -1, np.int32)
    self._lengths = np.zeros(num_slots, np.int64)
    self._can_cut = can_cut

  def clear(self) -> None:
    """Forgets all rows: other parameters made them."""
    self._lengths[:] = 0

  def write(self, slot: int, start: int, tokens: np.ndarray) -> None:
    """Notes [k] tokens fed at a position; what the row had after it is gone."""
    self._tokens[slot, start : start + len(tokens)] = tokens
    self._lengths[slot] = start + len(tokens)

  def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
    """Notes that rows were copied, all read before any was written.

    Args:
      copies: source, target and how many of the first tokens.
    """
    read = [
      self._tokens[source, :length].copy() for source, _, length in copies
    ]
    for (_, target, _), tokens in zip(copies, read, strict=True):
      self.write(target, 0, tokens)

  def longest(self, prompt: np.ndarray) -> tuple[int, int]:
    """Returns the row that has most of a prompt's beginning, and how much."""
    width = len(prompt)
    same = self._tokens[:, :width] == prompt
    same &= np.arange(width) < self._lengths[:, None]
    shared = _leading(same)
    if not self._can_cut:
      shared[shared < self._lengths] = 0
    slot = int(shared.argmax())
    return (slot, int(shared[slot])) if shared[slot] else (NOBODY, 0)

  def coming(self, prompt: np.ndarray, others: list[np.ndarray]) -> int:
    """Returns how much of a prompt's beginning will be there for it.

    Args:
      prompt: [k] int32.
      others: prompts that are being fed.
    """
    most = 0
    for other in others:
      width = min(len(prompt), len(other))
      shared = int(_leading((prompt[:width] == other[:width])[None])[0])
      if self._can_cut or shared == len(other):
        most = max(most, shared)
    return most


def _leading(same: np.ndarray) -> np.ndarray:
  """Returns how many entries of each row [n, k] come before one not set."""
  if not same.shape[1]:
    return np.zeros(len(same), np.int64)
  return np.where(same.all(axis=1), same.shape[1], (~same).argmax(axis=1))
