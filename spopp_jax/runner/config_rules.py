"""Which values settings may have, alone and together."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections
import numpy as np

from spopp_jax import envs, objectives, tracker
from spopp_jax.envs import household
from spopp_jax.models import (
  chat_formats,
  parameters,
  presets,
  rematerialization,
)
from spopp_jax.runner import sampler_list, staleness
from spopp_jax.sampler import credentials


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
    'offline.rollouts_per_task',
    'evaluation.rollouts_per_task',
    'cold_start.max_turns',
    'dispatch.attempts',
    'dispatch.per_prompt',
    'sampler.slots',
    'sampler.context_length',
    'sampler.max_turn_tokens',
    'dispatch.batch_size',
    'dispatch.in_flight',
    'learner.minibatches',
    'learner.microbatches',
    'learner.chunk_tokens',
    'learner.row_length',
    'hosts.count',
  ),
  '[0, inf)': (
    'dispatch.max_lag',
    'lora.rank',
    'mesh.data',
    'mesh.fsdp',
    'mesh.tensor',
    'mesh.memory_gib',
    'hosts.index',
    'optimizer.weight_decay',
    'optimizer.warmup_steps',
  ),
  '(0, inf)': (
    'lora.alpha',
    'cold_start.learning_rate',
    'sampler.temperature',
    'sampler.connect_timeout_s',
    'sampler.rollout_timeout_s',
    'sampler.recovery_timeout_s',
    'hosts.start_timeout_s',
    'optimizer.learning_rate',
    'optimizer.max_grad_norm',
  ),
  '[0, 1)': (
    'cold_start.dither',
    'optimizer.b2',
  ),
  '(0, 1]': ('sampler.top_p',),
  '[0, 1]': ('sampler.min_p',),
  '[0, 4294967295]': ('seed', 'environment.seed', 'sampler.top_k'),
}

_CHOICES = {
  'model.preset': ('', *presets.MODELS),
  'model.chat_format': ('words', *chat_formats.FORMATS),
  'environment.size': ('small', 'medium', 'large'),
  'dispatch.staleness': staleness.POLICIES,
  'sampler.transport': ('auto', 'directory', 'grpc'),
  'dispatch.evidence_from': ('received', 'consumed'),
  'learner.compute_dtype': parameters.COMPUTE_DTYPES,
  'sampler.compute_dtype': parameters.COMPUTE_DTYPES,
  'learner.remat': rematerialization.CHOICES,
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
        + ', '.join(str(choice) or "''" for choice in allowed)
      )
  if config.model.chat_format == 'words' and config.model.system_prompt:
    raise ConfigError(
      f'model.system_prompt ({config.model.system_prompt!r}) must be empty '
      "with model.chat_format 'words', which has no system turn"
    )
  _check_task_types(config.environment.task_types)
  _check_flow(config, _check_method(config))
  _check_shapes(config)
  _check_samplers(config.sampler)
  if not config.run.dry_run:
    _check_start(config)
  _check_mesh(config.mesh)
  _check_hosts(config.hosts)


def sampler_credentials(
  sampler: ml_collections.ConfigDict,
) -> credentials.Credentials:
  """Returns the runner's own credentials.

  Raises:
    ConfigError: a file that is not there; some but not all files of TLS.
  """
  names = ('tls_ca', 'tls_certificate', 'tls_key', 'token_file')
  for name in names:
    if sampler[name] and not pathlib.Path(sampler[name]).is_file():
      raise ConfigError(
        f'sampler.{name} ({sampler[name]!r}) must be a file on this machine; '
        'the README says how to make one'
      )
  try:
    return credentials.Credentials(*(sampler[name] for name in names))
  except ValueError as error:
    raise ConfigError(
      f'sampler.tls_ca, sampler.tls_certificate, sampler.tls_key: {error}'
    ) from error


def _check_samplers(sampler: ml_collections.ConfigDict) -> None:
  own = sampler_credentials(sampler)
  for address in sampler.addresses:
    try:
      if address != sampler_list.LOCAL:
        credentials.check_address(address, own, sampler.allow_insecure)
    except ValueError as error:
      raise ConfigError(
        f"sampler.addresses: {error}, or 'local' to start a service"
      ) from error


def _check_start(config: ml_collections.ConfigDict) -> None:
  """Refuses what a run cannot begin with, though a dry run can."""
  name, preset = config.environment.name, config.model.preset
  if name not in envs.SUITES:
    raise ConfigError(
      f'environment.name ({name!r}) must be one of {", ".join(envs.SUITES)}'
    )
  if preset and not (config.cold_start.policy or config.run.resume):
    raise ConfigError(
      f'model.preset ({preset!r}) is a model with weights of its own: '
      'cold_start.policy must name the directory that holds them'
    )


def _check_mesh(mesh: ml_collections.ConfigDict) -> None:
  if [mesh.data, mesh.fsdp, mesh.tensor].count(0) > 1:
    raise ConfigError(
      f'of mesh.data ({mesh.data}), mesh.fsdp ({mesh.fsdp}) and mesh.tensor '
      f'({mesh.tensor}) only one may be 0, which is what the others leave'
    )


def _check_hosts(hosts: ml_collections.ConfigDict) -> None:
  if hosts.index >= hosts.count:
    raise ConfigError(
      f'hosts.index ({hosts.index}) must be below hosts.count ({hosts.count})'
    )
  name, _, port = hosts.coordinator.rpartition(':')
  if not name or not port.isdecimal() or not 1 <= int(port) <= 65535:
    raise ConfigError(
      f'hosts.coordinator ({hosts.coordinator!r}) must be host:port with a '
      'port from 1 to 65535'
    )


def _inside(value: float, interval: str) -> bool:
  low, high = (float(end) for end in interval[1:-1].split(','))
  above = value > low or (interval[0] == '[' and value == low)
  below = value < high or (interval[-1] == ']' and value == high)
  return math.isfinite(value) and above and below


def given(block: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the settings that are not left to the method's own default."""
  return {name: value for name, value in block.items() if value is not None}


