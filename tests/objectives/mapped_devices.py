"""Prints how far three ways of spreading an update are from one device.

Usage: XLA_FLAGS=--xla_force_host_platform_device_count=8 python
mapped_devices.py OBJECTIVE
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spopp_jax import objectives, types

_DEVICES, _WIDTH = 8, 12


def make_batch(rng):
  """One row and two trajectories a device, ids local to the device."""
  shape = (_DEVICES, _WIDTH)
  local = np.repeat([0, 1, 2], [5, 4, 3])
  size = 2 * _DEVICES
  zeros = np.zeros(shape, np.int32)
  return types.PackedBatch(
    tokens=zeros,
    positions=zeros,
    segment_ids=zeros,
    trajectory_ids=np.broadcast_to(local, shape).astype(np.int32),
    action_mask=(rng.random(shape) < 0.6) & (local < 2),
    behaviour_logprobs=rng.normal(-2, 1, shape).astype(np.float32),
    kept_ids=np.zeros((*shape, 0), np.int32),
    rewards=rng.integers(0, 2, size).astype(np.float32),
    values=rng.random(size).astype(np.float32),
    usable=np.arange(size) != 3,
    group_ids=np.arange(size, dtype=np.int32),
  )


def update(objective, batch, proximal, current, axis_name=None):
  """The mean loss, its gradient and the global diagnostics."""
  advantages = objective.advantages(batch)
  weights = objective.weights(batch, proximal, advantages)

  def numerator(current):
    numerator, count, _ = objective.loss(
      current, batch, proximal, advantages, weights
    )
    return numerator, count

  (total, count), gradient = jax.value_and_grad(numerator, has_aux=True)(
    current
  )
  if axis_name is not None:
    total, count = jax.lax.psum((total, count), axis_name)
  diagnostics = objective.diagnostics(batch, advantages, proximal)
  return advantages, gradient / count, (total / count, diagnostics)


def global_ids(batch):
  """The same batch with ids that are global instead of local."""
  offsets = 2 * np.arange(_DEVICES, dtype=np.int32)[:, None]
  ids = np.where(
    batch.trajectory_ids < 2, batch.trajectory_ids + offsets, 2 * _DEVICES
  )
  return batch._replace(trajectory_ids=ids)


def worst(got, want):
  """The largest difference of any entry."""
  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return max(
    float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs
  )


def main(name):
  """Compares shard_map, pmap and jit on sharded arrays with one device."""
  if jax.device_count() != _DEVICES:
    raise SystemExit(f'{jax.device_count()} devices, {_DEVICES} are needed')
  rng = np.random.default_rng(0)
  local = make_batch(rng)
  proximal, current = (
    (local.behaviour_logprobs + rng.normal(0, 0.7, local.tokens.shape)).astype(
      np.float32
    )
    for _ in range(2)
  )
  alone = objectives.make_objective(name, {})
  mapped = objectives.make_objective(name, {}, axis_name='data')
  whole = (global_ids(local), proximal, current)
  want = jax.jit(lambda *args: update(alone, *args))(*whole)

  mesh = jax.make_mesh((_DEVICES,), ('data',), (AxisType.Auto,))
  spec = PartitionSpec('data')
  run = lambda *args: update(mapped, *args, axis_name='data')
  spread = jax.jit(
    jax.shard_map(
      run, mesh=mesh, in_specs=spec, out_specs=(spec, spec, PartitionSpec())
    )
  )
  shards = jax.tree.map(
    lambda x: x.reshape(_DEVICES, x.shape[0] // _DEVICES, *x.shape[1:]),
    (local, proximal, current),
  )
  advantages, gradient, scalars = jax.pmap(run, axis_name='data')(*shards)
  by_pmap = (
    advantages.reshape(-1),
    gradient.reshape(_DEVICES, _WIDTH),
    jax.tree.map(lambda x: x[0], scalars),
  )
  sharded = jax.device_put(whole, NamedSharding(mesh, spec))
  results = {
    'shard_map': spread(local, proximal, current),
    'pmap': by_pmap,
    'sharded_jit': jax.jit(lambda *args: update(alone, *args))(*sharded),
  }
  if not jnp.abs(want[1]).sum() > 0:
    raise SystemExit('the update is empty')
  print(json.dumps({key: worst(got, want) for key, got in results.items()}))


if __name__ == '__main__':
  main(sys.argv[1])
