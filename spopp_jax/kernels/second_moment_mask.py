"""M2PO's token mask: bound the second moment of the log-ratio (2510.01161)."""

from typing import Literal, NamedTuple, get_args

import chex
import jax
import jax.numpy as jnp

from spopp_jax import types
from spopp_jax.kernels import reduction

_INF = 0x7F800000  # bits of inf

Variant = Literal['paper', 'official_cap', 'areal']


class SecondMomentMask(NamedTuple):
  """The mask and the second moments it was chosen by.

  Attributes:
    kept: [B, S] bool; False outside the counted tokens.
    second_moment: [] float32; mean of x^2 over T; 0 if T is empty.
    kept_second_moment: [] float32; the same over what is left of T.
    all_masked: [] bool; T had tokens and none of them is left.
  """

  kept: types.Array
  second_moment: types.Array
  kept_second_moment: types.Array
  all_masked: types.Array


def second_moment_mask(
  log_ratios: types.Array,
  advantages: types.Array,
  mask: types.Array,
  *,
  threshold: float,
  variant: Variant = 'paper',
  axis_name: str | None = None,
) -> SecondMomentMask:
  """Drops the largest x^2 of T until their mean is at most the threshold.

    x = log(current / behaviour)
    paper: T = {A > 0, x > 0} + {A < 0, x < 0}; T may be dropped wholly
    official_cap: the same T; c^2 is the largest x^2 such that the mean of
      min(x^2, c^2) stays below the threshold, and |x| >= c is dropped if any
      must be: capping counts what it caps, so it takes more than dropping
    areal: T = all counted tokens; the smallest is always left

  Tokens outside T are kept. T is chosen over the whole optimizer minibatch:
  call this before microbatches are cut. Masked tokens stay in the loss's
  denominator. Of exactly equal x^2 the first go first, so the order of tokens
  may change which of them go, never how many. Nothing is sorted: 31 passes over
  the tokens find the value that parts them.

  Example: A = 1, x^2 = [.25, .04, .01, 0], threshold .04: the mean .075
  exceeds it, without the first it is .0167, so the first token is dropped;
  official_cap has c^2 = .04 (mean .0225), and drops the first two. If every
  x^2 exceeds the threshold, all of T is dropped and `all_masked` is set.

  Args:
    log_ratios: [B, S] float32 nats; x, finite where counted.
    advantages: [B, S] float32; each token's advantage; unread by areal.
    mask: [B, S] bool; counted tokens, the others are not read.
    threshold: > 0, nats^2; the published value is 0.04.
    variant: 'paper', or what the authors' ('official_cap', without that
      code's floor on the range) and another ('areal') trainer do.
    axis_name: mapped axis that the rows are spread over, if any.

  Returns:
    The mask and its statistics; nothing is differentiable. Without counted
    tokens nothing is kept and the moments are 0.

  Raises:
    ValueError: for a threshold <= 0 or an unknown variant.
  """
  if not threshold > 0:
    raise ValueError(f'threshold ({threshold}) must exceed 0')
  if variant not in get_args(Variant):
    raise ValueError(f'variant {variant!r} must be one of {get_args(Variant)}')
  chex.assert_rank([log_ratios, advantages, mask], 2)
  chex.assert_equal_shape([log_ratios, advantages, mask])
  chex.assert_type([log_ratios, advantages, mask], [float, float, bool])
  x = jax.lax.stop_gradient(jnp.where(mask, log_ratios, 0))
  x = x.astype(jnp.float32)
  trusted = mask
  if variant != 'areal':
    rising = (advantages > 0) & (x > 0)
    trusted = mask & (rising | ((advantages < 0) & (x < 0)))

  squares = jnp.where(trusted, x**2, jnp.inf)  # inf sorts behind all of T
  dropped = _dropped(squares, threshold, variant, axis_name)
  left = trusted & ~dropped

  def mean_and_count(chosen):
    count = reduction.global_sum(chosen, axis_name=axis_name)
    total = reduction.global_sum(
      jnp.where(chosen, x**2, 0), axis_name=axis_name
    )
    return total / jnp.maximum(count, 1), count

  before, num_trusted = mean_and_count(trusted)
  after, num_left = mean_and_count(left)
  return SecondMomentMask(
    kept=mask & (left | ~trusted),
    second_moment=before,
    kept_second_moment=after,
    all_masked=(num_trusted > 0) & (num_left == 0),
  )


def _dropped(squares, threshold, variant, axis_name):
  """Marks the entries of T that the variant drops; inf is outside T."""
  # Bits of non-negative floats order as they do; NaN, without sign, comes last.
  bits = jax.lax.bitcast_convert_type(squares, jnp.int32) & 0x7FFFFFFF
  squares = _float(bits)
  if variant == 'official_cap':
    return _above_cap(squares, bits, threshold, axis_name)
  at_least = 1 if variant == 'areal' else 0
  return _above_mean(squares, bits, threshold, axis_name, at_least)


def _above_mean(squares, bits, threshold, axis_name, at_least):
  """Leaves as many of the smallest as have a mean of at most the threshold.

  Means of the k smallest never fall with k, so the loop "drop the largest
  while the mean is too large" ends at the largest k whose mean fits.
  """

  def total(values):
    return reduction.global_sum(values, axis_name=axis_name)

  def excess(limit):
    return total(jnp.where(bits <= limit, squares - threshold, 0))

  limit = _largest_bits(lambda limit: excess(limit) <= 0)
  above = bits > limit
  following = -reduction.global_max(
    jnp.where(above, -bits, -_INF), axis_name=axis_name
  )
  # Of equals that do not all fit, the last stay: so many.
  room = -excess(limit) / (_float(following) - threshold)
  if at_least:
    room = jnp.where(total(~above) == 0, jnp.maximum(room, at_least), room)
  equal = bits == following
  return above & ~(equal & (_ranks_from_the_end(equal, axis_name) <= room))


def _above_cap(squares, bits, threshold, axis_name):
  """Marks the largest entry that may cap all, and what lies above it."""
  entry = bits < _INF

  def total(values):
    return reduction.global_sum(
      jnp.where(entry, values, 0), axis_name=axis_name
    )

  budget = threshold * total(1)
  limit = _largest_bits(
    lambda limit: total(jnp.minimum(squares, _float(limit))) < budget
  )
  cap = reduction.global_max(
    jnp.where(entry & (bits <= limit), squares, 0), axis_name=axis_name
  )
  return (squares >= cap) & (total(squares) > budget)


def _largest_bits(holds):
  """Returns the largest bits below inf that hold, -1 if none; falls once."""

  def halve(_, bracket):
    low, high = bracket
    middle = low + (high - low) // 2
    yes = holds(middle)
    return jnp.where(yes, middle, low), jnp.where(yes, high, middle)

  low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.int32(-1), jnp.int32(_INF)))
  return low


def _ranks_from_the_end(chosen, axis_name):
  """Numbers the chosen entries of all devices: 1 is the last one."""
  numbers = chosen.reshape(-1).astype(jnp.int32)
  ranks = jax.lax.cumsum(numbers, reverse=True).reshape(chosen.shape)
  if axis_name is None:
    return ranks
  numbers = jax.lax.all_gather(numbers.sum(), axis_name)
  device = jnp.arange(numbers.size)
  behind = device > jax.lax.axis_index(axis_name)
  return ranks + jnp.where(behind, numbers, 0).sum()


def _float(bits):
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
