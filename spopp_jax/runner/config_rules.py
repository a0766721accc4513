"""Which values settings may have, alone and together."""

import math
from collections.abc import Mapping
from typing import Any

import ml_collections

from spopp_jax import objectives


class ConfigError(ValueError):
  """A configuration that is refused; the text says what to change."""


# Smallest and largest value; a round bracket excludes the end itself.
_RANGES = {
  '[1, inf)': (
    'run.steps',
    'run.checkpoint_every_steps',
    'environment.num_tasks',
    'environment.step_limit',
    'model.hidden_size',
    'model.num_layers',
    'model.num_heads',
    'model.num_key_value_heads',
    'model.head_dim',
    'model.intermediate_size',
    'cold_start.steps',
    'cold_start.batch_size',
    'cold_start.num_games',
    'evaluation.rollouts_per_task',
    'sampler.slots',
    'sampler.context_length',
    'sampler.max_turn_tokens',
    'dispatch.batch_size',
    'dispatch.in_flight',
    'learner.minibatches',
    'learner.row_length',
  ),
  '[0, inf)': (
    'offline.rollouts_per_task',
    'sampler.top_k',
    'optimizer.weight_decay',
    'optimizer.warmup_steps',
  ),
  '(0, inf)': (
    'model.rope_theta',
    'cold_start.learning_rate',
    'sampler.temperature',
    'sampler.connect_timeout_s',
    'sampler.rollout_timeout_s',
    'sampler.recovery_timeout_s',
    'dispatch.floor',
    'evidence.drift_half_life',
    'optimizer.learning_rate',
    'optimizer.max_grad_norm',
  ),
  '(0, 1)': (
    'evidence.retention',
    'evidence.retention_min',
    'evidence.retention_max',
  ),
  '[0, 1)': (
    'cold_start.dither',
    'optimizer.b1',
    'optimizer.b2',
  ),
  '(0, 1]': ('sampler.top_p',),
  '[0, 4294967295]': ('seed', 'environment.seed'),
}

_CHOICES = {
  'environment.name': ('household',),
  'environment.size': ('small', 'medium', 'large'),
  'dispatch.max_lag_events': (0, 1),
  'dispatch.evidence_from': ('received', 'consumed'),
  'evidence.drift_estimator': ('abs_logratio', 'k1', 'k3'),
  'evidence.drift_mask': ('action', 'response'),
}


def check_rules(
  config: ml_collections.ConfigDict, values: Mapping[str, Any]
) -> None:
  """Refuses values outside their range and settings that exclude each other.

  Args:
    config: the tree of settings, names and types already checked.
    values: its leaves by dotted name.

  Raises:
    ConfigError: naming the setting, its value and what is allowed.
  """
  for interval, names in _RANGES.items():
    for name in names:
      if not _inside(values[name], interval):
        raise ConfigError(f'{name} ({values[name]}) must be in {interval}')
  for name, allowed in _CHOICES.items():
    if values[name] not in allowed:
      raise ConfigError(
        f'{name} ({values[name]!r}) must be one of '
        + ', '.join(map(str, allowed))
      )
  _check_objective(config.objective)
  _check_flow(config)
  _check_shapes(config)


def _inside(value: float, interval: str) -> bool:
  low, high = (float(end) for end in interval[1:-1].split(','))
  above = value > low or (interval[0] == '[' and value == low)
  below = value < high or (interval[-1] == ']' and value == high)
  return math.isfinite(value) and above and below


def _check_objective(objective: ml_collections.ConfigDict) -> None:
  """Builds the objective: its own Config knows what it allows."""
  fields = {
    name: value
    for name, value in objective.items()
    if name != 'name' and value is not None
  }
  try:
    objectives.make_objective(objective.name, fields)
  except ValueError as error:
    raise ConfigError(f'objective.name={objective.name}: {error}') from error


def _check_flow(config: ml_collections.ConfigDict) -> None:
  batch_size, in_flight = config.dispatch.batch_size, config.dispatch.in_flight
  num_tasks, path = config.environment.num_tasks, config.environment.path
  if in_flight < batch_size:
    raise ConfigError(
      f'dispatch.in_flight ({in_flight}) must be at least '
      f'dispatch.batch_size ({batch_size}): a batch would never fill'
    )
  if not path and in_flight > num_tasks:
    raise ConfigError(
      f'dispatch.in_flight ({in_flight}) must be at most '
      f'environment.num_tasks ({num_tasks}): a task has one request in flight'
    )
  if batch_size < config.learner.minibatches:
    raise ConfigError(
      f'dispatch.batch_size ({batch_size}) must be at least '
      f'learner.minibatches ({config.learner.minibatches})'
    )
  sampler = config.sampler
  if sampler.top_p < 1 or sampler.top_k > 0:
    raise ConfigError(
      f'sampler.top_p ({sampler.top_p}) must be 1 and sampler.top_k '
      f'({sampler.top_k}) 0 in training: the importance ratio of truncated '
      'decoding is not exact'
    )
  if sampler.address and ':' not in sampler.address:
    raise ConfigError(
      f'sampler.address ({sampler.address!r}) must be host:port'
    )
  if not config.run.name:
    raise ConfigError('run.name must not be empty')


def _check_shapes(config: ml_collections.ConfigDict) -> None:
  model, learner, sampler = config.model, config.learner, config.sampler
  if model.num_heads % model.num_key_value_heads:
    raise ConfigError(
      f'model.num_key_value_heads ({model.num_key_value_heads}) must divide '
      f'model.num_heads ({model.num_heads})'
    )
  if model.head_dim % 2:
    raise ConfigError(f'model.head_dim ({model.head_dim}) must be even')
  if sampler.max_turn_tokens >= sampler.context_length:
    raise ConfigError(
      f'sampler.max_turn_tokens ({sampler.max_turn_tokens}) must be below '
      f'sampler.context_length ({sampler.context_length})'
    )
  if learner.row_length < sampler.context_length:
    raise ConfigError(
      f'learner.row_length ({learner.row_length}) must be at least '
      f'sampler.context_length ({sampler.context_length}): a trajectory is '
      'packed into one row'
    )
  buckets = learner.row_buckets
  if buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
    raise ConfigError(
      f'learner.row_buckets ({buckets}) must be positive and rising'
    )
  low, high = config.evidence.retention_min, config.evidence.retention_max
  if low > high:
    raise ConfigError(
      f'evidence.retention_min ({low}) must be at most '
      f'evidence.retention_max ({high})'
    )
