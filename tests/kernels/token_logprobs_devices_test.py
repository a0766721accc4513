"""The head gives one answer under every way of spreading its rows."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

_DEVICES = pathlib.Path(__file__).with_name('token_logprobs_devices.py')


@pytest.mark.slow
def test_four_devices_agree_with_one():
  finished = subprocess.run(
    [sys.executable, str(_DEVICES)],
    env={
      **os.environ,
      'XLA_FLAGS': '--xla_force_host_platform_device_count=4',
      'JAX_PLATFORMS': 'cpu',
      'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    },
    cwd=_DEVICES.parents[2],
    capture_output=True,
    text=True,
    timeout=110,
    check=False,
  )
  assert finished.returncode == 0, finished.stderr
  differences = json.loads(finished.stdout)
  assert set(differences) == {
    *('shard_map', 'untyped_shard_map', 'around_shard_map'),
    *('pmap', 'sharded_jit'),
  }
  assert all(worst < 1e-5 for worst in differences.values()), differences
