import json

import numpy as np
import pytest
import scripted_sampler

from spopp_jax import types
from spopp_jax.learner import checkpoint
from spopp_jax.runner import batcher as batcher_lib
from spopp_jax.runner import estimate
from spopp_jax.sampler import retries

TASKS = ['a', 'b', 'c']


class Rewards(scripted_sampler.Sampler):
  """Rewards task a always, task b at every other rollout, task c never."""

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self._rollouts = dict.fromkeys(TASKS, 0)

  def next(self, timeout_s):
    trajectory = super().next(timeout_s)
    task = trajectory.task_id
    self._rollouts[task] += 1
    if trajectory.status == types.Status.OK:
      won = {'a': 1.0, 'b': float(self._rollouts[task] % 2), 'c': 0.0}
      object.__setattr__(trajectory, 'reward', won[task])
    return trajectory


def measure(sampler=None, rollouts=4, attempts=1, **changes):
  batcher = batcher_lib.Batcher(
    sampler or Rewards(pick=lambda held: -1),
    scripted_sampler.SAMPLING,
    budget=retries.RetryBudget(attempts),
    keep_truncated=True,
    rollout_timeout_s=1.0,
  )
  batcher.publish({}, 0)
  settings = {
    'policy_version': 0,
    'seed': 0,
    'purpose': 'evaluation',
    'progress': False,
    **changes,
  }
  return estimate.measure(batcher, TASKS, rollouts=rollouts, **settings)


def test_outcomes_are_counted_by_task():
  found = measure()
  np.testing.assert_array_equal(found.successes, [4, 2, 0])
  np.testing.assert_array_equal(found.rollouts, [4, 4, 4])
  assert found.success == 0.5
  assert len(found.trajectories) == 12


def test_success_is_a_mean_over_tasks_not_over_rollouts():
  uneven = estimate.Estimate(TASKS, np.array([8, 1, 0]), np.array([8, 1, 2]))
  np.testing.assert_allclose(uneven.success, 2 / 3, rtol=1e-15)


def test_failed_rollouts_leave_the_divisor():
  failures = iter([types.Status.ENV_ERROR])  # the first rollout, of task a
  sampler = Rewards(outcome=lambda _: next(failures, types.Status.OK))
  found = measure(sampler)
  np.testing.assert_array_equal(found.rollouts, [3, 4, 4])
  assert found.successes[0] == 3


def test_a_task_without_a_usable_rollout_is_named():
  sampler = Rewards(
    outcome=lambda request: (
      types.Status.INVALID if request.task_id == 'b' else types.Status.OK
    )
  )
  with pytest.raises(batcher_lib.RolloutsFailed, match='task b failed'):
    measure(sampler, attempts=2)


def test_progress_is_shown_and_then_left_alone(capsys):
  measure(progress=True, purpose='offline values')
  assert 'offline values: 100%' in capsys.readouterr().err
  measure(progress=False)
  assert capsys.readouterr().err == ''


def test_counts_survive_the_file(tmp_path):
  path = tmp_path / 'offline.json'
  measure().write(path)
  assert json.loads(path.read_text()) == {'a': [4, 4], 'b': [2, 4], 'c': [0, 4]}
  found = estimate.read(path, TASKS)
  np.testing.assert_array_equal(found.successes, [4, 2, 0])
  np.testing.assert_array_equal(found.rollouts, [4, 4, 4])
  assert found.rollouts.dtype == np.int64


@pytest.mark.parametrize(
  'tasks', [['a', 'b'], ['a', 'c', 'b'], ['a', 'b', 'd']]
)
def test_counts_of_other_tasks_are_refused(tmp_path, tasks):
  path = tmp_path / 'offline.json'
  measure().write(path)
  with pytest.raises(checkpoint.CheckpointError, match=r'offline\.json speaks'):
    estimate.read(path, tasks)


@pytest.mark.parametrize('text', [None, '', '{"a": [1'])
def test_missing_or_cut_counts_are_named(tmp_path, text):
  path = tmp_path / 'offline.json'
  if text is not None:
    path.write_text(text)
  with pytest.raises(checkpoint.CheckpointError) as caught:
    estimate.read(path, TASKS)
  assert str(path) in str(caught.value)
  assert 'without --config.run.resume=True' in str(caught.value)
