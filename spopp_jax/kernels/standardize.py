"""Standardization of trajectory advantages under a measure (SPO++ Eq. 4, 6)."""

import chex
import jax.numpy as jnp

from spopp_jax import types
from spopp_jax.kernels import reduction

_EPSILON = 1e-8
# A constant float32 batch leaves a residual near 6e-8, which the published
# epsilon alone would blow up to order one.
_DEGENERATE = 1e-6


def standardize(
  advantages: types.Array,
  weights: types.Array,
  usable: types.Array,
  *,
  center: bool = True,
  scale: bool = True,
  axis_name: str | None = None,
) -> types.Array:
  """Centres and scales advantages under the measure given by the weights.

  With weights 1 this is SPO++ Eq. 4 (trajectory measure), with weights L_i
  Eq. 6 (action-token measure):

    mean = sum_i w_i A_i / sum_i w_i
    variance = sum_i w_i (A_i - mean)^2 / (sum_i w_i - 1)
    A~_i = (A_i - mean) / (sqrt(variance) + 1e-8)

  Two passes in float32; statistics run over the whole batch of all devices.
  Example: A = [1, -1], w = [2, 1] has mean 1/3 and deviation 1.1547, so A~ is
  [0.577, -1.155].

  Args:
    advantages: [N] float; not read where excluded.
    weights: [N] float >= 0; 0 excludes the trajectory.
    usable: [N] bool; False excludes the trajectory.
    center: subtract the mean.
    scale: divide by the deviation about the mean.
    axis_name: mapped axis the trajectories are spread over, if any.

  Returns:
    [N] float32; 0 for the excluded, and 0 for all if the total weight is at
    most 1 or the deviation at most 1e-6 * max(1, max |A|). With neither center
    nor scale, the advantages themselves.
  """
  chex.assert_rank([advantages, weights, usable], 1)
  chex.assert_equal_shape([advantages, weights, usable])
  chex.assert_type(usable, bool)
  included = usable & (weights > 0)
  advantages = jnp.where(included, advantages, 0).astype(jnp.float32)
  weights = jnp.where(included, weights, 0).astype(jnp.float32)
  if not (center or scale):
    return advantages

  total = reduction.global_sum(weights, axis_name=axis_name)
  measurable = total > 1
  mean = reduction.global_sum(
    weights * advantages, axis_name=axis_name
  ) / jnp.where(measurable, total, 1)
  centred = jnp.where(included, advantages - mean, 0)
  variance = reduction.global_sum(
    weights * centred**2, axis_name=axis_name
  ) / jnp.where(measurable, total - 1, 1)
  deviation = jnp.sqrt(variance)

  largest = reduction.global_max(jnp.abs(advantages), axis_name=axis_name)
  varied = measurable & (deviation > _DEGENERATE * jnp.maximum(1, largest))
  numerator = centred if center else advantages
  denominator = deviation + _EPSILON if scale else jnp.float32(1)
  return jnp.where(varied, numerator / denominator, 0)
