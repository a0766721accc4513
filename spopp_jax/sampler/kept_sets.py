"""What truncated decoding kept, on the host: read, joined and checked."""

from collections.abc import Sequence

import numpy as np

from spopp_jax import types

# A sum of probabilities may exceed 1 by its rounding, never by more.
MASS_CEILING = 1e-4


def from_bits(bits: np.ndarray, log_mass: np.ndarray) -> types.KeptIds:
  """Reads the sets of consecutive tokens.

  Args:
    bits: [k, W] uint8; id 8 w + b is kept where byte w has its bit 7 - b, as
      numpy.packbits lays them.
    log_mass: [k] float32 nats.

  Returns:
    The sets, ids rising within each.
  """
  token, ids = np.nonzero(np.unpackbits(bits, axis=1))
  sizes = np.bincount(token, minlength=len(bits))
  return types.KeptIds(ids.astype(np.int32), _offsets(sizes), log_mass)


def concatenate(pieces: Sequence[types.KeptIds]) -> types.KeptIds:
  """Joins the sets of consecutive stretches of action tokens.

  Args:
    pieces: at least one; a stretch may be empty.

  Returns:
    The sets of all their tokens in order; with log masses if all have them.
  """
  sizes = np.concatenate([np.diff(piece.offsets) for piece in pieces])
  ids = np.concatenate([piece.ids for piece in pieces])
  masses = [piece.log_mass for piece in pieces if piece.log_mass is not None]
  return types.KeptIds(
    ids.astype(np.int32),
    _offsets(sizes),
    np.concatenate(masses) if len(masses) == len(pieces) else None,
  )


def _offsets(sizes: np.ndarray) -> np.ndarray:
  offsets = np.zeros(len(sizes) + 1, np.int64)
  np.cumsum(sizes, out=offsets[1:])
  return offsets


def problem(kept: types.KeptIds, sampled: np.ndarray) -> str | None:
  """Says how sets are none that tokens can have been drawn from.

  Args:
    kept: the sets, unchecked.
    sampled: [L] int; the action tokens in order.

  Returns:
    The first fault in words; None when offsets rise from 0 to E and number
    L + 1, every set holds distinct ids >= 0, its own token among them, and log
    masses, if there are any, number L and are finite and at most 0.
  """
  ids, offsets = kept.ids, kept.offsets
  num_tokens = len(sampled)
  if len(offsets) != num_tokens + 1:
    return f'has {len(offsets)} offsets for {num_tokens} action tokens'
  if offsets[0] != 0 or offsets[-1] != len(ids):
    return f'has offsets from {offsets[0]} to {offsets[-1]} for {len(ids)} ids'
  # Compared, not subtracted: differences of hostile numbers overflow.
  falling = offsets[1:] <= offsets[:-1]
  if falling.any():
    return f'has offsets that do not rise at action {int(np.argmax(falling))}'
  if ids.min(initial=0) < 0:
    return f'has the id {ids.min()}'
  token = np.repeat(np.arange(num_tokens), np.diff(offsets))
  holds = np.zeros(num_tokens, bool)
  holds[token[ids == sampled[token]]] = True
  if not holds.all():
    index = int(np.argmin(holds))
    return f'lacks {sampled[index]}, the token drawn at action {index}'
  order = np.lexsort((ids, token))
  again = (np.diff(ids[order]) == 0) & (np.diff(token[order]) == 0)
  if again.any():
    index = order[int(np.argmax(again))]
    return f'has {ids[index]} twice at action {token[index]}'
  return _mass_problem(kept.log_mass, num_tokens)


def _mass_problem(log_mass: np.ndarray | None, num_tokens: int) -> str | None:
  if log_mass is None:
    return None
  if len(log_mass) != num_tokens:
    return f'has {len(log_mass)} log masses for {num_tokens} action tokens'
  wrong = ~((log_mass > -np.inf) & (log_mass <= MASS_CEILING))
  if wrong.any():
    index = int(np.argmax(wrong))
    return f'has the log mass {log_mass[index]} at action {index}'
  return None
