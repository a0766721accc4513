"""Keys and values of earlier tokens, as attention reads them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class KVCache(NamedTuple):
  """What one layer keeps of earlier tokens; T is the position.

  Attributes:
    keys: [B, KV, D, T]; a dimension's lie together, as a query's products with
      all of them read them.
    values: [B, KV, T, D].
  """

  keys: jax.Array
  values: jax.Array


def empty(
  batch: int,
  heads: int,
  length: int,
  width: int,
  dtype: jax.typing.DTypeLike,
) -> KVCache:
  """Returns zeros for `length` positions of heads of a width."""
  return KVCache(
    jnp.zeros((batch, heads, width, length), dtype),
    jnp.zeros((batch, heads, length, width), dtype),
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
  row, place = rows[:, None, None], positions[:, :, None]
  head = jnp.arange(keys.shape[2])[None, None]
  return KVCache(
    cache.keys.at[row, head, :, place].set(
      keys.astype(cache.keys.dtype), mode='drop'
    ),
    cache.values.at[row, head, place].set(
      values.astype(cache.values.dtype), mode='drop'
    ),
  )


def read(cache: KVCache, length: int, rows: jax.Array | None = None) -> KVCache:
  """Returns what rows have below a position; P for B, length for T."""
  if rows is None:
    return KVCache(cache.keys[..., :length], cache.values[:, :, :length])
  return KVCache(cache.keys[rows, ..., :length], cache.values[rows, :, :length])


def below(caches: Sequence[Any], length: int) -> tuple[Any, ...]:
  """Returns layers' caches of the positions below `length`.

  What `read` takes of them is then all they have, which a loop need not copy
  at each step. Caches of another kind stay as they are.
  """
  return tuple(
    read(cache, length) if isinstance(cache, KVCache) else cache
    for cache in caches
  )


def put_below(caches: Sequence[Any], parts: Sequence[Any]) -> tuple[Any, ...]:
  """Returns caches with what has become of that which `below` gave."""
  return tuple(
    _put(whole, part) if isinstance(whole, KVCache) else part
    for whole, part in zip(caches, parts, strict=True)
  )


def _put(whole: KVCache, part: KVCache) -> KVCache:
  length = part.values.shape[2]
  return KVCache(
    whole.keys.at[..., :length].set(part.keys),
    whole.values.at[:, :, :length].set(part.values),
  )