def _check_task_types(kinds: tuple[str, ...]) -> None:
  known = household.TASK_TYPES
  if len(set(kinds)) < len(kinds) or not set(kinds) <= set(known):
    raise ConfigError(
      f'environment.task_types ({kinds}) must be distinct names out of '
      f'{", ".join(known)}'
    )


def _check_method(config: ml_collections.ConfigDict) -> int:
  """Builds objective and evidence: their own code knows what it allows.

  Returns the objective's group size.
  """
  fields = given(config.objective)
  name = fields.pop('name')
  try:
    objective = objectives.make_objective(name, fields)
  except ValueError as error:
    raise ConfigError(f'objective.name={name}: {error}') from error
  try:
    tracker.make_evidence(
      objective.baseline,
      ['task'],
      np.array([0.5]),
      np.array([0.5]),
      **given(config.evidence),
    )
  except ValueError as error:
    raise ConfigError(f'evidence of objective {name}: {error}') from error
  return objective.group_size


def _check_flow(config: ml_collections.ConfigDict, group_size: int) -> None:
  batch_size, in_flight = config.dispatch.batch_size, config.dispatch.in_flight
  num_tasks = config.environment.num_tasks
  if in_flight < batch_size:
    raise ConfigError(
      f'dispatch.in_flight ({in_flight}) must be at least '
      f'dispatch.batch_size ({batch_size}): a batch would never fill'
    )
  for name, count in (('batch_size', batch_size), ('in_flight', in_flight)):
    if count % group_size:
      raise ConfigError(
        f"dispatch.{name} ({count}) must be a multiple of the objective's "
        f'group_size ({group_size}): prompt groups are dispatched whole'
      )
  per_prompt = config.dispatch.per_prompt
  if in_flight // group_size > num_tasks * per_prompt:
    raise ConfigError(
      f'dispatch.in_flight ({in_flight}) must be at most '
      f'environment.num_tasks ({num_tasks}) times group_size ({group_size}) '
      f'times dispatch.per_prompt ({per_prompt}), the groups that a task has '
      'in flight'
    )
  if batch_size // group_size < config.learner.minibatches:
    raise ConfigError(
      f'dispatch.batch_size ({batch_size}) must be at least '
      f'learner.minibatches ({config.learner.minibatches}) times group_size '
      f'({group_size})'
    )
  _check_staleness(config, group_size)
  name = config.run.name
  if not name or name in ('.', '..') or '/' in name or '\\' in name:
    raise ConfigError(
      f'run.name ({name!r}) must be the name of one directory; run.directory '
      'says where it lies'
    )


def _check_staleness(
  config: ml_collections.ConfigDict, group_size: int
) -> None:
  settings = config.dispatch
  policy, max_lag = settings.staleness, settings.max_lag
  crosses = policy in ('bounded', 'interruptible')
  lags = {'drain': '0 or 1', 'scheduled': 'at least 1'}
  if (policy == 'drain' and max_lag > 1) or (
    policy == 'scheduled' and max_lag < 1
  ):
    raise ConfigError(
      f'dispatch.max_lag ({max_lag}) must be {lags[policy]} with '
      f'dispatch.staleness {policy}'
    )
  if settings.discard_overdue and not crosses:
    raise ConfigError(
      f'dispatch.discard_overdue has no meaning with dispatch.staleness '
      f'{policy}: nothing becomes overdue; bounded and interruptible read it'
    )
  if settings.discard_overdue and settings.in_order:
    raise ConfigError(
      'dispatch.discard_overdue and dispatch.in_order exclude each other: what '
      'is overdue depends on timing'
    )
  if settings.in_order and crosses and settings.evidence_from != 'consumed':
    raise ConfigError(
      f'dispatch.in_order with dispatch.staleness {policy} needs '
      "dispatch.evidence_from='consumed': when an outcome is received depends "
      'on timing'
    )
  # A scheduled step draws its prompts whatever waits for other steps.
  groups = settings.batch_size // group_size
  if policy == 'scheduled' and groups > config.environment.num_tasks:
    raise ConfigError(
      f'dispatch.batch_size ({settings.batch_size}) holds more groups than '
      f'there are tasks ({config.environment.num_tasks})'
    )


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
