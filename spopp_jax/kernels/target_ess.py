"""Target-ESS tempering of sequence weights within a group (TETPO).

A group's weights w_i ~ exp(alpha l_i) are flattened just so far that their
effective sample size keeps a stated share of the group. Every function takes
one group; `jax.vmap` gives [G, K]. Log-ratios that are not finite are left
out, and so are slots that are not valid: n counts what remains. Everything
here is a constant to the gradient.
"""

import math

import chex
import jax
import jax.numpy as jnp

from spopp_jax import types
from spopp_jax.kernels import reduction

_SCALES = ('mean_one', 'sum_one')


def finite_members(log_ratios: types.Array, valid: types.Array) -> types.Array:
  """Returns the members that tempering counts.

  `valid` less the result are the members dropped for their log-ratio; log
  their number. Example: log-ratios [0, -inf, 1], valid [T, T, F] gives
  [T, F, F], one dropped.

  Args:
    log_ratios: [...] float; nats.
    valid: [...] bool.

  Returns:
    [...] bool; valid and finite.
  """
  chex.assert_equal_shape([log_ratios, valid])
  chex.assert_type([log_ratios, valid], [float, bool])
  return valid & jnp.isfinite(log_ratios)


def log_ess(
  log_ratios: types.Array,
  valid: types.Array,
  exponent: types.Array,
  *,
  axis_name: str | None = None,
) -> types.Array:
  """Returns the log of the effective sample size of tempered weights.

    log ESS(alpha) = 2 LSE(alpha l) - LSE(2 alpha l)

  Continuous and non-increasing in alpha >= 0, from log n at alpha = 0.
  Example: l = [0, log 3], alpha = 1 has weights 1 : 3, so ESS = 16 / 10.

  Args:
    log_ratios: [K] float nats; log of the sequence ratio, never clamped.
    valid: [K] bool; False for padded slots.
    exponent: [] float >= 0; alpha.
    axis_name: mapped axis that the members are spread over, if any.

  Returns:
    [] float32 in [0, log n]; -inf if n = 0.
  """
  offsets, counted = _offsets(log_ratios, valid, axis_name)
  number = reduction.global_sum(counted, axis_name=axis_name)
  value = _log_ess(offsets, counted, exponent, axis_name)
  return jnp.where(number > 0, value, -jnp.inf)


def tempering_exponent(
  log_ratios: types.Array,
  valid: types.Array,
  *,
  target_ess_fraction: float,
  iterations: int = 24,
  axis_name: str | None = None,
) -> types.Array:
  """Returns the largest alpha in [0, 1] with ESS(alpha) >= kappa n.

  alpha = 1 is tested first. Otherwise bisection keeps ESS(low) >= kappa n >
  ESS(high) and returns low, so the target holds (to float32 rounding) and
  alpha is at most 2^-iterations too small. Then the weights' dispersion
  (1/n) sum_i (n w_i - 1)^2 is at most 1 / kappa - 1. Example: l = [0, 3],
  kappa = 0.85 gives 0.2985; l = [0, 0.1] gives 1.

  Args:
    log_ratios: [K] float nats; log of the sequence ratio, never clamped.
    valid: [K] bool; False for padded slots.
    target_ess_fraction: kappa in (0, 1], static.
    iterations: >= 1, static; halvings of the bracket.
    axis_name: mapped axis that the members are spread over, if any.

  Returns:
    [] float32 in [0, 1]. 1 if n <= 1, kappa <= 1 / n or all log-ratios are
    equal; with kappa = 1 otherwise 0.

  Raises:
    ValueError: kappa outside (0, 1] or no iteration.
  """
  kappa = target_ess_fraction
  if not 0 < kappa <= 1:
    raise ValueError(f'target_ess_fraction ({kappa}) must lie in (0, 1]')
  if iterations < 1:
    raise ValueError(f'iterations ({iterations}) must be at least 1')
  offsets, counted = _offsets(log_ratios, valid, axis_name)
  number = reduction.global_sum(counted, axis_name=axis_name)
  spread = reduction.global_max(-offsets, axis_name=axis_name)
  # ESS >= 1 whatever alpha; the slack is float32's rounding of kappa n.
  untempered = (spread == 0) | (number * kappa <= 1 + 1e-6)
  if kappa == 1:
    # Rounding hides the loss of ESS from bisection for small alpha.
    return jnp.where(untempered, 1.0, 0.0)

  target = math.log(kappa) + jnp.log(jnp.maximum(number, 1))

  def feasible(exponent):
    return _log_ess(offsets, counted, exponent, axis_name) >= target

  def halve(_, bracket):
    low, high = bracket
    middle = (low + high) / 2
    holds = feasible(middle)
    return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

  # Of the target, so that the loop also runs inside shard_map.
  start = (jnp.zeros_like(target), jnp.ones_like(target))
  low, _ = jax.lax.fori_loop(0, iterations, halve, start)
  return jnp.where(untempered | feasible(jnp.float32(1)), 1.0, low)


