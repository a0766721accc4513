"""M2PO's token mask: bound the second moment of the log-ratio (2510.01161)."""

from typing import Literal, NamedTuple, get_args

import chex
import jax
import jax.numpy as jnp

from spopp_jax import types
from spopp_jax.kernels import reduction

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
  may change which of them go, never how many. O(n log n), static shapes.

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
    axis_name: mapped axis that the rows are spread over, if any; every device
      then sorts the tokens of all.

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
  """Marks all but the smallest entries, as many as the variant keeps."""
  gathered = squares
  if axis_name is not None:
    gathered = jax.lax.all_gather(squares, axis_name, tiled=True)
  # Bits of non-negative floats order as they do and sort several times faster:
  # comparing floats has to mind NaN, which here gets no sign and comes last.
  bits = jax.lax.bitcast_convert_type(gathered.reshape(-1), jnp.int32)
  bits &= 0x7FFFFFFF
  ascending = jnp.sort(bits, stable=False)  # equals are the same number
  count = _capped_count if variant == 'official_cap' else _fitting_count
  num_kept = count(
    jax.lax.bitcast_convert_type(ascending, jnp.float32), threshold
  )
  if variant == 'areal':
    num_kept = jnp.maximum(num_kept, 1)
  smallest_dropped = ascending[jnp.minimum(num_kept, bits.size - 1)]
  equal = bits == smallest_dropped
  equals_kept = num_kept - jnp.sum(bits < smallest_dropped)
  equals_from_here = jax.lax.cumsum(equal.astype(jnp.int32), reverse=True)
  dropped = bits > smallest_dropped
  dropped |= equal & (equals_from_here > equals_kept)
  dropped = dropped.reshape(gathered.shape)
  if axis_name is None:
    return dropped
  rows = squares.shape[0]
  start = jax.lax.axis_index(axis_name) * rows
  return jax.lax.dynamic_slice_in_dim(dropped, start, rows)


def _fitting_count(ascending, threshold):
  """Longest run of smallest entries with a mean of at most the threshold.

  Means of the k smallest never fall with k, so the loop "drop the largest
  while the mean is too large" ends at the largest k whose mean fits.
  """
  sizes = jnp.arange(1, ascending.size + 1).astype(jnp.float32)
  return jnp.sum(jnp.cumsum(ascending) <= threshold * sizes)


def _capped_count(ascending, threshold):
  """Entries below the largest one that may cap all; inf is no entry."""
  entry = jnp.isfinite(ascending)
  number = jnp.sum(entry)
  values = jnp.where(entry, ascending, 0)
  totals = jnp.cumsum(values)
  larger = number - 1 - jnp.arange(ascending.size)
  capped_totals = totals + values * larger.astype(jnp.float32)
  budget = threshold * number.astype(jnp.float32)
  num_caps = jnp.sum(entry & (capped_totals < budget))  # totals never fall
  cap = jnp.where(num_caps > 0, ascending[jnp.maximum(num_caps - 1, 0)], 0)
  below = jnp.sum(ascending < cap)
  return jnp.where(totals[-1] <= budget, number, below)
