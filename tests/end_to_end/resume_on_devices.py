"""Resumes one saved run on 1, 2, 4 and 8 devices; prints how far they differ.

  python resume_on_devices.py DIRECTORY POLICY

DIRECTORY/saved holds the run, saved after 2 steps by one device.
"""

import json
import pathlib
import shutil
import sys

import jax
import numpy as np
import tiny_world

from spopp_jax.learner import checkpoint, state, update
from spopp_jax.models import policy_files
from spopp_jax.runner import compilation


def restored(folder, policy, devices):
  """Returns the saved parameters as they come back on so many devices."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ('rows',))
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  config = tiny_world.load(folder, f'cold_start.policy={policy}')
  optimizer = update.make_optimizer(**config.optimizer)
  like = jax.device_put(
    state.initial(policy_files.load(policy).params, optimizer), everywhere
  )
  store = checkpoint.CheckpointStore(folder / 'runs/unnamed/checkpoints')
  saved = store.restore({'state': like}, 2).arrays['state']
  assert {leaf.sharding for leaf in jax.tree.leaves(saved)} == {everywhere}
  return jax.tree.map(np.asarray, saved)


def main(directory, policy):
  folder = pathlib.Path(directory)
  compilation.configure(folder / 'compiled')
  results = {}
  for devices in (1, 2, 4, 8):
    copy = folder / str(devices)
    shutil.copytree(folder / 'saved', copy)
    config = tiny_world.load(
      copy,
      f'cold_start.policy={policy}',
      'run.resume=True',
      f'mesh.data={devices}',
    )
    before = restored(copy, policy, devices)
    result = tiny_world.run(config)
    used = {
      len(leaf.sharding.device_set)
      for leaf in jax.tree.leaves(result.training.state)
    }
    assert used == {devices}, used
    after = jax.tree.map(np.asarray, result.training.state)
    results[devices] = (before, after)
  differences = {
    devices: [
      max(
        float(np.max(np.abs(x.astype(float) - y), initial=0))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
      )
      for a, b in zip(results[1], pair, strict=True)
    ]
    for devices, pair in results.items()
  }
  print(json.dumps(differences))


if __name__ == '__main__':
  main(*sys.argv[1:])
