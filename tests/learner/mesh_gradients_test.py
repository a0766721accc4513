"""One step on meshes of forced CPU devices: `mesh_gradients.py`, a process."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name('mesh_gradients.py')
# Devices that the parameters are cut over.
CUTS = {'4x2': 2, '2x2x2': 4}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_meshes_give_the_gradients_of_one_device():
  finished = subprocess.run(
    [sys.executable, SCRIPT],
    env={
      **os.environ,
      'PYTHONPATH': str(SCRIPT.parents[2]),
      'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
      'JAX_PLATFORMS': 'cpu',
      'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    },
    capture_output=True,
    text=True,
    timeout=280,
    check=False,
  )
  assert finished.returncode == 0, finished.stderr
  found = json.loads(finished.stdout)
  assert {key.split()[1] for key in found} == set(CUTS)
  assert {key.split()[0] for key in found} == {'tied', 'untied'}
  for key, one in found.items():
    assert max(one['differences']) < 1e-5, key
    assert min(one['differences']) > 0, key  # sums over other parts
    assert one['restored'] == 0, key
    assert one['kernel'] < 1e-5, key
    # All but norms and a vocabulary that nothing divides.
    assert one['share'] < 1.1 / CUTS[key.split()[1]], key
