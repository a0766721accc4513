"""The chunked language-model head: log-probabilities without all the logits.

Logits of every token would take tokens x vocabulary. Here a loop over chunks
makes them where the mask is set, and the gradient makes them anew, so that
memory follows chunk x vocabulary and time follows the counted tokens. Where
decoding was truncated, the distribution is renormalised over the ids it kept:
the exact numerator and denominator of importance ratios.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from spopp_jax import types


class TokenScores(NamedTuple):
  """What the head says of each token; 0 where the mask is False.

  Attributes:
    logprobs: [B, S] float32 nats; of the token, <= 0 up to rounding.
    log_kept_mass: [B, S] float32 nats; log of the probability that the whole
      vocabulary's distribution gives to the kept ids; 0 where all are kept.
    entropy: [B, S] float32 nats of the distribution that the log-probability
      speaks of; None unless asked for.
  """

  logprobs: types.Array
  log_kept_mass: types.Array
  entropy: types.Array | None


def token_logprobs(
  hidden: types.Array,
  output_matrix: types.Array,
  tokens: types.Array,
  mask: types.Array,
  kept_ids: types.Array,
  *,
  temperature: float = 1.0,
  chunk_tokens: int,
  with_entropy: bool = False,
) -> TokenScores:
  """Scores tokens straight from hidden states, aligned on the token itself.

    z_s = W h_{s-1} / temperature
    log p(token_s) = z_s[token_s] - log sum_{v in kept_s} exp z_s[v]

  The first token of a row has no predecessor and gets 0. A mask that is set
  only inside segments, never on a segment's first token, keeps one segment's
  last state from scoring the next segment's first token. Whatever masked
  slots hold (NaN, inf) reaches neither values nor gradients. Everything
  returned has a gradient (reverse mode, once) by `hidden` and
  `output_matrix`. Rows are worked on side by side and each row's counted
  tokens one chunk after another, so rows may be sharded; the row with most
  counted tokens sets the number of chunks.

  Example: logits log [4, 3, 2, 1] give the token 1 log 0.3; with kept ids
  [0, 1, -1] it is log 3 / 7, and the log kept mass log 0.7.

  Args:
    hidden: [B, S, D] float; state `s` predicts token `s + 1`.
    output_matrix: [V, D] float; W.
    tokens: [B, S] int32 in [0, V).
    mask: [B, S] bool; True where a score is wanted.
    kept_ids: [B, S, C] int32; distinct ids that the token was chosen from, in
      [0, V), -1 in free slots. None at all, or C = 0, means the whole
      vocabulary. A token that is not among its kept ids has the
      log-probability NaN: such a record is malformed.
    temperature: > 0, static; logits are divided by it, as the sampler did.
    chunk_tokens: >= 1, static; tokens of all rows whose logits are held at a
      time, rounded down to a multiple of B but not below B.
    with_entropy: static; whether to compute the entropy.

  Returns:
    TokenScores; sums are float32 whatever the dtypes. Gradients have the
    dtypes of `hidden` and `output_matrix`, the latter's being summed over
    chunks in float32.

  Raises:
    ValueError: temperature is not positive or chunk_tokens below 1.
  """
  chex.assert_rank([hidden, output_matrix, tokens, mask], [3, 2, 2, 2])
  chex.assert_rank(kept_ids, 3)
  chex.assert_equal_shape_prefix([hidden, tokens, mask, kept_ids], 2)
  chex.assert_equal_shape_suffix([hidden, output_matrix], 1)
  chex.assert_type([hidden, output_matrix], float)
  chex.assert_type([tokens, mask, kept_ids], [int, bool, int])
  if temperature <= 0:
    raise ValueError(f'temperature ({temperature}) must be positive')
  if chunk_tokens < 1:
    raise ValueError(f'chunk_tokens ({chunk_tokens}) must be at least 1')
  batch, length = tokens.shape
  size = min(max(1, chunk_tokens // batch), length)
  mask = mask & (jnp.arange(length) > 0)[None]
  head = _Head(temperature, size, with_entropy)
  return _scores(
    head,
    *_equally_varying(
      hidden, output_matrix, tokens, mask, kept_ids, _order(mask, size)
    ),
  )


class _Head(NamedTuple):
  """Static choices; `size` is a chunk's tokens of each row."""

  temperature: float
  size: int
  with_entropy: bool


