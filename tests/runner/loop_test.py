"""The order of things in a step, seen in whole runs without a network."""

import dataclasses

import numpy as np
import pytest
import tiny_world

from spopp_jax import types
from spopp_jax.learner import logprob_contract, update
from spopp_jax.runner import batcher, metrics, training
from spopp_jax.tracker import offline_evidence

RETENTION = 0.875


def trained(trajectories):
  """Returns those of training requests, in waves of 8."""
  found = [t for t in trajectories if t.request_id.startswith('train-')]
  return [found[i : i + 8] for i in range(0, len(found), 8)]


def counts(result):
  version = result.training.policy_version
  return result.training.flow.evidence.counts(result.before.task_ids, version)


def lags(result):
  records = metrics.read_metrics(result.directory)
  return [record['lag_events'] for record in records]


def versions(sampler):
  return [{t.policy_version for t in w} for w in trained(sampler.returned)]


def test_overlapping_updates_lag_by_one(finished):
  assert lags(finished.result) == [0, 1, 1, 1]
  # The last wave is dispatched before the run knows that it is the last step.
  assert versions(finished.sampler) == [{0}, {0}, {1}, {2}, {3}]
  # The last parameters are published for the evaluation.
  assert finished.sampler.versions == [0, 1, 2, 3, 4]
  after = finished.result.after.trajectories
  assert {t.policy_version for t in after} == {4}


def test_synchronous_updates_do_not_lag(load):
  result, sampler = tiny_world.watched(
    load('dispatch.max_lag=0', 'run.steps=2')
  )
  assert lags(result) == [0, 0]
  assert versions(sampler) == [{0}, {1}, {2}]
  assert sampler.versions == [0, 1, 2]


@pytest.mark.parametrize(
  'max_lag, expected',
  [
    (1, 'submit, submit update, publish submit update, publish submit update'),
    (0, 'submit, update publish submit, update publish submit'),
  ],
)
def test_order_of_publication_dispatch_and_update(
  load, monkeypatch, max_lag, expected
):
  events = []

  class Noted(tiny_world.Watched):
    def submit(self, requests):
      if requests[0].request_id.startswith('train-'):
        events.append('submit')
      super().submit(requests)

    def publish(self, params, version, **how):
      if version:
        events.append('publish')
      return super().publish(params, version, **how)

  original = update.Learner.update
  monkeypatch.setattr(
    update.Learner,
    'update',
    lambda *args: events.append('update') or original(*args),
  )
  steps = expected.count('update')
  tiny_world.run(
    load(f'run.steps={steps}', f'dispatch.max_lag={max_lag}'), Noted
  )
  # With overlap the evaluation needs one more publication.
  expected = expected.replace(',', '').split() + ['publish'] * max_lag
  assert events == expected


def test_late_trajectories_are_not_trained_on_but_are_evidence(finished):
  for record in metrics.read_metrics(finished.result.directory):
    assert (record['trajectories'], record['late_trajectories']) == (6, 2)
  success, failure = counts(finished.result)
  # Offline mass 8 a task; four waves, read at version 4.
  mass = RETENTION**4 * (8 * 10 + 2 * 8) + (RETENTION**3 + RETENTION**2) * 8
  np.testing.assert_allclose((success + failure).sum(), mass, rtol=1e-12)


def test_evidence_of_consumed_outcomes_leaves_the_late_ones_out(load):
  result, _ = tiny_world.watched(
    load('run.steps=1', 'dispatch.evidence_from=consumed')
  )
  success, failure = counts(result)
  mass = RETENTION * (8 * 10 + 6)
  np.testing.assert_allclose((success + failure).sum(), mass, rtol=1e-12)


def offline(result):
  before = result.before
  return offline_evidence.jeffreys(before.successes, before.rollouts)


def test_outcomes_are_filed_under_the_version_that_generated_them(finished):
  result = finished.result
  success, failure = (RETENTION**4 * evidence for evidence in offline(result))
  row = {task: i for i, task in enumerate(result.before.task_ids)}
  rewards = set()
  for wave in trained(finished.sampler.returned)[:4]:
    for t in wave:
      weight = RETENTION ** (4 - t.policy_version)
      success[row[t.task_id]] += weight * t.reward
      failure[row[t.task_id]] += weight * (1 - t.reward)
      rewards.add(t.reward)
  assert rewards == {0.0, 1.0}
  np.testing.assert_allclose(
    counts(result), (success, failure), rtol=1e-12, atol=1e-12
  )


