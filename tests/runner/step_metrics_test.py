import types as python_types

import numpy as np
import pytest
import scripted_sampler
import tiny_world

from spopp_jax import types
from spopp_jax.runner import batcher as batcher_lib
from spopp_jax.runner import (
  flow,
  metrics,
  metrics_table,
  staleness,
  step_metrics,
)


def finished(number, *, reward, value, version, actions, num_turns):
  mask = [False, *[True] * actions]
  return batcher_lib.Finished(
    scripted_sampler.ticket(number, value=value, version=version),
    scripted_sampler.trajectory(
      f'r{number}',
      reward=reward,
      version=version,
      tokens=range(len(mask)),
      actions=mask,
      num_turns=num_turns,
    ),
  )


BATCH = [
  finished(0, reward=1.0, value=0.25, version=3, actions=4, num_turns=1),
  finished(1, reward=0.0, value=0.75, version=4, actions=8, num_turns=4),
]
LATE = [finished(2, reward=0.0, value=0.1, version=4, actions=2, num_turns=3)]


def make_run(updates_done, statuses):
  return python_types.SimpleNamespace(
    updates_done=updates_done,
    flow=python_types.SimpleNamespace(
      staleness=staleness.Drain(None, max_lag=1),
      tally=flow.Tally(
        received=4, received_tokens=60, trained=2, trained_tokens=24
      ),
      batcher=python_types.SimpleNamespace(
        statuses=statuses, num_in_flight=1, held=[1, 2, 3]
      ),
    ),
  )


def of(batch=BATCH, late=LATE, scalars=None):
  # updates_done counts the update of this batch.
  run = make_run(6, {status: 10 * status for status in types.Status})
  seconds = {'collect_s': 1.0, 'step_s': 4.0}
  return step_metrics.of(run, batch, late, scalars or {}, seconds)


def test_record_by_hand():
  record = of(scalars={'loss': np.float32(0.5)})
  assert record['reward_collected'] == 0.5
  assert record['reward_dispatched'] == 1 / 3
  assert record['value_mean'] == 0.5
  assert record['action_tokens_mean'] == 6
  assert record['action_tokens'] == 12
  assert record['turns_mean'] == 2.5
  assert (record['trajectories'], record['late_trajectories']) == (2, 1)
  # The learner had taken 5 updates; the snapshots were versions 3 and 4.
  assert record['lag_events'] == 1.5
  # 5, 9 and 3 tokens, prompts included, in 4 s.
  assert record['tokens_per_s'] == 17 / 4
  assert record['loss'] == 0.5
  assert record['collect_s'] == 1.0
  assert record['lag_events_max'] == 2
  assert (record['in_flight'], record['held']) == (1, 3)
  assert record['length_bias'] == pytest.approx(12 / 15 - 1)
  assert record['status/ok'] == 10
  assert record['status/cancelled'] == 120


def test_every_name_is_described_and_every_value_a_float():
  record = of(scalars={'loss': np.float32(0.5)})
  assert set(record) <= set(metrics_table.METRICS)
  assert {type(value) for value in record.values()} == {float}


def test_whole_runs_write_only_described_metrics(finished):
  records = metrics.read_metrics(finished.result.directory)
  written = set().union(*records) - {'step', 'attempt'}
  assert written <= set(metrics_table.METRICS)
  for name in ('loss', 'grad_norm', 'publish_s', 'update_s', 'drain_s'):
    assert name in written


@pytest.mark.parametrize(
  'settings, own',
  [
    (('name=tetpo',), 'tempered_ess_fraction'),
    (('name=m2po',), 'second_moment_kept'),
    (
      (
        'name=spopp',
        'correction=tempered',
        'tempering_scope=batch',
        'token_mask=geometric_mean',
      ),
      'rejected_fraction',
    ),
  ],
)
def test_methods_write_described_metrics_of_their_own(load, settings, own):
  groups = () if 'name=spopp' in settings else ('objective.group_size=2',)
  result, _ = tiny_world.watched(
    load('run.steps=1', *groups, *(f'objective.{text}' for text in settings))
  )
  (record,) = metrics.read_metrics(result.directory)
  assert record.keys() - {'step', 'attempt'} <= metrics_table.METRICS.keys()
  assert own in record
  assert ('groups_equal_fraction' in record) == bool(groups)
  assert all(np.isfinite(value) for value in record.values())


def test_means_of_nothing_are_not_zero():
  record = of(batch=[], late=[])
  for name in ('reward_collected', 'reward_dispatched', 'lag_events'):
    assert np.isnan(record[name])
  assert record['trajectories'] == 0


def test_clock_splits_the_time(monkeypatch):
  now = iter([10.0, 11.0, 13.0, 20.0])
  monkeypatch.setattr(step_metrics.time, 'perf_counter', lambda: next(now))
  clock = step_metrics.Clock()
  clock.mark('collect_s')
  clock.mark('update_s')
  seconds = clock.seconds()
  assert seconds == {'collect_s': 1.0, 'update_s': 2.0, 'step_s': 10.0}


@pytest.mark.parametrize('updates, version, lag', [(1, 0, 0), (3, 1, 1)])
def test_lag_counts_updates_before_this_one(updates, version, lag):
  run = make_run(updates, dict.fromkeys(types.Status, 0))
  item = finished(
    0, reward=1.0, value=0.5, version=version, actions=1, num_turns=1
  )
  assert step_metrics.of(run, [item], [], {}, {'step_s': 1.0})[
    'lag_events'
  ] == pytest.approx(lag)
