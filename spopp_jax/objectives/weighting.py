"""Detached constants of a minibatch: correction, token mask, denominator."""

import functools

import jax
import jax.numpy as jnp

from spopp_jax import types
from spopp_jax.kernels import (
  diagnostics,
  group_advantage,
  groups,
  importance,
  reduction,
  second_moment_mask,
  segments,
  sequence_ratio,
  target_ess,
)
from spopp_jax.objectives import base
from spopp_jax.objectives.recipe import Config


def num_groups(config: Config, batch: types.PackedBatch) -> int:
  """Returns G, the prompt groups that the batch has room for."""
  return batch.usable.shape[0] // config.group_size


def acting(batch: types.PackedBatch) -> types.Array:
  """Returns the usable trajectories that have an action token: [N] bool."""
  lengths = segments.trajectory_lengths(
    batch.action_mask,
    batch.trajectory_ids,
    num_trajectories=batch.usable.shape[0],
  )
  return batch.usable & (lengths > 0)


def members(config: Config, batch: types.PackedBatch) -> types.Array:
  """Returns the trajectories that count: [N] bool.

  They are usable, have an action token and belong to a group; of the others
  not even the reward is read.
  """
  if not config.grouped:
    return acting(batch)
  count = num_groups(config, batch)
  if config.drop_equal_groups:
    return group_advantage.in_varied_group(
      batch.rewards, batch.group_ids, acting(batch), num_groups=count
    )
  in_group = (batch.group_ids >= 0) & (batch.group_ids < count)
  return acting(batch) & in_group


def counted_tokens(config: Config, batch: types.PackedBatch) -> types.Array:
  """Returns the action tokens of `members`: [B, S] bool."""
  return segments.counted_tokens(
    batch.action_mask, batch.trajectory_ids, members(config, batch)
  )


def compute(
  config: Config,
  axis_name: str | None,
  batch: types.PackedBatch,
  proximal_logprobs: types.Array,
  advantages: types.Array,
) -> tuple[base.Weights, base.Metrics]:
  """Computes an objective's `weights`; arguments as in `base.Objective`."""
  mask = counted_tokens(config, batch)
  proximal_logprobs = jax.lax.stop_gradient(
    jnp.where(mask, proximal_logprobs, 0).astype(jnp.float32)
  )
  log_ratios = importance.log_ratio(
    proximal_logprobs, batch.behaviour_logprobs, mask
  )
  factor, metrics = _correction(config, axis_name, batch, log_ratios, mask)
  kept, mask_metrics = _kept(
    config, axis_name, batch, log_ratios, mask, advantages
  )
  denominator = _denominator(config, batch, proximal_logprobs, mask)
  if config.surrogate == 'clip_weight':
    # r w = current / (proximal / w): the clip then sees the weight too.
    positive = factor > 0
    denominator -= jnp.log(jnp.where(positive, factor, 1))
    factor = positive.astype(jnp.float32)
  counted = kept if config.denominator == 'kept' else mask
  weights = base.Weights(
    importance=jnp.where(kept, factor, 0),
    denominator_logprobs=denominator,
    counted=counted,
    tokens=reduction.global_sum(counted, axis_name=axis_name),
  )
  return jax.lax.stop_gradient((weights, {**metrics, **mask_metrics}))


def _denominator(config, batch, proximal_logprobs, mask):
  """What the current policy is compared with, [B, S] nats."""
  if config.ratio_to == 'proximal':
    return proximal_logprobs
  if config.ratio_to == 'behaviour':
    return jnp.where(mask, batch.behaviour_logprobs, 0).astype(jnp.float32)
  return sequence_ratio.group_expectation_logprobs(
    batch.behaviour_logprobs,
    mask=mask,
    trajectory_ids=batch.trajectory_ids,
    group_ids=batch.group_ids,
    usable=members(config, batch),
    num_groups=num_groups(config, batch),
    length_normalize=config.ratio == 'sequence_mean',
  )


def _correction(config, axis_name, batch, log_ratios, mask):
  """The weight from sampler to learner [B, S], and what it did."""
  if config.correction == 'none':
    return jnp.ones_like(log_ratios), {}
  if config.correction == 'icepop':
    weights = importance.icepop(
      log_ratios, low=config.window_low, high=config.window_high
    )
    return weights, {}
  if config.correction == 'tempered':
    return _tempered(config, axis_name, batch, log_ratios, mask)
  if config.correction == 'sequence':
    sums = _per_trajectory('sum', batch, log_ratios, mask)
    log_ratios = segments.to_tokens(sums, batch.trajectory_ids)
  weights = importance.truncate(log_ratios, cap=config.rollout_cap)
  truncated = diagnostics.weighted_mean(
    (weights >= config.rollout_cap).astype(jnp.float32),
    mask.astype(jnp.float32),
    axis_name=axis_name,
  )
  return weights, {'weight_truncated_fraction': truncated}


