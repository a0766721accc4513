"""jit on global arrays, shard_map and pmap give one update on 8 devices."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from spopp_jax import objectives

_SCRIPT = pathlib.Path(__file__).with_name('mapped_devices.py')


@pytest.mark.slow
@pytest.mark.parametrize('name', objectives.objective_names())
def test_eight_devices_agree(name):
  flags = '--xla_force_host_platform_device_count=8'
  finished = subprocess.run(
    [sys.executable, str(_SCRIPT), name],
    env={**os.environ, 'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
    cwd=_SCRIPT.parents[2],
    capture_output=True,
    text=True,
    timeout=110,
    check=False,
  )
  assert finished.returncode == 0, finished.stderr
  differences = json.loads(finished.stdout)
  assert set(differences) == {'shard_map', 'pmap', 'sharded_jit'}
  assert all(worst < 2e-5 for worst in differences.values()), differences
