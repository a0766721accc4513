"""Joins the kernels that a recipe names into an objective."""

import functools
import math

import jax
import jax.numpy as jnp

from spopp_jax import types
from spopp_jax.kernels import (
  aggregate,
  group_advantage,
  importance,
  overlong,
  segments,
  sequence_ratio,
  standardize,
  surrogate,
)
from spopp_jax.objectives import base, diagnosis, weighting
from spopp_jax.objectives.recipe import Config


def compose(
  name: str, config: Config, *, axis_name: str | None = None
) -> base.Objective:
  """Builds the objective of a recipe.

  Args:
    name: registry name.
    config: the recipe.
    axis_name: mapped axis that the trajectories are spread over; every device
      then holds a whole PackedBatch. None under jit on global arrays.

  Returns:
    The objective. Its advantages, weights and diagnostics reduce over the
    mapped axis; its loss returns the sums of the local batch.
  """
  return base.Objective(
    name=name,
    group_size=config.group_size,
    baseline=config.evidence,
    advantages=functools.partial(advantages, config, axis_name),
    weights=functools.partial(weighting.compute, config, axis_name),
    loss=functools.partial(loss, config),
    diagnostics=functools.partial(diagnosis.compute, config, axis_name),
  )


def advantages(
  config: Config, axis_name: str | None, batch: types.PackedBatch
) -> types.Array:
  """Baseline x measure: [N] float32, 0 for what does not count."""
  usable = weighting.members(config, batch)
  lengths = segments.trajectory_lengths(
    weighting.counted_tokens(config, batch),
    batch.trajectory_ids,
    num_trajectories=batch.usable.shape[0],
  )
  rewards = batch.rewards
  if config.overlong_limit > 0:
    rewards = rewards + overlong.soft_overlong_penalty(
      lengths, limit=config.overlong_limit, buffer=config.overlong_buffer
    )
  if config.grouped:
    raw = group_advantage.group_advantages(
      rewards,
      batch.group_ids,
      usable,
      num_groups=weighting.num_groups(config, batch),
      scale=config.measure == 'group',
      leave_one_out=config.baseline == 'leave_one_out',
    )
  else:
    raw = jnp.where(usable, rewards - batch.values, 0).astype(jnp.float32)
  if config.measure in ('group', 'none'):
    return raw
  measure = lengths if config.measure == 'action_token' else lengths > 0
  return standardize.standardize(
    raw,
    measure.astype(jnp.float32),
    usable,
    center=config.center,
    scale=config.scale,
    axis_name=axis_name,
  )


def loss(
  config: Config,
  logprobs: types.Array,
  batch: types.PackedBatch,
  advantages: types.Array,
  weights: base.Weights,
) -> tuple[types.Array, types.Array, base.Metrics]:
  """Ratio x surrogate, weight, mask, sum: in this order."""
  mask = weights.counted
  logprobs, weights = _without_rejected_garbage(logprobs, weights)
  terms = _surrogate(
    config,
    *_ratio(config, logprobs, batch, weights),
    batch=batch,
    advantages=segments.to_tokens(advantages, batch.trajectory_ids),
    mask=mask,
  )
  factor = jax.lax.stop_gradient(jnp.where(mask, weights.importance, 0))
  numerator, count = _aggregate(
    config, terms.loss * factor, batch, mask, weights.tokens
  )
  sums = {
    'ratio': terms.ratio,
    'clip_fraction': terms.clipped,
    'dual_clip_fraction': terms.dual_clipped,
    'k1': terms.k1,
    'k3': terms.k3,
    'rollout_weight': factor,
  }
  metrics = {
    name: aggregate.token_mean(values, mask)[0] for name, values in sums.items()
  }
  return numerator, count, metrics


def _without_rejected_garbage(logprobs, weights):
  """Clears log-ratios that are not finite where the weight is 0.

  0 * NaN is NaN, in the value and in the gradient.
  """
  gap = logprobs - weights.denominator_logprobs
  garbage = (weights.importance == 0) & ~jnp.isfinite(gap)
  denominator = jnp.where(garbage, 0, weights.denominator_logprobs)
  return (
    jnp.where(garbage, 0, logprobs),
    weights._replace(denominator_logprobs=denominator),
  )


def _ratio(config, logprobs, batch, weights):
  """Current log-probs and what they are compared with, token by token."""
  denominator = jax.lax.stop_gradient(weights.denominator_logprobs)
  if config.ratio == 'token':
    return logprobs, denominator
  log_ratios = sequence_ratio.token_form_log_ratios(
    importance.log_ratio(logprobs, denominator, weights.counted),
    weights.counted,
    batch.trajectory_ids,
    num_trajectories=batch.usable.shape[0],
    length_normalize=config.ratio == 'sequence_mean',
  )
  return log_ratios, jnp.zeros_like(log_ratios)


def _surrogate(config, current, compared, *, batch, advantages, mask):
  common = {
    'current_logprobs': current,
    'proximal_logprobs': compared,
    'advantages': advantages,
    'mask': mask,
  }
  bounds = {'clip_low': config.clip_low, 'clip_high': config.clip_high}
  if config.surrogate == 'likelihood':
    return surrogate.weighted_likelihood(**common, **bounds)
  if config.surrogate == 'unclipped':
    bounds = {'clip_low': 1.0, 'clip_high': math.inf}
  judged = (
    batch.behaviour_logprobs if config.clip_region == 'behaviour' else None
  )
  return surrogate.clipped_surrogate(
    **common,
    **bounds,
    dual_clip=config.dual_clip or None,
    region_logprobs=judged,
  )


def _aggregate(config, values, batch, mask, tokens):
  if config.aggregation == 'token_mean':
    return aggregate.token_mean(values, mask)
  if config.aggregation == 'token_sum':
    return aggregate.token_sum(values, mask, total_tokens=tokens)
  per_trajectory = functools.partial(
    getattr(aggregate, config.aggregation),
    values,
    mask,
    batch.trajectory_ids,
    num_trajectories=batch.usable.shape[0],
  )
  if config.aggregation == 'seq_mean_token_sum_norm':
    return per_trajectory(norm=config.aggregation_norm)
  return per_trajectory()
