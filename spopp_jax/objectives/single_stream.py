"""The composition that single-stream objectives share (SPO, SPO++).

One rollout a prompt, an advantage R - v-hat standardized under a measure, a
truncated rollout weight, a clipped surrogate with dual clip and a token mean:
SPO and SPO++ differ in the fields of the Config alone.
"""

import dataclasses
import functools
import math
import numbers

import jax
import jax.numpy as jnp

from spopp_jax.kernels import (
  aggregate,
  diagnostics,
  importance,
  reduction,
  segments,
  standardize,
  surrogate,
)
from spopp_jax.objectives import base

_CHOICES = {
  'measure': ('action_token', 'trajectory'),
  'baseline': ('event_time', 'receipt_order'),
  'rollout_level': ('token', 'sequence'),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What a single-stream recipe decides.

  Attributes:
    measure: 'action_token' (Eq. 6) or 'trajectory' (Eq. 4) standardization.
    baseline: which evidence gives v-hat: 'event_time' (Eq. 3) or
      'receipt_order' (Eq. 2).
    dual_clip: c > 1; loss cap -c A where the advantage is negative; 0 is off.
    clip_low: [0, 1); the ratio's range is [1 - clip_low, 1 + clip_high].
    clip_high: >= 0.
    rollout_cap: >= 1; upper truncation of the rollout weight.
    rollout_level: 'token' or 'sequence' (one weight a trajectory).
    center: subtract the mean advantage.
    scale: divide by the advantage's deviation.
  """

  measure: str
  baseline: str
  dual_clip: float
  clip_low: float = 0.2
  clip_high: float = 0.28
  rollout_cap: float = 2.0
  rollout_level: str = 'token'
  center: bool = True
  scale: bool = True

  def __post_init__(self):
    for name, allowed in _CHOICES.items():
      value = getattr(self, name)
      if value not in allowed:
        raise ValueError(f'{name} ({value!r}) must be one of {allowed}')
    for name in ('center', 'scale'):
      if not isinstance(getattr(self, name), bool):
        raise ValueError(f'{name} ({getattr(self, name)!r}) must be a bool')
    _require(
      self, 'dual_clip', lambda c: c > 1 or c == 0, 'must exceed 1 (0 is off)'
    )
    _require(self, 'clip_low', lambda e: 0 <= e < 1, 'must lie in [0, 1)')
    _require(self, 'clip_high', lambda e: e >= 0, 'must be at least 0')
    _require(self, 'rollout_cap', lambda c: c >= 1, 'must be at least 1')


def _require(config, name, holds, sentence):
  value = getattr(config, name)
  number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not number:
    raise ValueError(f'{name} ({value!r}) must be a number')
  if not (math.isfinite(value) and holds(value)):
    raise ValueError(f'{name} ({value}) {sentence} and be finite')


def compose(
  name: str, config: Config, *, axis_name: str | None = None
) -> base.Objective:
  """Builds the objective of a single-stream recipe.

  Args:
    name: registry name.
    config: the recipe.
    axis_name: mapped axis that the trajectories are spread over; every device
      then holds a whole PackedBatch. None under jit on global arrays.

  Returns:
    The objective. Its advantages and diagnostics reduce over the mapped
    axis; its loss returns the sums of the local batch.
  """
  return base.Objective(
    name=name,
    group_size=1,
    baseline=config.baseline,
    advantages=functools.partial(_advantages, config, axis_name),
    weights=functools.partial(_weights, config),
    loss=functools.partial(_loss, config),
    diagnostics=functools.partial(_diagnostics, config, axis_name),
  )


def _advantages(config, axis_name, batch):
  """A~ [N]: R - v-hat, standardized under the configured measure."""
  lengths = _lengths(batch)
  measure = lengths if config.measure == 'action_token' else lengths > 0
  return standardize.standardize(
    batch.rewards - batch.values,
    measure.astype(jnp.float32),
    batch.usable,
    center=config.center,
    scale=config.scale,
    axis_name=axis_name,
  )


def _weights(config, batch, proximal_logprobs, advantages):
  """Detached rollout weights [B, S]; 0 outside the mask."""
  del advantages  # the weights of these recipes do not depend on them
  token, sequence = _log_weights(batch, proximal_logprobs)
  if config.rollout_level == 'sequence':
    token = segments.to_tokens(sequence, batch.trajectory_ids)
  truncated = importance.truncate(token, cap=config.rollout_cap)
  return jnp.where(_mask(batch), truncated, 0)


def _loss(config, logprobs, batch, proximal_logprobs, advantages, weights):
  """Clip, dual clip, weight, mask, sum: in this order."""
  mask = _mask(batch)
  terms = surrogate.clipped_surrogate(
    current_logprobs=logprobs,
    proximal_logprobs=proximal_logprobs,
    advantages=segments.to_tokens(advantages, batch.trajectory_ids),
    mask=mask,
    clip_low=config.clip_low,
    clip_high=config.clip_high,
    dual_clip=config.dual_clip or None,
  )
  weights = jax.lax.stop_gradient(jnp.where(mask, weights, 0))
  numerator, count = aggregate.token_mean(terms.loss * weights, mask)
  sums = {
    'ratio': terms.ratio,
    'clip_fraction': terms.clipped,
    'dual_clip_fraction': terms.dual_clipped,
    'k1': terms.k1,
    'k3': terms.k3,
    'rollout_weight': weights,
  }
  metrics = {
    name: aggregate.token_mean(values, mask)[0] for name, values in sums.items()
  }
  return numerator, count, metrics


def _diagnostics(config, axis_name, batch, advantages, proximal_logprobs):
  """Whether A~ and the weights are sound on the whole collected batch."""
  mask = _mask(batch)
  lengths = _lengths(batch)
  token, sequence = _log_weights(batch, proximal_logprobs)
  weights = _weights(config, batch, proximal_logprobs, advantages)
  token_advantages = segments.to_tokens(advantages, batch.trajectory_ids)
  mean = functools.partial(diagnostics.weighted_mean, axis_name=axis_name)
  largest = reduction.global_max(jnp.abs(advantages), axis_name=axis_name)
  coupling = diagnostics.length_coupling(
    advantages, lengths, axis_name=axis_name
  )
  metrics = {
    'advantage_token_mean': mean(advantages, lengths),
    'advantage_weighted_token_mean': mean(token_advantages, weights),
    'degenerate_batch': (largest == 0).astype(jnp.float32),
    'length_residual': coupling.residual,
    'length_advantage_correlation': coupling.correlation,
    'weight_truncated_mean': mean(weights, mask.astype(jnp.float32)),
    'weight_truncated_fraction': mean(
      weights >= config.rollout_cap, mask.astype(jnp.float32)
    ),
  }
  for level, log_weights, counted in (
    ('token', token, mask),
    ('sequence', sequence, lengths > 0),
  ):
    statistics = diagnostics.weight_statistics(
      log_weights, counted, axis_name=axis_name
    )
    metrics[f'weight_{level}_mean'] = statistics.mean
    metrics[f'weight_{level}_max'] = statistics.max
    metrics[f'weight_{level}_ess_fraction'] = statistics.ess_fraction
  return metrics


def _mask(batch):
  return segments.counted_tokens(
    batch.action_mask, batch.trajectory_ids, batch.usable
  )


def _lengths(batch):
  return segments.trajectory_lengths(
    _mask(batch),
    batch.trajectory_ids,
    num_trajectories=batch.usable.shape[0],
  )


def _log_weights(batch, proximal_logprobs):
  """Raw log rollout weights of tokens [B, S] and of sequences [N]."""
  mask = _mask(batch)
  token = importance.log_ratio(
    proximal_logprobs, batch.behaviour_logprobs, mask
  )
  sequence = importance.sequence_log_weights(
    token,
    mask,
    batch.trajectory_ids,
    num_trajectories=batch.usable.shape[0],
  )
  return token, sequence
