"""What a run would need, from its settings alone: no weights, no tasks."""

import collections
import math
import pathlib
import re

import jax
import ml_collections
import numpy as np

from spopp_jax import envs
from spopp_jax.learner import footprint, update
from spopp_jax.models import config_files, dense, presets
from spopp_jax.runner import cold_start, config_rules, training

_GIB = 2**30


def use_cpu_devices(config: ml_collections.ConfigDict) -> None:
  """Lets this machine's CPU stand for the devices of the mesh.

  It must come before anything else asks JAX for its devices.

  Args:
    config: reads the block mesh; a 0 counts as 1.
  """
  sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', math.prod(s or 1 for s in sizes))


def report(config: ml_collections.ConfigDict) -> str:
  """Builds the learner, compiles its largest step and says what it needs.

  Args:
    config: validated.

  Returns:
    Markdown: sizes, shardings, memory and operations.

  Raises:
    TooLarge: the step does not fit mesh.memory_gib.
    ConfigError: the settings describe no learner.
  """
  decoder = decoder_of(config)
  learner = training.make_learner(config, decoder)
  shapes = learner.model_shapes
  count = sum(math.prod(shape.shape) for shape in shapes.values())
  needs = training.footprint_of(
    config, learner, compiler_options=footprint.LIKE_ACCELERATORS
  )
  footprint.check(needs)
  return '\n'.join(
    [
      f'# {config.run.name}',
      '',
      f'{type(decoder).__module__.rpartition(".")[2]} decoder, {count:,} '
      f'parameters; {_mesh(learner)}.',
      '',
      *_table(learner),
      '',
      f'Learner: {needs}',
      '',
      f'Sampler: {_sampler(config, decoder, count)}',
    ]
  )


def decoder_of(config: ml_collections.ConfigDict) -> dense.DecoderConfig:
  """Returns the sizes of the policy that a run would train.

  Raises:
    ConfigError: cold_start.policy has no config.json of a model, or that of
      another one than model.preset.
  """
  preset, policy = config.model.preset, config.cold_start.policy
  if policy:
    try:
      found = config_files.read(pathlib.Path(policy) / 'config.json')
    except ValueError as error:
      raise config_rules.ConfigError(f'cold_start.policy: {error}') from error
    if preset and not presets.fits(found, preset):
      raise config_rules.ConfigError(
        f'cold_start.policy ({policy}) holds another model than model.preset '
        f'({preset}): {found}'
      )
    return found
  if preset:
    return presets.MODELS[preset]
  tasks = envs.load_tasks(config.environment)
  tokenizer = cold_start.build_tokenizer(
    cold_start.demonstrations(config, tasks),
    [tasks.make(task).reset() for task in tasks.task_ids],
  )
  return cold_start.decoder_config(config.model, tokenizer.vocab_size)


def _mesh(learner: update.Learner) -> str:
  sizes = ', '.join(f'{k} {v}' for k, v in learner.mesh.shape.items())
  return f'{learner.mesh.size} devices: {sizes}'


def _table(learner: update.Learner) -> list[str]:
  """Returns rows of parameters alike: names, shape, cut, MiB on a device."""
  groups: dict[tuple, list[str]] = collections.defaultdict(list)
  shardings = learner.parameter_shardings()
  for name, shape in learner.model_shapes.items():
    like = re.sub(r'\.\d+\.', '.*.', name)
    groups[like, shape.shape, shardings[name]].append(name)
  lines = ['| parameters | number | shape | cut along | MiB a device |']
  lines.append('|---|---|---|---|---|')
  for (like, shape, sharding), names in groups.items():
    part = 4 * math.prod(sharding.shard_shape(shape)) * len(names)
    spec = ', '.join(str(axis or '-') for axis in sharding.spec)
    lines.append(
      f'| {like} | {len(names)} | {" x ".join(map(str, shape))} | '
      f'{spec or "-"} | {part / 2**20:.1f} |'
    )
  return lines


def _sampler(
  config: ml_collections.ConfigDict, decoder: dense.DecoderConfig, count: int
) -> str:
  s = config.sampler
  width = np.dtype(s.compute_dtype).itemsize
  caches = jax.eval_shape(
    lambda: dense.empty_caches(
      decoder, s.slots, s.context_length, s.compute_dtype
    )
  )
  size = sum(
    math.prod(x.shape) * np.dtype(x.dtype).itemsize
    for x in jax.tree.leaves(caches)
  )
  return (
    f'{s.slots} slots of {s.context_length} tokens keep {size / _GIB:.3g} GiB '
    f'of cache beside {width * count / _GIB:.3g} GiB of parameters, in '
    f'{s.compute_dtype}.'
  )
