"""Killed anywhere, saving included, a run ends as one that was left alone."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import tiny_world

from spopp_jax.models import policy_files
from spopp_jax.runner import metrics

SCRIPT = pathlib.Path(__file__).with_name('killed_run.py')
TIMEOUT_S = 120
# Calls noted in killed_run.py from one checkpoint to the next, about.
EVENTS = 90
TIMES = ('_s', 'tokens_per_s')
SETTINGS = {
  'drain': ('dispatch.max_lag=1',),
  'synchronous': ('dispatch.max_lag=0', 'objective.name=spo'),
  'bounded': (
    'dispatch.staleness=bounded',
    'dispatch.max_lag=2',
    'dispatch.in_flight=10',
    'dispatch.in_order=True',
    'dispatch.evidence_from=consumed',
  ),
  'scheduled': (
    'dispatch.staleness=scheduled',
    'dispatch.max_lag=3',
    'objective.name=tetpo',
    'objective.group_size=2',
  ),
}


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
  path = tmp_path_factory.mktemp('policy') / 'random'
  config = tiny_world.load(path)
  policy_files.save(path, tiny_world.random_policy(config))
  return path


def play(folder, policy, events, settings):
  """Runs the script; returns its exit code."""
  with (folder / 'stderr').open('w') as log:
    return subprocess.run(
      [sys.executable, SCRIPT, folder, policy, str(events), *settings],
      check=False,
      env={
        **os.environ,
        'PYTHONPATH': f'{tiny_world.ROOT}{os.pathsep}{tiny_world.HERE}',
        'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
      },
      stdout=subprocess.DEVNULL,
      stderr=log,
      timeout=TIMEOUT_S,
    ).returncode


def trained(folder):
  """Returns the request ids of each step; a later attempt wins."""
  lines = (folder / 'trained.jsonl').read_text().splitlines()
  return dict(json.loads(line) for line in lines)


def records(folder):
  """Returns the metrics of every step but times and attempts."""
  return [
    {
      name: value
      for name, value in record.items()
      if not name.endswith(TIMES) and name != 'attempt'
    }
    for record in metrics.read_metrics(folder / 'runs' / 'unnamed')
  ]


def final(folder, policy, settings):
  config = tiny_world.load(folder, f'cold_start.policy={policy}', *settings)
  return tiny_world.checkpoint(config)


def check_equal(folders, policy, settings):
  one, other = (final(folder, policy, settings) for folder in folders)
  leaves = [dict(tiny_world.leaves(saved.arrays)) for saved in (one, other)]
  assert leaves[0].keys() == leaves[1].keys()
  for name, array in leaves[0].items():
    np.testing.assert_array_equal(array, leaves[1][name], err_msg=name)
  for saved in (one, other):
    for record in saved.extra['flow']['held']:
      del record['trajectory']['seconds']
  assert one.extra == other.extra
  assert trained(folders[0]) == trained(folders[1])
  assert records(folders[0]) == records(folders[1])


def killed_and_left_alone(tmp_path, policy, settings, kills, seed):
  alone, killed = tmp_path / 'alone', tmp_path / 'killed'
  alone.mkdir()
  killed.mkdir()
  assert play(alone, policy, 0, settings) == 0, (alone / 'stderr').read_text()
  rng = random.Random(seed)
  survived = 0
  for _ in range(kills):
    code = play(killed, policy, rng.randint(1, EVENTS), settings)
    survived += code != -signal.SIGKILL
    assert code in (0, -signal.SIGKILL), (killed / 'stderr').read_text()
  assert survived < kills / 2
  assert play(killed, policy, 0, settings) == 0
  check_equal((alone, killed), policy, settings)


def test_killed_twice_a_run_ends_as_one_that_was_left_alone(tmp_path, policy):
  killed_and_left_alone(tmp_path, policy, SETTINGS['drain'], kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize('name', SETTINGS)
def test_killed_twenty_times_a_run_ends_as_one_that_was_left_alone(
  tmp_path, policy, name
):
  settings = (*SETTINGS[name], 'run.steps=14', 'run.checkpoint_every_steps=1')
  killed_and_left_alone(tmp_path, policy, settings, kills=20, seed=2)
