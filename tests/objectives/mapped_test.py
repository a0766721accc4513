"""jit on global arrays, shard_map and pmap give the update of one device."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from spopp_jax import objectives

_SCRIPT = pathlib.Path(__file__).with_name('mapped_devices.py')
_GROUPED = [
  name
  for name in objectives.objective_names()
  if objectives.make_objective(name, {}).group_size > 1
]
_PUBLISHED = [
  (name, {'group_size': 3} if name in _GROUPED else {})
  for name in objectives.objective_names()
]
_TEMPERED = {'correction': 'tempered', 'tempering_scope': 'batch'}
_COMPOSED = [
  ('spopp', {**_TEMPERED, 'aggregation': 'token_sum'}),
  ('spopp', {'correction': 'sequence', 'token_mask': 'geometric_mean'}),
  (
    'tetpo',
    {'group_size': 3, 'token_mask': 'second_moment', 'denominator': 'kept'},
  ),
  (
    'tetpo',
    {'group_size': 3, 'surrogate': 'clip_weight', 'clip_region': 'ratio'},
  ),
  ('m2po', {'group_size': 3, 'second_moment_variant': 'official_cap'}),
]


def _check(name, overrides, devices):
  flags = '--xla_force_host_platform_device_count=8'
  fields = [f'{key}={json.dumps(value)}' for key, value in overrides.items()]
  finished = subprocess.run(
    [sys.executable, str(_SCRIPT), devices, name, *fields],
    env={**os.environ, 'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
    cwd=_SCRIPT.parents[2],
    capture_output=True,
    text=True,
    timeout=110,
    check=False,
  )
  assert finished.returncode == 0, finished.stderr
  differences = json.loads(finished.stdout)
  assert set(differences) == {
    f'{way} on {number}'
    for way in ('shard_map', 'pmap', 'sharded_jit')
    for number in devices.split(',')
  }
  assert all(worst < 1e-5 for worst in differences.values()), differences


@pytest.mark.parametrize('name, overrides', _PUBLISHED)
def test_eight_devices_agree(name, overrides):
  _check(name, overrides, '8')


@pytest.mark.slow
@pytest.mark.parametrize('name, overrides', _PUBLISHED)
def test_fewer_devices_agree(name, overrides):
  _check(name, overrides, '1,2,4')


@pytest.mark.slow
@pytest.mark.parametrize('name, overrides', _COMPOSED)
def test_compositions_agree(name, overrides):
  _check(name, overrides, '2,8')