def test_values_frozen_at_dispatch_are_trained_on(finished):
  result = finished.result
  record = metrics.read_metrics(result.directory)[0]
  success, failure = offline(result)
  row = {task: i for i, task in enumerate(result.before.task_ids)}
  batch = [row[t.task_id] for t in trained(finished.sampler.returned)[0][:6]]
  values = (success / (success + failure))[batch]
  np.testing.assert_allclose(record['value_mean'], values.mean(), rtol=1e-12)


def test_completion_order_does_not_change_event_time_evidence(load):
  found, orders = [], []
  for seed in range(2):
    sampler = None

    def wrap(inner, seed=seed):
      nonlocal sampler
      sampler = tiny_world.Shuffled(inner, seed)
      return sampler

    result = tiny_world.run(load('run.steps=1', f'run.name=seed-{seed}'), wrap)
    found.append(counts(result))
    orders.append([t.request_id for t in trained(sampler.returned)[0]])
  assert sorted(orders[0]) == sorted(orders[1])
  assert orders[0] != orders[1]
  np.testing.assert_allclose(found[0], found[1], rtol=1e-12)


def test_an_episode_cut_by_the_context_is_trained_on_as_a_failure(load):
  def cut(t):
    if t.request_id.startswith('train-') and t.request_id.endswith('0'):
      return dataclasses.replace(
        t, status=types.Status.CONTEXT_LIMIT, reward=float('nan')
      )
    return t

  result = tiny_world.run(
    load('run.steps=1'), lambda inner: tiny_world.Watched(inner, cut)
  )
  (record,) = metrics.read_metrics(result.directory)
  assert record['status/context_limit'] == 1
  assert np.isfinite(record['loss'])


def test_gradients_that_are_not_finite_stop_the_run_after_saving(load):
  def poison(t):
    number = t.request_id.removeprefix('train-')
    if number.isdigit() and int(number) >= 8:
      logprobs = np.where(t.action_mask, np.nan, 0).astype(np.float32)
      return dataclasses.replace(t, behaviour_logprobs=logprobs)
    return t

  config = load('run.steps=9')
  with pytest.raises(training.TrainingStopped) as caught:
    tiny_world.run(config, lambda inner: tiny_world.Watched(inner, poison))
  directory = tiny_world.directory(config)
  records = metrics.read_metrics(directory)
  # Two minibatches a step: two in a row at step 1, four at step 2.
  assert [record['skipped_in_a_row'] for record in records] == [0, 2, 4]
  for words in ('at step 2', 'metrics.jsonl', 'learning_rate'):
    assert words in str(caught.value)
  saved = tiny_world.checkpoint(config)
  assert saved.step == 3
  assert records[0]['skipped_update'] == 0
  assert all(np.isfinite(v).all() for v in saved.arrays['published'].values())
  assert int(saved.arrays['state'].updates) == 2


def test_a_sampler_that_suddenly_differs_is_noticed(load, caplog):
  def shift(t):
    wrong = t.behaviour_logprobs - np.float32(2) * t.action_mask
    late = t.request_id.startswith('train-') and t.policy_version >= 2
    return dataclasses.replace(t, behaviour_logprobs=wrong) if late else t

  config = load('run.steps=6', 'learner.stop_on_gap=True')
  with pytest.raises(training.TrainingStopped) as caught:
    tiny_world.run(config, lambda inner: tiny_world.Watched(inner, shift))
  # Version 2 is first learned from in step 3.
  assert 'step 3: sampler and learner differ by' in str(caught.value)
  assert str(caught.value) in caplog.text
  records = metrics.read_metrics(tiny_world.directory(config))
  gaps = [record['log_ratio_abs_mean'] for record in records]
  assert len(gaps) == 4
  assert max(gaps[:3]) < 0.3 < 1.5 < gaps[3]
  saved = tiny_world.checkpoint(config)
  assert saved.step == 4
  # The first step has no lag, the others one of 1.
  assert saved.extra['gaps'] == pytest.approx(gaps[1:])


def test_a_step_without_a_usable_rollout_stops_the_run(load):
  def fail(t):
    if t.request_id.startswith('train-'):
      return dataclasses.replace(t, status=types.Status.ENV_ERROR, reward=0.0)
    return t

  with pytest.raises(batcher.RolloutsFailed, match='in a row failed in each'):
    tiny_world.run(load(), lambda inner: tiny_world.Watched(inner, fail))


