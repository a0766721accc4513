"""What a step needs of memory and arithmetic, before there is a weight.

The update is compiled for abstract arrays; the compiler says what it keeps.
"""

import math
import os
from typing import NamedTuple

import jax

from spopp_jax import types
from spopp_jax.learner import update

_GIB = 2**30
# The CPU's own scheduler begins all it can, and its compiler merges what is to
# be computed anew with what was computed before: no program for accelerators.
LIKE_ACCELERATORS: dict[str, str | bool] = {
  'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED',
  'xla_disable_hlo_passes': 'cse_barrier_expander',
}


class TooLarge(ValueError):
  """A step needs more memory than a device has; says what would lower it."""


class Footprint(NamedTuple):
  """A step's needs; bytes are those of the device that needs most.

  Attributes:
    shape: M minibatches of B rows of S tokens.
    devices: over which it is spread.
    trained: number of parameters that are trained.
    held_bytes: parameters, optimizer state and batch, in and out, those that
      are written in place once.
    working_bytes: gradients, activations and all else in between, as the
      compiler of this platform lays them out; another one's may differ.
    available_bytes: of one device; 0 is unknown.
    flops: of all devices together, by the rule of 6 operations a parameter of
      a product and token (2 forward, 4 backward), 2 more for full
      rematerialization and 2 more where log-probs are computed beforehand.
      Adapters save the 2 of a frozen parameter's own gradient. Attention's
      products of tokens with tokens are not in it, padding is.
    counted_flops: of all devices together, as the compiler counts what it made;
      what a loop repeats (minibatches, microbatches, chunks of the head) counts
      once, so with one of each it is comparable, and else a lower bound.
    advice: settings that would lower the memory, most helpful first.
  """

  shape: tuple[int, int, int]
  devices: int
  trained: int
  held_bytes: int
  working_bytes: int
  available_bytes: int
  flops: float
  counted_flops: float
  advice: tuple[str, ...]

  @property
  def needed_bytes(self) -> int:
    """Returns all that a device has to hold at once."""
    return self.held_bytes + self.working_bytes

  def __str__(self) -> str:
    minibatches, rows, length = self.shape
    has = (
      f'of {_gib(self.available_bytes)}'
      if self.available_bytes
      else '(what it has is not known)'
    )
    return (
      f'a step of {minibatches} x {rows} x {length} tokens on {self.devices} '
      f'devices needs {_gib(self.needed_bytes)} a device {has}: '
      f'{_gib(self.held_bytes)} for parameters, optimizer state and batch, '
      f'{_gib(self.working_bytes)} for gradients and activations. It takes '
      f'{self.flops:.3g} operations by the rule of 6 a parameter and token; '
      f'the compiler counts {self.counted_flops:.3g}, loop bodies once. '
      f'{self.trained:,} parameters are trained.'
    )


def measure(
  learner: update.Learner,
  batch: types.PackedBatch,
  *,
  available_bytes: int | None = None,
  compiler_options: dict[str, str | bool] | None = None,
) -> Footprint:
  """Compiles an update, which needs no weights, and reads off its needs.

  Args:
    learner: need not have a state.
    batch: of the shapes in question, such as `packing.padding`.
    available_bytes: of a device; None asks the device.
    compiler_options: of XLA; without any, `learner.update` runs this very
      program for such batches, so that nothing is compiled twice. A dry run for
      other devices passes LIKE_ACCELERATORS on a CPU.

  Raises:
    ValueError: the compiler does not say.
  """
  program = learner.compile(batch, compiler_options)
  memory, costs = program.memory_analysis(), program.cost_analysis()
  if memory is None or costs is None:
    platform = learner.mesh.local_devices[0].platform
    raise ValueError(f'the compiler of {platform} does not say what it needs')
  out = memory.output_size_in_bytes - memory.alias_size_in_bytes
  devices = learner.mesh.size
  if available_bytes is None:
    available_bytes = device_bytes(learner.mesh)
  found = Footprint(
    shape=batch.tokens.shape,
    devices=devices,
    trained=sum(math.prod(x.shape) for x in learner.shapes.values()),
    held_bytes=memory.argument_size_in_bytes + out,
    working_bytes=memory.temp_size_in_bytes,
    available_bytes=available_bytes,
    flops=flops(learner, batch.tokens.shape),
    counted_flops=devices * float(costs['flops']),
    advice=(),
  )
  return found._replace(advice=_advice(learner, found))


def check(footprint: Footprint) -> None:
  """Refuses a step that does not fit.

  Raises:
    TooLarge: naming what it needs, what there is, and what would help.
  """
  f = footprint
  if not f.available_bytes or f.needed_bytes <= f.available_bytes:
    return
  advice = '; '.join(f.advice) or 'more or larger devices'
  raise TooLarge(
    f'a step needs {_gib(f.needed_bytes)} a device, has '
    f'{_gib(f.available_bytes)} ({_gib(f.held_bytes)} for parameters, '
    f'optimizer state and batch, {_gib(f.working_bytes)} for gradients and '
    f'activations). What lowers it: {advice}'
  )


def device_bytes(mesh: jax.sharding.Mesh) -> int:
  """Returns the memory of the mesh's smallest device here; 0 is unknown.

  CPU devices share what the host has.
  """
  sizes = []
  for device in mesh.local_devices:
    if device.platform == 'cpu':
      host = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
      sizes.append(host // len(mesh.local_devices))
    else:
      sizes.append((device.memory_stats() or {}).get('bytes_limit', 0))
  return min(sizes)


def flops(learner: update.Learner, shape: tuple[int, ...]) -> float:
  """Returns the operations of a step by the rule; see `Footprint`.

  Args:
    learner: its parameters and settings count.
    shape: [M, B, S].
  """
  model = learner.model_shapes
  tied = 'lm_head.weight' not in model
  products = sum(
    math.prod(x.shape)
    for name, x in model.items()
    # Looking a word up is no product.
    if len(x.shape) > 1 and (tied or not name.endswith('embed_tokens.weight'))
  )
  adapted = learner.settings.adapters is not None
  each = 4 if adapted else 6
  each += 2 * (learner.settings.remat == 'full')
  each += 2 * (shape[0] > 1 or learner.microbatches > 1)
  own = 6 * sum(math.prod(x.shape) for x in learner.shapes.values())
  return float(math.prod(shape) * (each * products + (own if adapted else 0)))


def _advice(learner: update.Learner, found: Footprint) -> tuple[str, ...]:
  sizes = learner.mesh.shape
  settings = learner.settings
  state = []
  if found.devices > sizes['fsdp'] * sizes['tensor']:
    state.append(
      f'raise mesh.fsdp (now {sizes["fsdp"]}), which cuts parameters and '
      'optimizer state'
    )
  else:
    state.append(
      f'more devices along mesh.fsdp (now {sizes["fsdp"]}) or mesh.tensor (now '
      f'{sizes["tensor"]})'
    )
  if settings.adapters is None:
    state.append('lora.rank=16, which trains adapters alone')
  working = []
  rows = found.shape[1]
  if learner.microbatches * learner.row_parts < rows:
    working.append(f'raise learner.microbatches (now {learner.microbatches})')
  if settings.remat != 'full':
    working.append('learner.remat=full')
  if settings.compute_dtype != 'bfloat16':
    working.append('learner.compute_dtype=bfloat16')
  working.append(f'lower learner.chunk_tokens (now {settings.chunk_tokens})')
  if found.held_bytes > found.working_bytes:
    return (*state, *working)
  return (*working, *state)


def _gib(size_bytes: int) -> str:
  return f'{size_bytes / _GIB:.3g} GiB'
