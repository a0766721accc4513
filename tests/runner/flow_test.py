"""One flow: what is filed when, what a state holds, what a stop forgets not."""

import copy
import json

import ml_collections
import numpy as np
import pytest
import scripted_sampler

from spopp_jax.runner import batcher as batcher_lib
from spopp_jax.runner import dispatch, flow, preemption, staleness
from spopp_jax.sampler import retries
from spopp_jax.tracker import event_time

PARAMS = {'w': np.zeros(2, np.float32)}
TASKS = [f'task-{i}' for i in range(12)]


class Stop:
  """Stops the run at a look at the clock, counted from 0."""

  def __init__(self):
    self.left = -1

  def check(self):
    self.left -= 1
    if self.left == -1:
      raise preemption.Stopped('stop')


def make(
  sampler=None,
  *,
  policy='drain',
  max_lag=1,
  evidence_from='received',
  stop=None,
):
  sampler = sampler or scripted_sampler.Sampler()
  ones = np.ones(len(TASKS))
  evidence = event_time.EventTimeEvidence(TASKS, ones, ones)
  settings = {
    'staleness': policy,
    'max_lag': max_lag,
    'batch_size': 3,
    'in_flight': 5,
    'per_prompt': 1,
    'in_order': False,
    'discard_overdue': False,
  }
  return flow.Flow(
    dispatch.Dispatcher(TASKS, evidence, seed=3),
    batcher_lib.Batcher(
      sampler,
      scripted_sampler.SAMPLING,
      budget=retries.RetryBudget(1),
      keep_truncated=True,
      rollout_timeout_s=1.0,
      check_stop=(stop or Stop()).check,
    ),
    staleness.make(
      ml_collections.ConfigDict(
        {
          'seed': 0,
          'environment': {'num_tasks': len(TASKS)},
          'dispatch': settings,
        }
      ),
      1,
    ),
    evidence,
    evidence_from,
  )


def begun(**changes):
  one = make(**changes)
  one.publish(PARAMS, 0)
  one.dispatch()
  return one


def saved(one):
  arrays, extra = one.state()
  return copy.deepcopy(arrays), json.loads(json.dumps(extra))


def resumed(one, **changes):
  other = make(**changes)
  other.adopt(*saved(one), PARAMS)
  return other


def ids(items):
  return [item.ticket.request_id for item in items]


def mass(one):
  """Returns the evidence of all tasks together, less the offline part."""
  success, failure = one.evidence.counts(TASKS, one.version)
  return float((success + failure).sum() - 24 * 0.875**one.version)


def test_the_first_make_the_batch_and_the_rest_comes_too_late():
  one = begun()
  assert ids(one.collect()) == [f'train-{i:08d}' for i in range(3)]
  assert one.collecting == 1
  assert ids(one.drain()) == [f'train-{i:08d}' for i in (3, 4)]
  one.file_outcomes()
  assert mass(one) == 5
  assert one.tally == flow.Tally(5, 10, 3, 6)
  assert one.batcher.dispatched == 5


def test_evidence_of_the_consumed_counts_the_batch_alone():
  one = begun(evidence_from='consumed')
  batch = one.collect()
  one.drain()
  one.file_outcomes()
  assert mass(one) == 0
  one.file_outcomes(batch)
  assert mass(one) == 3
  assert one.tally.received == 5


def test_a_policy_that_refills_keeps_the_flight_full():
  one = begun(policy='bounded')
  assert one.batcher.num_in_flight == 5
  one.collect()
  # Two steps of three groups are admitted in all under one version.
  assert one.batcher.dispatched == 6
  assert one.drain() == []
  one.publish(PARAMS, 1)
  one.dispatch()
  assert one.batcher.num_in_flight == 5
  assert one.batcher.dispatched == 8


def test_a_state_holds_what_waits_and_asks_again_for_what_flies():
  one = begun(policy='bounded')
  for _ in range(2):
    one.batcher.wait()
  one.file_outcomes()
  sampler = scripted_sampler.Sampler()
  other = resumed(one, policy='bounded', sampler=sampler)
  assert sampler.ids == [f'train-{i:08d}' for i in (2, 3, 4)]
  assert ids(other.batcher.held) == ['train-00000000', 'train-00000001']
  assert len(other.batcher.finished) == 2
  assert other.batcher.statuses == one.batcher.statuses
  assert (other.batcher.dispatched, other.collecting) == (5, 0)
  assert other.tally == one.tally
  assert mass(other) == 2
  assert ids(other.collect()) == ids(one.collect())
  other.file_outcomes()
  one.file_outcomes()
  assert mass(other) == mass(one)


@pytest.mark.parametrize('looks', range(5))
def test_a_stop_before_the_end_of_the_drain_keeps_the_batch(looks):
  stop = Stop()
  one = begun(stop=stop)
  stop.left = looks
  with pytest.raises(preemption.Stopped):
    (one.collect(), one.drain())
  one.file_outcomes()
  other = resumed(one)
  assert other.collecting == 0
  assert other.tally.trained == 0
  batch = other.collect()
  late = other.drain()
  other.file_outcomes(batch)
  assert ids(batch) == [f'train-{i:08d}' for i in range(3)]
  assert ids(late) == [f'train-{i:08d}' for i in (3, 4)]
  assert mass(other) == 5
  assert other.tally == flow.Tally(5, 10, 3, 6)


def test_a_drained_flow_saves_no_batch_again():
  one = begun()
  one.collect()
  one.drain()
  other = resumed(one)
  assert other.collecting == 1
  assert other.batcher.held == []


def test_settling_waits_for_what_an_old_snapshot_alone_can_generate():
  one = begun(policy='bounded', max_lag=3)
  one.collect()
  one.version = 1  # the scripted sampler goes on with version 0
  one.settle()
  assert one.batcher.oldest_open is None
  crossing = begun(policy='interruptible', max_lag=3)
  crossing.version = 1
  crossing.settle()
  assert crossing.batcher.num_in_flight == 5


def test_nothing_to_collect_says_what_lacks():
  one = begun(
    sampler=scripted_sampler.Sampler(
      outcome=lambda _: scripted_sampler.types.Status.ENV_ERROR
    )
  )
  one.dispatch = lambda: None
  with pytest.raises(flow.NothingToCollect, match='the batch of step 0 lacks'):
    one.collect()


def test_length_bias_compares_the_trained_with_the_received():
  assert flow.Tally().length_bias == 0
  assert flow.Tally(4, 40, 2, 15).length_bias == pytest.approx(-0.25)
