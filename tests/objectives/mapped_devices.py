"""Prints how far ways of spreading an update are from one device.

Usage: XLA_FLAGS=--xla_force_host_platform_device_count=8 python
mapped_devices.py DEVICES OBJECTIVE [FIELD=JSON_VALUE ...]

The ways are jit on global arrays over a mesh, shard_map and pmap, each on as
many devices as DEVICES says, as in 1,2,4,8.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spopp_jax import objectives, types

ROWS, WIDTH, GROUP_SIZE = 8, 19, 3
SIZE = ROWS * GROUP_SIZE


def make_batch(rng):
  """A row holds one prompt group, its members in any order."""
  shape = (ROWS, WIDTH)
  ids = np.full(shape, SIZE, np.int32)
  mask = rng.random(shape) < 0.6
  for row in range(ROWS):
    start = 0
    for member in rng.permutation(GROUP_SIZE):
      length = rng.integers(3, 7)
      ids[row, start : start + length] = GROUP_SIZE * row + member
      mask[row, start] = False
      mask[row, start + 1] = True
      start += length
  zeros = np.zeros(shape, np.int32)
  return types.PackedBatch(
    tokens=zeros,
    positions=zeros,
    segment_ids=zeros,
    trajectory_ids=ids,
    action_mask=mask & (ids < SIZE),
    behaviour_logprobs=rng.normal(-2, 1, shape).astype(np.float32),
    kept_ids=np.zeros((*shape, 0), np.int32),
    rewards=rng.integers(0, 2, SIZE).astype(np.float32),
    values=rng.random(SIZE).astype(np.float32),
    usable=np.arange(SIZE) != 4,
    group_ids=np.arange(SIZE, dtype=np.int32) // GROUP_SIZE,
  )


def local_ids(batch, devices):
  """The same batch with ids of their own on every device."""
  size = SIZE // devices
  starts = np.repeat(np.arange(devices) * size, ROWS // devices)[:, None]
  local = batch.trajectory_ids - starts
  groups = np.arange(SIZE) % size // GROUP_SIZE
  return batch._replace(
    trajectory_ids=np.where(batch.trajectory_ids < SIZE, local, size).astype(
      np.int32
    ),
    group_ids=groups.astype(np.int32),
  )


def update(objective, batch, proximal, current, axis_name=None):
  """Advantages, gradient of the mean loss, and all global scalars."""
  advantages = objective.advantages(batch)
  weights, scalars = objective.weights(batch, proximal, advantages)

  def numerator(current):
    numerator, count, sums = objective.loss(current, batch, advantages, weights)
    return numerator, (count, sums)

  (total, (count, sums)), gradient = jax.value_and_grad(
    numerator, has_aux=True
  )(current)
  if axis_name is not None:
    total, count, sums = jax.lax.psum((total, count, sums), axis_name)
  diagnostics = objective.diagnostics(batch, advantages, proximal, weights)
  means = {name: value / weights.tokens for name, value in sums.items()}
  loss = {'loss': total / count}
  return advantages, gradient / count, loss | means | scalars | diagnostics


def worst(got, want):
  """The largest difference of an entry, relative to its array's largest."""

  def relative(got, want):
    scale = np.abs(want).max() if want.ndim else max(np.abs(want), 1)
    return float(np.abs(np.asarray(got) - want).max() / scale)

  return max(jax.tree.leaves(jax.tree.map(relative, got, jax.device_get(want))))


def spread(name, overrides, batch, *logprobs, devices):
  """The update by each way on so many devices."""
  alone = objectives.make_objective(name, overrides)
  mapped = objectives.make_objective(name, overrides, axis_name='data')
  run = functools.partial(update, mapped, axis_name='data')
  mesh = jax.make_mesh(
    (devices,), ('data',), (AxisType.Auto,), devices=jax.devices()[:devices]
  )
  spec = PartitionSpec('data')
  whole = jax.device_put((batch, *logprobs), NamedSharding(mesh, spec))
  local = (local_ids(batch, devices), *logprobs)
  by_map = jax.shard_map(
    run, mesh=mesh, in_specs=spec, out_specs=(spec, spec, PartitionSpec())
  )
  shards = jax.tree.map(
    lambda x: x.reshape(devices, x.shape[0] // devices, *x.shape[1:]), local
  )
  advantages, gradient, scalars = jax.pmap(
    run, axis_name='data', devices=jax.devices()[:devices]
  )(*shards)
  return {
    'sharded_jit': jax.jit(functools.partial(update, alone))(*whole),
    'shard_map': jax.jit(by_map)(*local),
    'pmap': (
      advantages.reshape(-1),
      gradient.reshape(ROWS, WIDTH),
      jax.tree.map(lambda x: x[0], scalars),
    ),
  }


def main(numbers, name, *texts):
  """Compares every way with one jitted program on one device."""
  jax.config.update('jax_disable_most_optimizations', True)
  overrides = {
    field: json.loads(value)
    for field, _, value in (text.partition('=') for text in texts)
  }
  rng = np.random.default_rng(0)
  batch = make_batch(rng)
  proximal, current = (
    (batch.behaviour_logprobs + rng.normal(0, 0.4, (ROWS, WIDTH))).astype(
      np.float32
    )
    for _ in range(2)
  )
  alone = objectives.make_objective(name, overrides)
  want = jax.jit(functools.partial(update, alone))(batch, proximal, current)
  if not jnp.abs(want[1]).sum() > 0:
    raise SystemExit('the update is empty')
  differences = {}
  for devices in map(int, numbers.split(',')):
    ways = spread(name, overrides, batch, proximal, current, devices=devices)
    for way, got in ways.items():
      differences[f'{way} on {devices}'] = worst(got, want)
  print(json.dumps(differences))


if __name__ == '__main__':
  main(*sys.argv[1:])
