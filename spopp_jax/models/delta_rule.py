"""The gated delta rule of linear attention, in chunks of matrix products.

Per head, a matrix S [Dk, Dv] takes one token after another:

  S_t = a_t S_{t-1} + k_t u_t^T,  u_t = b_t (v_t - (a_t S_{t-1})^T k_t)
  o_t = S_t^T q_t

Within a chunk all u solve one triangular system, (I + A) U = b (V - d K S_0);
see Yang et al., arXiv:2412.06464, section 3.3.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

_CHUNK = 64


def delta_rule(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  *,
  log_decays: jax.Array,
  rates: jax.Array,
  segment_ids: jax.Array,
  state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Applies the rule to every segment, from an empty S or from a given one.

  With a state every row is one sequence: segment 1, followed by tokens of
  segment 0 that are not there and change nothing.

  Args:
    queries: [B, S, G, Dk] float32.
    keys: [B, S, G, Dk] float32, of length 1 or less.
    values: [B, S, H, Dv] float32; H a multiple of G, each head of queries and
      keys serving H / G heads of values that follow one another.
    log_decays: [B, S, H] float32; log a_t, at most 0.
    rates: [B, S, H] float32; b_t in [0, 1].
    segment_ids: [B, S] int32.
    state: [B, H, Dk, Dv] float32, or None.

  Returns:
    Outputs [B, S, H, Dv] float32 and S after the last token [B, H, Dk, Dv].
  """
  chex.assert_rank([queries, keys, values, rates], [4, 4, 4, 3])
  chex.assert_equal_shape([rates, log_decays])
  batch, length, heads, value_width = values.shape
  if (repeats := heads // keys.shape[2]) > 1:
    queries, keys = (jnp.repeat(x, repeats, axis=2) for x in (queries, keys))
  goes_on = state is not None
  if goes_on:
    there = (segment_ids > 0)[:, :, None]
    log_decays = jnp.where(there, log_decays, 0.0)
    rates = jnp.where(there, rates, 0.0)
    segment_ids = jnp.ones_like(segment_ids)
  size = min(_CHUNK, 1 << (length - 1).bit_length())
  cut = functools.partial(_cut, size=size)
  # What is padded goes on with the last segment, and with no rate and no decay.
  segment_ids = jnp.pad(segment_ids, ((0, 0), (0, -length % size)), mode='edge')
  segments = cut(_count_segments(segment_ids, goes_on)[:, :, None])[:, :, 0]
  within = _within_chunks(
    _Tokens(*map(cut, (queries, keys, values, log_decays, rates))), segments
  )
  before = jnp.zeros((batch, heads, keys.shape[-1], value_width))
  if state is not None:
    before = state
  after, outputs = jax.lax.scan(_through_chunk, before, within)
  outputs = jnp.moveaxis(outputs, (0, 2), (1, 3))  # [B, chunks, size, H, Dv]
  outputs = outputs.reshape(batch, -1, heads, value_width)
  return outputs[:, :length], after


def _count_segments(segment_ids: jax.Array, goes_on: bool) -> jax.Array:
  """Returns how many segments have begun up to each token: [B, S] int32.

  The state that a row goes on from belongs to number 0.
  """
  new = segment_ids[:, 1:] != segment_ids[:, :-1]
  first = jnp.full((len(segment_ids), 1), not goes_on)
  return jnp.cumsum(jnp.concatenate([first, new], axis=1), axis=1)


def _cut(array: jax.Array, size: int) -> jax.Array:
  """Cuts [B, S, H, ...] to [chunks, B, H, size, ...]; the rest is zeros."""
  batch, length = array.shape[:2]
  padding = [(0, 0)] * array.ndim
  padding[1] = (0, -length % size)
  array = jnp.pad(array, padding)
  array = array.reshape(batch, -1, size, *array.shape[2:])
  return jnp.moveaxis(array, (1, 3), (0, 2))


class _Tokens(NamedTuple):
  """The arguments of `delta_rule`, with axes [chunks, B, H, size, ...]."""

  queries: jax.Array
  keys: jax.Array
  values: jax.Array
  log_decays: jax.Array
  rates: jax.Array


class _Within(NamedTuple):
  """What chunks need of each other's S_0 alone; axes [chunks, B, H, ...].

  The updates are U = own - passed_on S_0, the outputs carry q S_0 + seen U, and
  S = carry S_0 + left^T U after the last token.
  """

  own: jax.Array  # [size, Dv]
  passed_on: jax.Array  # [size, Dk]
  carried: jax.Array  # [size, Dk]; carry q
  seen: jax.Array  # [size, size]
  left: jax.Array  # [size, Dk]
  carry: jax.Array  # [1, 1]


def _within_chunks(tokens: _Tokens, segments: jax.Array) -> _Within:
  """Computes all chunks at once; `segments` is [chunks, B, size]."""
  queries, keys, values, log_decays, rates = tokens
  last = jnp.pad(segments[:-1, :, -1], ((1, 0), (0, 0)))
  index = np.arange(segments.shape[-1])
  causal = (index[:, None] >= index)[None, None]
  sees = (segments[..., :, None] == segments[..., None, :]) & causal
  goes_on = segments == last[..., None]  # no other segment has begun
  passed = jnp.cumsum(log_decays, axis=-1)
  carry = jnp.where(goes_on[:, :, None], jnp.exp(passed), 0.0)[..., None]
  # Differences of `passed` would lose the digits that it has grown by.
  shape = (*log_decays.shape, len(index))
  strict = jnp.broadcast_to(index[:, None] > index, shape)
  each = jnp.where(strict, log_decays[..., None], 0.0)
  between = jnp.cumsum(each, axis=-2)
  decay = jnp.where(sees[:, :, None], jnp.exp(between), 0.0)
  rates = rates[..., None]
  among = jnp.where(strict, rates * decay * (keys @ keys.mT), 0.0)
  inverse = _unit_triangular_inverse(among)
  return _Within(
    own=inverse @ (rates * values),
    passed_on=inverse @ (rates * carry * keys),
    carried=carry * queries,
    seen=decay * (queries @ keys.mT),
    left=keys * decay[..., -1, :, None],
    carry=carry[..., -1:, :],
  )


def _through_chunk(
  state: jax.Array, chunk: _Within
) -> tuple[jax.Array, jax.Array]:
  updates = chunk.own - chunk.passed_on @ state
  outputs = chunk.carried @ state + chunk.seen @ updates
  return chunk.carry * state + chunk.left.mT @ updates, outputs


def _unit_triangular_inverse(lower: jax.Array) -> jax.Array:
  """Returns (I + L)^-1 of strictly lower triangular L [..., n, n], n = 2^k.

  Blocks on the diagonal double: [[P, 0], [C, Q]]^-1 is [[P^-1, 0],
  [-Q^-1 C P^-1, Q^-1]]. Unlike the series of powers of L it does not cancel.
  """
  # Matrix products alone: two batched triangular solves in one computation can
  # deadlock XLA's CPU back end on two cores.
  size = lower.shape[-1]
  index = np.arange(size)
  inverse = jnp.broadcast_to(jnp.eye(size), lower.shape)
  block = 1
  while block < size:
    own, pair = index // block, index // (2 * block)
    corner = (pair[:, None] == pair) & (own[:, None] > own)
    # Without the broadcast jax refuses to promote the rank.
    chosen = jnp.where(jnp.broadcast_to(corner, lower.shape), lower, 0.0)
    inverse = inverse - inverse @ chosen @ inverse
    block *= 2
  return inverse
