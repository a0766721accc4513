"""M2PO's token mask: bound the second moment of the log-ratio (2510.01161)."""

from typing import Literal, NamedTuple, get_args

import chex
import jax
import jax.numpy as jnp

from spopp_jax import types
from spopp_jax.kernels import reduction

Variant = Literal['paper', 'areal']


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
    areal: T = all counted tokens; the smallest is always left

  Tokens outside T are kept. T is chosen over the whole optimizer minibatch:
  call this before microbatches are cut. Masked tokens stay in the loss's
  denominator. Of exactly equal x^2 the first go first, so the order of tokens
  may change which of them go, never how many. O(n log n), static shapes.

  Example: A = 1, x^2 = [.25, .04, .01, 0], threshold .04: the mean .075
  exceeds it, without the first it is .0167, so the first token is dropped. If
  every x^2 exceeds the threshold, all of T is dropped and `all_masked` is set.

  Args:
    log_ratios: [B, S] float32 nats; x, finite where counted.
    advantages: [B, S] float32; each token's advantage; unread by areal.
    mask: [B, S] bool; counted tokens, the others are not read.
    threshold: > 0, nats^2; the published value is 0.04.
    variant: 'paper', or 'areal' for what that trainer does.
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
  if variant == 'paper':
    rising = (advantages > 0) & (x > 0)
    trusted = mask & (rising | ((advantages < 0) & (x < 0)))

  squares = jnp.where(trusted, x**2, jnp.inf)  # inf sorts behind all of T
  dropped = _dropped(
    squares,
    threshold=threshold,
    num_kept_at_least=0 if variant == 'paper' else 1,
    axis_name=axis_name,
  )
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


def _dropped(squares, *, threshold, num_kept_at_least, axis_name):
  """Marks all but the longest run of smallest entries with a small mean.

  Means of the k smallest never fall with k, so the loop "drop the largest
  while the mean is too large" ends at the largest k whose mean fits.
  """
  gathered = squares
  if axis_name is not None:
    gathered = jax.lax.all_gather(squares, axis_name, tiled=True)
  flat = gathered.reshape(-1)
  # Reversed, a stable ascending sort leaves the first of equals to the end.
  order = flat.size - 1 - jnp.argsort(flat[::-1], stable=True)
  ranks = jnp.arange(flat.size)
  totals = jnp.cumsum(flat[order])
  fits = totals <= threshold * (ranks + 1).astype(jnp.float32)
  num_kept = jnp.maximum(jnp.sum(fits), num_kept_at_least)
  dropped = jnp.zeros(flat.shape, bool).at[order].set(ranks >= num_kept)
  dropped = dropped.reshape(gathered.shape)
  if axis_name is None:
    return dropped
  rows = squares.shape[0]
  start = jax.lax.axis_index(axis_name) * rows
  return jax.lax.dynamic_slice_in_dim(dropped, start, rows)