def test_truncated_decoding_is_trained_on_exactly(load):
  config = load(
    'run.steps=1',
    'sampler.top_p=0.8',
    'sampler.top_k=9',
    'sampler.temperature=0.7',
    'learner.minibatches=1',
  )
  result, sampler = tiny_world.watched(config)
  kept = [t.kept for t in sampler.returned]
  assert min(np.diff(k.offsets).max() for k in kept) > 1  # not greedy
  (record,) = metrics.read_metrics(result.directory)
  assert record['proxy_ratio_fraction'] == 0
  for name in ('weight_token_mean', 'weight_token_max'):
    np.testing.assert_allclose(record[name], 1, atol=1e-4, err_msg=name)


def _without_kept_ids(trajectory):
  """As a sampler that knows the log-probs before truncation alone says it."""
  return dataclasses.replace(
    trajectory, kept=None, logprob_kind=types.LogprobKind.RAW
  )


def test_a_proxy_ratio_is_refused_or_told(load):
  # A top_k above the vocabulary counts as truncation, but changes no value.
  settings = ('run.steps=1', 'sampler.top_k=999', 'learner.minibatches=1')
  with pytest.raises(
    logprob_contract.LogprobContractError, match='allow_proxy_ratio'
  ):
    tiny_world.watched(load(*settings), change=_without_kept_ids)
  result, _ = tiny_world.watched(
    load(*settings, 'learner.allow_proxy_ratio=True', 'run.name=proxy'),
    change=_without_kept_ids,
  )
  (record,) = metrics.read_metrics(result.directory)
  assert record['proxy_ratio_fraction'] == 1


@pytest.mark.parametrize('max_lag', [0, 2])
@pytest.mark.parametrize('policy', ['bounded', 'interruptible'])
def test_work_that_crosses_publications_keeps_the_bound(load, policy, max_lag):
  config = load(
    f'dispatch.staleness={policy}',
    f'dispatch.max_lag={max_lag}',
    'dispatch.in_flight=10',
  )
  result, sampler = tiny_world.watched(config)
  records = metrics.read_metrics(result.directory)
  assert {record['trajectories'] for record in records} == {6}
  assert max(record['lag_events_max'] for record in records) <= max_lag
  crossed = [t for t in sampler.returned if t.spans]
  assert bool(crossed) == (policy == 'interruptible' and max_lag > 0)
  for t in crossed:
    assert t.token_versions.max() <= t.policy_version + max_lag


def test_no_lag_is_the_synchronous_run_bit_for_bit(load):
  plain = ('run.steps=3', 'dispatch.max_lag=0', 'dispatch.in_flight=6')
  runs = []
  for number, policy in enumerate(('drain', 'bounded', 'interruptible')):
    config = load(
      *plain, f'dispatch.staleness={policy}', f'run.name=run-{number}'
    )
    tiny_world.run(config)
    runs.append(dict(tiny_world.leaves(tiny_world.checkpoint(config).arrays)))
  for other in runs[1:]:
    assert other.keys() == runs[0].keys()
    for name, array in other.items():
      np.testing.assert_array_equal(array, runs[0][name], err_msg=name)


def test_every_lag_of_a_scheduled_run_is_as_drawn(load):
  config = load(
    'run.steps=6',
    'dispatch.staleness=scheduled',
    'dispatch.max_lag=3',
    'objective.name=tetpo',
    'objective.group_size=2',
  )
  result, sampler = tiny_world.watched(config)
  records = metrics.read_metrics(result.directory)
  assert {record['trajectories'] for record in records} == {6}
  by_step = {}
  for request in sampler.requests:
    if request.request_id.startswith('train-'):
      step = int(request.request_id.removeprefix('train-')) // 6
      by_step.setdefault(step, []).append(request.policy_version)
  for step, versions in sorted(by_step.items())[:6]:
    lags = np.random.default_rng((config.seed, step)).integers(
      1, 3, 6, endpoint=True
    )
    assert sorted(versions) == sorted(max(0, step - lag) for lag in lags)
    record = records[step]
    assert record['lag_events'] == np.mean([step - v for v in versions])
  # Nothing is asked of a version that was replaced.
  published = sampler.versions
  assert published == sorted(published)
  assert all(t.status == types.Status.OK for t in sampler.returned)