def tempered_weights(
  log_ratios: types.Array,
  valid: types.Array,
  exponent: types.Array,
  *,
  scale: str = 'mean_one',
  axis_name: str | None = None,
) -> types.Array:
  """Returns the self-normalised weights of a group, detached.

    w_i = exp(alpha l_i) / sum_j exp(alpha l_j), times n for 'mean_one'

  Example: l = [0, log 3], alpha = 1 gives [0.5, 1.5], and [0.25, 0.75] for
  'sum_one'.

  Args:
    log_ratios: [K] float nats; log of the sequence ratio, never clamped.
    valid: [K] bool; False for padded slots.
    exponent: [] float in [0, 1]; alpha of `tempering_exponent`.
    scale: 'mean_one' or 'sum_one', static.
    axis_name: mapped axis that the members are spread over, if any.

  Returns:
    [K] float32; positive for every counted member unless float32 underflows
    (alpha l some 87 nats below the largest), 0 for the others. All 0 if
    n = 0.

  Raises:
    ValueError: unknown scale.
  """
  if scale not in _SCALES:
    raise ValueError(f'scale ({scale!r}) must be one of {_SCALES}')
  offsets, counted = _offsets(log_ratios, valid, axis_name)
  exponent = jax.lax.stop_gradient(exponent)
  weights = jnp.where(counted, jnp.exp(exponent * offsets), 0)
  total = reduction.global_sum(weights, axis_name=axis_name)
  weights = weights / jnp.where(total > 0, total, 1)
  if scale == 'sum_one':
    return weights
  return weights * reduction.global_sum(counted, axis_name=axis_name)


def _offsets(log_ratios, valid, axis_name):
  """Detached l - max l <= 0 (0 where not counted), and who counts."""
  chex.assert_rank([log_ratios, valid], 1)
  counted = finite_members(log_ratios, valid)
  log_ratios = jax.lax.stop_gradient(log_ratios).astype(jnp.float32)
  lowest = jnp.finfo(jnp.float32).min
  largest = reduction.global_max(
    jnp.where(counted, log_ratios, lowest), axis_name=axis_name
  )
  offsets = jnp.where(counted, log_ratios - largest, 0)
  # A difference beyond float32 would make 0 * inf at alpha = 0.
  return jnp.maximum(offsets, lowest), counted


def _log_ess(offsets, counted, exponent, axis_name):
  """log ESS of offsets whose maximum is 0: no sum is below 1 or overflows."""
  exponent = jax.lax.stop_gradient(exponent)
  weights = jnp.where(counted, jnp.exp(exponent * offsets), 0)
  first = reduction.global_sum(weights, axis_name=axis_name)
  second = reduction.global_sum(weights**2, axis_name=axis_name)
  return 2 * jnp.log(jnp.maximum(first, 1)) - jnp.log(jnp.maximum(second, 1))
