"""Keys and values of earlier tokens, as attention reads them."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Positions in the first piece of a cache.
SHORTEST = 128


class KVCache(NamedTuple):
  """What one layer keeps of earlier tokens.

  It lies in pieces, one range of positions after another: those that hold
  nothing yet need not be read, and leaving an array out copies nothing, while
  the beginning of a long one is a copy.

  Attributes:
    keys: pieces [B, KV, D, T_i]; a dimension's lie together, as a query's
      products with all of them read them.
    values: pieces [B, KV, T_i, D].
  """

  keys: tuple[jax.Array, ...]
  values: tuple[jax.Array, ...]


def ends(length: int, shortest: int = SHORTEST) -> list[int]:
  """Returns where the pieces of a cache end; the last one ends at its length.

  From the third on each is about half as long as all before it: few are enough
  for any length, and at most a third of what is read is then read in vain.

  Args:
    length: positions in the cache.
    shortest: in the first piece.
  """
  found = [min(shortest, length)]
  while found[-1] < length:
    longer = max(1, found[-1] // (2 * shortest)) * shortest
    found.append(min(found[-1] + longer, length))
  return found


def empty(
  batch: int,
  heads: int,
  width: int,
  pieces: Sequence[int],
  dtype: jax.typing.DTypeLike,
) -> KVCache:
  """Returns zeros for heads of a width, in pieces that end at positions."""
  lengths = np.diff(pieces, prepend=0).tolist()
  return KVCache(
    tuple(jnp.zeros((batch, heads, width, n), dtype) for n in lengths),
    tuple(jnp.zeros((batch, heads, n, width), dtype) for n in lengths),
  )


def write(
  cache: KVCache,
  keys: jax.Array,
  values: jax.Array,
  positions: jax.Array,
  rows: jax.Array | None = None,
) -> KVCache:
  """Returns the cache with new keys and values.

  Args:
    cache: of B rows.
    keys: [P, S, KV, D].
    values: as keys.
    positions: [P, S] int32; those at or above T are not written.
    rows: [P] int32; which of the B are written; one beyond the last is none.
      None when they are all, in their order.
  """
  if rows is None:
    rows = jnp.arange(len(keys))
  row, head = rows[:, None, None], jnp.arange(keys.shape[2])[None, None]
  new_keys, new_values, start = [], [], 0
  for held_keys, held_values in zip(cache.keys, cache.values, strict=True):
    place = positions[:, :, None] - start
    # Not below 0: an index there would count from the end.
    place = jnp.where(place < 0, held_values.shape[2], place)
    new_keys.append(
      held_keys.at[row, head, :, place].set(
        keys.astype(held_keys.dtype), mode='drop'
      )
    )
    new_values.append(
      held_values.at[row, head, place].set(
        values.astype(held_values.dtype), mode='drop'
      )
    )
    start += held_values.shape[2]
  return KVCache(tuple(new_keys), tuple(new_values))


def read(cache: KVCache, rows: jax.Array | None = None) -> KVCache:
  """Returns what P of the B rows have; all, when `rows` is None."""
  if rows is None:
    return cache
  return jax.tree.map(lambda piece: piece[rows], cache)


def length(caches: Sequence[Any]) -> int:
  """Returns how many positions layers' caches hold; 0 if none has keys."""
  return next(
    (
      sum(values.shape[2] for values in cache.values)
      for cache in caches
      if isinstance(cache, KVCache)
    ),
    0,
  )


def below(caches: Sequence[Any], end: int) -> tuple[Any, ...]:
  """Returns layers' caches up to the end of a piece.

  Caches of another kind stay as they are.
  """

  def cut(cache):
    if not isinstance(cache, KVCache):
      return cache
    lengths = itertools.accumulate(v.shape[2] for v in cache.values)
    count = sum(1 for total in lengths if total <= end)
    return KVCache(cache.keys[:count], cache.values[:count])

  return tuple(cut(cache) for cache in caches)


def put_below(caches: Sequence[Any], parts: Sequence[Any]) -> tuple[Any, ...]:
  """Returns caches with what has become of that which `below` gave."""

  def put(whole, part):
    if not isinstance(whole, KVCache):
      return part
    rest = len(part.keys)
    return KVCache(
      part.keys + whole.keys[rest:], part.values + whole.values[rest:]
    )

  return tuple(
    put(whole, part) for whole, part in zip(caches, parts, strict=True)
  )
