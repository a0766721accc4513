"""Whether advantages and weights are sound on the whole collected batch."""

import functools

import jax.numpy as jnp

from spopp_jax import types
from spopp_jax.kernels import (
  diagnostics,
  group_advantage,
  importance,
  reduction,
  segments,
)
from spopp_jax.objectives import base, weighting
from spopp_jax.objectives.recipe import Config


def compute(
  config: Config,
  axis_name: str | None,
  batch: types.PackedBatch,
  advantages: types.Array,
  proximal_logprobs: types.Array,
  weights: base.Weights,
) -> base.Metrics:
  """Computes an objective's `diagnostics`; arguments as in `base.Objective`."""
  lengths = segments.trajectory_lengths(
    weights.counted,
    batch.trajectory_ids,
    num_trajectories=batch.usable.shape[0],
  )
  token_advantages = segments.to_tokens(advantages, batch.trajectory_ids)
  mean = functools.partial(diagnostics.weighted_mean, axis_name=axis_name)
  largest = reduction.global_max(jnp.abs(advantages), axis_name=axis_name)
  coupling = diagnostics.length_coupling(
    advantages, lengths, axis_name=axis_name
  )
  return {
    'advantage_token_mean': mean(advantages, lengths),
    'advantage_weighted_token_mean': mean(token_advantages, weights.importance),
    'degenerate_batch': (largest == 0).astype(jnp.float32),
    'length_advantage_covariance': coupling.covariance,
    'length_residual': coupling.residual,
    'length_advantage_correlation': coupling.correlation,
    **_of_weights(axis_name, batch, proximal_logprobs, weights, lengths),
    **_of_groups(config, axis_name, batch),
  }


def _of_weights(axis_name, batch, proximal_logprobs, weights, lengths):
  """Raw and used weights, of tokens and of trajectories."""
  mask, ids = weights.counted, batch.trajectory_ids
  count = {'num_trajectories': batch.usable.shape[0]}
  raw = importance.log_ratio(proximal_logprobs, batch.behaviour_logprobs, mask)
  sequence = importance.sequence_log_weights(raw, mask, ids, **count)
  # A trajectory's used weight is the mean that its tokens have in the loss.
  used = segments.trajectory_sums(weights.importance, mask, ids, **count)
  used = used / jnp.maximum(lengths, 1)
  sound = mask & jnp.isfinite(raw)
  metrics = {
    'log_ratio_nonfinite': reduction.global_sum(
      ~jnp.isfinite(sequence), axis_name=axis_name
    ),
    'log_ratio_abs_mean': diagnostics.weighted_mean(
      jnp.abs(jnp.where(sound, raw, 0)), sound, axis_name=axis_name
    ),
  }
  for level, log_raw, log_used, counted in (
    ('token', raw, jnp.log(weights.importance), mask),
    ('sequence', sequence, jnp.log(used), lengths > 0),
  ):
    statistics = diagnostics.weight_statistics(
      log_raw, counted & jnp.isfinite(log_raw), axis_name=axis_name
    )
    after = diagnostics.weight_statistics(
      log_used, counted, axis_name=axis_name
    )
    metrics |= {
      f'weight_{level}_mean': statistics.mean,
      f'weight_{level}_max': statistics.max,
      f'weight_{level}_ess_fraction': statistics.ess_fraction,
      f'weight_{level}_chi2': statistics.chi2,
      f'weight_{level}_used_mean': after.mean,
      f'weight_{level}_used_ess_fraction': after.ess_fraction,
    }
  return metrics


def _of_groups(config, axis_name, batch):
  """Shares of groups without signal; nothing for single-stream methods."""
  if not config.grouped:
    return {}
  counts = group_advantage.group_counts(
    batch.rewards,
    batch.group_ids,
    weighting.acting(batch),
    num_groups=weighting.num_groups(config, batch),
  )
  total = functools.partial(reduction.global_sum, axis_name=axis_name)
  groups = jnp.maximum(total(counts.groups), 1)
  return {
    'groups_equal_fraction': total(counts.equal) / groups,
    'groups_all_zero_fraction': total(counts.all_zero) / groups,
    'groups_all_one_fraction': total(counts.all_one) / groups,
  }
