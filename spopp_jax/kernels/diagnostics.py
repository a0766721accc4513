"""What the weights and the measure do to a batch (SPO++ Eq. 5; raw ESS)."""

from typing import NamedTuple

import chex
import jax.numpy as jnp

from spopp_jax import types
from spopp_jax.kernels import reduction

# exp(80) is the last round exponent that float32 holds with room to average.
_LOG_CEILING = 80.0


class WeightStatistics(NamedTuple):
  """Statistics of raw weights; all 0 if nothing counts.

  Attributes:
    mean: [] float32.
    max: [] float32; at most exp(80).
    ess_fraction: [] float32 in (0, 1]; effective over actual sample size.
    chi2: [] float32 >= -1; mean w^2 - 1, the chi-squared divergence of the
      numerator from the denominator policy if the weights are exact; the
      largest w^2 counts as exp(80) at most.
  """

  mean: types.Array
  max: types.Array
  ess_fraction: types.Array
  chi2: types.Array


def weight_statistics(
  log_weights: types.Array,
  mask: types.Array,
  *,
  axis_name: str | None = None,
) -> WeightStatistics:
  """Describes exp(log_weights) before any truncation, in log space.

  ESS / n = (sum w)^2 / (n sum w^2). Example: weights [1, 3] have mean 2, max
  3, ESS fraction 16 / 20 and chi2 4.

  Args:
    log_weights: [...] float32 nats, of tokens or of trajectories; -inf is the
      weight 0.
    mask: [...] bool; counted entries.
    axis_name: mapped axis the entries are spread over, if any.

  Returns:
    The statistics over all counted entries.
  """
  chex.assert_equal_shape([log_weights, mask])
  chex.assert_type([log_weights, mask], [float, bool])
  low = jnp.where(mask, log_weights, -jnp.inf)
  peak = reduction.global_max(low, axis_name=axis_name)
  nothing = peak == -jnp.inf
  peak = jnp.where(nothing, 0, peak)
  relative = jnp.exp(low - peak)  # exp(-inf) = 0 at masked entries
  first = reduction.global_sum(relative, axis_name=axis_name)
  second = reduction.global_sum(relative**2, axis_name=axis_name)
  count = reduction.global_sum(mask, axis_name=axis_name)
  safe_count = jnp.maximum(count, 1)
  largest = jnp.where(nothing, 0, jnp.exp(jnp.minimum(peak, _LOG_CEILING)))
  return WeightStatistics(
    mean=largest * first / safe_count,
    max=largest,
    ess_fraction=first**2 / (jnp.where(second > 0, second, 1) * safe_count),
    chi2=jnp.where(
      count > 0,
      jnp.exp(jnp.minimum(2 * peak, _LOG_CEILING)) * second / safe_count - 1,
      0,
    ),
  )


def weighted_mean(
  values: types.Array,
  weights: types.Array,
  *,
  axis_name: str | None = None,
) -> types.Array:
  """Returns sum(w x) / sum(w); with w = L the mean the token loss sees.

  Args:
    values: [...] float32; not read where the weight is 0.
    weights: [...] float32 >= 0.
    axis_name: mapped axis the entries are spread over, if any.

  Returns:
    [] float32; 0 if the weights sum to 0.
  """
  chex.assert_equal_shape([values, weights])
  total = reduction.global_sum(weights, axis_name=axis_name)
  weighted = jnp.where(weights > 0, values, 0) * weights
  return reduction.global_sum(weighted, axis_name=axis_name) / jnp.where(
    total > 0, total, 1
  )


class LengthCoupling(NamedTuple):
  """How action-token counts go with advantages; 0 where undefined.

  Attributes:
    covariance: [] float32; Cov_n(L, A), tokens times advantage.
    residual: [] float32; Cov_n(L, A) / mean(L), the right side of Eq. 5.
    correlation: [] float32 in [-1, 1].
  """

  covariance: types.Array
  residual: types.Array
  correlation: types.Array


def length_coupling(
  advantages: types.Array,
  lengths: types.Array,
  *,
  axis_name: str | None = None,
) -> LengthCoupling:
  """Measures the coupling of length and advantage (SPO++ Eq. 5).

  If the advantages have trajectory mean 0, as after Eq. 4, the residual is
  their token-weighted mean. Example: A = [1, -1], L = [3, 1] has residual
  1 / 2 and correlation 1.

  Args:
    advantages: [N] float32; not read where the length is 0.
    lengths: [N] float32; L_i, 0 excludes.
    axis_name: mapped axis the trajectories are spread over, if any.

  Returns:
    Residual and correlation over the trajectories with L_i > 0.
  """
  chex.assert_rank([advantages, lengths], 1)
  active = (lengths > 0).astype(jnp.float32)

  def mean(values):
    return weighted_mean(values, active, axis_name=axis_name)

  mean_length = mean(lengths)
  length_offsets = lengths - mean_length
  offsets = advantages - mean(advantages)
  covariance = mean(length_offsets * offsets)
  scale = jnp.sqrt(mean(length_offsets**2) * mean(offsets**2))
  return LengthCoupling(
    covariance=covariance,
    residual=covariance / jnp.where(mean_length > 0, mean_length, 1),
    correlation=covariance / jnp.where(scale > 0, scale, 1),
  )