def _tempered(config, axis_name, batch, log_ratios, mask):
  """TETPO's weights: one exponent a group, or one for the whole batch."""
  log_weights = _per_trajectory(
    config.tempering_log_ratio, batch, log_ratios, mask
  )
  lengths = segments.trajectory_lengths(
    mask, batch.trajectory_ids, num_trajectories=batch.usable.shape[0]
  )
  active = lengths > 0
  dropped = active & ~target_ess.finite_members(log_weights, active)
  temper = functools.partial(
    _temper,
    config,
    axis_name=axis_name if config.tempering_scope == 'batch' else None,
  )
  if config.tempering_scope == 'batch':
    weights, exponent, ess = temper(log_weights, active)
    has_members = jnp.any(active)
  else:
    shape = {
      'num_groups': num_groups(config, batch),
      'group_size': config.group_size,
    }
    grouped, valid = groups.to_groups(
      log_weights, batch.group_ids, active, **shape
    )
    of_groups, exponent, ess = jax.vmap(temper)(grouped, valid)
    weights = groups.from_groups(of_groups, batch.group_ids, active)
    has_members = valid.any(axis=1)
  present = has_members.astype(jnp.float32)
  mean = functools.partial(diagnostics.weighted_mean, axis_name=axis_name)
  metrics = {
    'tempering_exponent': mean(exponent, present),
    'tempering_exponent_min': -reduction.global_max(
      jnp.where(has_members, -exponent, -1), axis_name=axis_name
    ),
    'tempered_ess_fraction': mean(ess, present),
    'tempering_dropped': reduction.global_sum(dropped, axis_name=axis_name),
  }
  return segments.to_tokens(weights, batch.trajectory_ids), metrics


def _temper(config, log_weights, valid, *, axis_name):
  """Weights [K], exponent [] and ESS fraction [] of one group."""
  exponent = target_ess.tempering_exponent(
    log_weights,
    valid,
    target_ess_fraction=config.target_ess_fraction,
    iterations=config.tempering_iterations,
    axis_name=axis_name,
  )
  weights = target_ess.tempered_weights(
    log_weights,
    valid,
    exponent,
    scale=config.tempering_scale,
    axis_name=axis_name,
  )
  log_ess = target_ess.log_ess(
    log_weights, valid, exponent, axis_name=axis_name
  )
  counted = target_ess.finite_members(log_weights, valid)
  number = reduction.global_sum(counted, axis_name=axis_name)
  return weights, exponent, jnp.exp(log_ess) / jnp.maximum(number, 1)


def _kept(config, axis_name, batch, log_ratios, mask, advantages):
  """Tokens that the mask does not reject [B, S], and what it did."""
  if config.token_mask == 'none':
    return mask, {}
  window = {'low': config.window_low, 'high': config.window_high}
  metrics = {}
  if config.token_mask == 'window':
    kept = mask & importance.in_window(log_ratios, **window)
  elif config.token_mask == 'geometric_mean':
    kept = importance.geometric_mean_mask(
      log_ratios,
      mask,
      batch.trajectory_ids,
      num_trajectories=batch.usable.shape[0],
      **window,
    )
  else:
    chosen = second_moment_mask.second_moment_mask(
      log_ratios,
      segments.to_tokens(advantages, batch.trajectory_ids),
      mask,
      threshold=config.second_moment_threshold,
      variant=config.second_moment_variant,
      axis_name=axis_name,
    )
    kept = chosen.kept
    metrics = {
      'second_moment': chosen.second_moment,
      'second_moment_kept': chosen.kept_second_moment,
      'second_moment_all_masked': chosen.all_masked.astype(jnp.float32),
    }
  metrics['rejected_fraction'] = diagnostics.weighted_mean(
    (~kept).astype(jnp.float32),
    mask.astype(jnp.float32),
    axis_name=axis_name,
  )
  return kept, metrics


def _per_trajectory(kind, batch, log_ratios, mask):
  """Sum or mean of each trajectory's log-ratios, [N] nats."""
  reduce = (
    importance.sequence_log_weights
    if kind == 'sum'
    else importance.sequence_mean_log_ratios
  )
  return reduce(
    log_ratios,
    mask,
    batch.trajectory_ids,
    num_trajectories=batch.usable.shape[0],
  )
