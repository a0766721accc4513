import json
import os
import pathlib
import subprocess
import sys

import pytest
import tiny_world

from spopp_jax.models import policy_files

SCRIPT = pathlib.Path(__file__).with_name('resume_on_devices.py')


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_saved_by_one_device_goes_on_alike_on_any_number(tmp_path):
  policy = tmp_path / 'policy'
  config = tiny_world.load(tmp_path)
  policy_files.save(policy, tiny_world.random_policy(config))
  tiny_world.run(
    tiny_world.load(
      tmp_path / 'saved', f'cold_start.policy={policy}', 'run.steps=2'
    )
  )
  finished = subprocess.run(
    [sys.executable, SCRIPT, tmp_path, policy],
    env={
      **os.environ,
      'PYTHONPATH': f'{tiny_world.ROOT}{os.pathsep}{tiny_world.HERE}',
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
  differences = json.loads(finished.stdout)
  assert set(differences) == {'1', '2', '4', '8'}
  for restored, trained in differences.values():
    assert restored == 0
    # Sums over other parts of the rows.
    assert trained < 1e-5