class _Chunk(NamedTuple):
  """n = B x size tokens; those that are not counted are cleared.

  Attributes:
    positions: [B, size] int32; of the tokens in their rows.
    counted: [B, size] bool.
    hidden: [n, D] float; the state that predicts each token.
    tokens: [n] int32.
    kept_ids: [n, C] int32.
  """

  positions: jax.Array
  counted: jax.Array
  hidden: jax.Array
  tokens: jax.Array
  kept_ids: jax.Array


def _equally_varying(*arrays: types.Array) -> list[jax.Array]:
  """Lets all arrays vary over the mapped axes that any of them varies over.

  Inside shard_map sharded rows meet a replicated output matrix; the transpose
  of this cast sums its gradient over the devices, once, after the loop.
  """
  cast = [jnp.asarray(array) for array in arrays]
  varying = [jax.typeof(array).manual_axis_type.varying for array in cast]
  every = frozenset().union(*varying)
  return [
    jax.lax.pcast(array, tuple(every - own), to='varying')
    for array, own in zip(cast, varying, strict=True)
  ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(head, hidden, output_matrix, tokens, mask, kept_ids, order):
  def add(index, packed):
    chunk = _chunk(head, index, hidden, tokens, mask, kept_ids, order)
    scores = _score(head, _logits(chunk, output_matrix), chunk)
    place = functools.partial(_place, head, index)
    return jax.tree.map(place, packed, scores)

  zeros = jnp.zeros_like(order, jnp.float32)
  packed = TokenScores(zeros, zeros, zeros if head.with_entropy else None)
  packed = jax.lax.fori_loop(0, _trips(head, mask), add, packed)
  return jax.tree.map(lambda values: _unpack(values, mask), packed)


def _forward(head, *arrays):
  return _scores(head, *arrays), arrays


def _backward(head, arrays, cotangents):
  """Makes each chunk's logits anew and pulls its cotangents back."""
  hidden, output_matrix, tokens, mask, kept_ids, order = arrays

  def add(index, gradients):
    packed, total = gradients
    chunk = _chunk(head, index, hidden, tokens, mask, kept_ids, order)
    score = lambda logits: _score(head, logits, chunk)
    _, pull = jax.vjp(score, _logits(chunk, output_matrix))
    take = lambda x: _take(x, chunk.positions, chunk.counted, 0.0)
    (slope,) = pull(jax.tree.map(take, cotangents))
    back = _product(slope.astype(output_matrix.dtype), output_matrix)
    packed = _place(head, index, packed, back.astype(packed.dtype))
    return packed, total + _product(slope.T.astype(hidden.dtype), chunk.hidden)

  packed = jnp.zeros_like(hidden, shape=(*order.shape, hidden.shape[-1]))
  total = jnp.zeros_like(output_matrix, jnp.float32)
  packed, total = jax.lax.fori_loop(0, _trips(head, mask), add, (packed, total))
  # State s - 1 scored token s; the last state scored none.
  gradient = jnp.pad(_unpack(packed, mask)[:, 1:], ((0, 0), (0, 1), (0, 0)))
  return gradient, total.astype(output_matrix.dtype), None, None, None, None


_scores.defvjp(_forward, _backward)


def _order(mask, size):
  """Positions [B, S or more] of each row's counted tokens, first to last.

  The rest is 0, a position that is never counted; size divides the width.
  """
  length = mask.shape[1]
  width = length + -length % size
  rank = jnp.where(mask, jnp.cumsum(mask, axis=1) - 1, width)
  # By row, so that rows on several devices stay apart; a sort is slow on CPU.
  scatter = lambda rank: (
    jnp.zeros(width, jnp.int32)
    .at[rank]
    .set(jnp.arange(length, dtype=jnp.int32), mode='drop')
  )
  return jax.vmap(scatter)(rank)


def _trips(head, mask):
  """Chunks that hold the counted tokens of the longest row."""
  return -(-mask.sum(axis=1).max() // head.size)


def _chunk(head, index, hidden, tokens, mask, kept_ids, order):
  start = index * head.size
  positions = jax.lax.dynamic_slice_in_dim(order, start, head.size, axis=1)
  counted = jnp.take_along_axis(mask, positions, axis=1)
  before = jnp.maximum(positions - 1, 0)
  return _Chunk(
    positions=positions,
    counted=counted,
    hidden=_take(hidden, before, counted, 0),
    tokens=_take(tokens, positions, counted, 0),
    kept_ids=_take(kept_ids, positions, counted, -1),
  )


def _take(values, positions, counted, cleared):
  """Values [B, S, ...] at positions [B, size] as [B size, ...]."""
  spread = lambda x: x.reshape(*x.shape, *(1,) * (values.ndim - 2))
  taken = jnp.take_along_axis(values, spread(positions), axis=1)
  taken = jnp.where(spread(counted), taken, cleared)
  return taken.reshape(positions.size, *values.shape[2:])


def _place(head, index, packed, chunk):
  """Writes a chunk [B size, ...] into packed values [B, ...]."""
  chunk = chunk.reshape(packed.shape[0], head.size, *packed.shape[2:])
  return jax.lax.dynamic_update_slice_in_dim(
    packed, chunk, index * head.size, axis=1
  )


def _unpack(packed, mask):
  """Puts the n-th packed value of a row at its n-th counted token, else 0."""
  spread = lambda x: x.reshape(*x.shape, *(1,) * (packed.ndim - 2))
  rank = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
  values = jnp.take_along_axis(packed, spread(rank), axis=1)
  return jnp.where(spread(mask), values, 0)


def _product(left, right):
  return jnp.matmul(left, right, preferred_element_type=jnp.float32)


def _logits(chunk, output_matrix):
  return _product(chunk.hidden, output_matrix.T)


def _score(head, logits, chunk):
  """Scores a chunk from its logits [n, V] float32."""
  logits = logits / head.temperature
  chosen = jnp.take_along_axis(logits, chunk.tokens[:, None], axis=1)[:, 0]
  top, log_sum, entropy = _sums(logits, True)
  log_kept_mass = jnp.zeros_like(log_sum)
  if chunk.kept_ids.shape[1]:
    is_id = chunk.kept_ids >= 0
    truncated = is_id.any(axis=1)
    kept = jnp.take_along_axis(logits, jnp.maximum(chunk.kept_ids, 0), axis=1)
    kept_top, kept_log_sum, kept_entropy = _sums(kept, is_id)
    lost = (top - kept_top) + (log_sum - kept_log_sum)
    log_kept_mass = jnp.where(truncated, -lost, 0)
    top, log_sum, entropy = jax.tree.map(
      lambda inside, whole: jnp.where(truncated, inside, whole),
      (kept_top, kept_log_sum, kept_entropy),
      (top, log_sum, entropy),
    )
    member = (chunk.kept_ids == chunk.tokens[:, None]).any(axis=1)
    chosen = jnp.where(member | ~truncated, chosen, jnp.nan)
  # In this order: a difference of large numbers would lose its digits.
  logprobs = (chosen - top) - log_sum
  return TokenScores(
    logprobs, log_kept_mass, entropy if head.with_entropy else None
  )


def _sums(logits, counted):
  """Largest logit, log of the sum of exp above it, and the entropy: [n]."""
  lowest = jnp.finfo(logits.dtype).min
  top = jax.lax.stop_gradient(jnp.where(counted, logits, lowest).max(axis=1))
  above = jnp.where(counted, logits - top[:, None], 0)
  weights = jnp.where(counted, jnp.exp(above), 0)
  total = weights.sum(axis=1)
  entropy = jnp.log(total) - (weights * above).sum(axis=1) / total
  return top, jnp.log(total), entropy
