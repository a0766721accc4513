"""Who is dispatched and who is trained when, by hand, for each policy."""

import collections

import ml_collections
import numpy as np
import pytest
import scripted_sampler

from spopp_jax import types
from spopp_jax.runner import batcher as batcher_lib
from spopp_jax.runner import dispatch, staleness, staleness_base
from spopp_jax.sampler import retries
from spopp_jax.tracker import event_time

Clock = staleness_base.Clock
TASKS = [f'task-{i}' for i in range(20)]


def make(
  name='bounded',
  max_lag=1,
  *,
  batch=2,
  in_flight=4,
  group_size=1,
  in_order=False,
  discards=False,
  num_tasks=20,
  per_prompt=1,
):
  return staleness.make(
    ml_collections.ConfigDict(
      {
        'seed': 7,
        'environment': {'num_tasks': num_tasks},
        'dispatch': {
          'staleness': name,
          'max_lag': max_lag,
          'batch_size': batch,
          'in_flight': in_flight,
          'per_prompt': per_prompt,
          'in_order': in_order,
          'discard_overdue': discards,
        },
      }
    ),
    group_size,
  )


class World:
  """A batcher whose requests are answered by number."""

  def __init__(self, group_size=1, per_prompt=1, tasks=TASKS):
    self.sampler = scripted_sampler.Sampler(pick=lambda _: self.next)
    self.next = 0
    self.batcher = batcher_lib.Batcher(
      self.sampler,
      scripted_sampler.SAMPLING,
      budget=retries.RetryBudget(1),
      keep_truncated=True,
      rollout_timeout_s=1.0,
    )
    ones = np.ones(len(tasks))
    self.dispatcher = dispatch.Dispatcher(
      tasks,
      event_time.EventTimeEvidence(tasks, ones, ones),
      seed=0,
      group_size=group_size,
      max_in_flight_per_prompt=per_prompt,
    )

  def dispatch(self, policy, step, version):
    tickets = policy.tickets(
      Clock(step, version), self.dispatcher, self.batcher
    )
    self.batcher.submit(tickets)
    return len(tickets)

  def send(self, *versions):
    """Sends one request a version, numbered on from 0."""
    first = self.batcher.dispatched
    self.batcher.submit(
      [
        scripted_sampler.ticket(first + n, version=version)
        for n, version in enumerate(versions)
      ]
    )

  def answer(self, *numbers):
    """Answers requests of `send` as of their own version."""
    for number in numbers:
      ids = [one.request_id for one in self.sampler.held]
      self.next = ids.index(f'r{number}')
      self.sampler._active = self.sampler.held[self.next].policy_version
      self.batcher.wait()


def choose(policy, world, step, version=None):
  return policy.choose(Clock(step, version or step), world.batcher)


def test_drain_takes_the_first_to_finish_and_fills_the_flight_once():
  world, policy = World(), make('drain')
  assert (policy.publishes_first, policy.drops_rest) == (True, True)
  assert (policy.interrupts, policy.refills) == (False, False)
  world.send(0, 0, 0, 0)
  assert world.dispatch(policy, 0, 0) == 0
  world.answer(2)
  assert choose(policy, world, 0) is None
  world.answer(0, 3)
  assert choose(policy, world, 0) == ['r2', 'r0']


def test_drain_publishes_after_the_update_without_a_lag():
  assert not make('drain', 0).publishes_first


def test_drain_replaces_what_failed_for_good_up_to_the_batch():
  world, policy = World(), make('drain', batch=3, in_flight=5)
  assert world.dispatch(policy, 0, 0) == 5
  world = World()
  world.send(0)
  world.answer(0)
  assert world.dispatch(policy, 0, 0) == 2


@pytest.mark.parametrize(
  'max_lag, step, version, held, expected',
  [
    (0, 0, 0, 0, 2),  # two of the present version, as many as a batch
    (1, 0, 0, 0, 4),
    (1, 3, 3, 3, 1),  # three wait already: 4 - 3
    (1, 3, 3, 4, 0),
    (2, 3, 3, 4, 2),  # 6 - 4
    (1, 4, 3, 0, 2),  # the learner is one step ahead of what is published
    (1, 5, 3, 0, 0),
    (9, 0, 0, 0, 6),  # in_flight is the limit
    (9, 0, 0, 4, 6),  # what has finished takes no place in the flight
  ],
)
def test_bounded_admits_what_can_be_trained_in_time(
  max_lag, step, version, held, expected
):
  world = World()
  world.send(*[0] * held)
  world.answer(*range(held))
  policy = make(max_lag=max_lag, in_flight=6)
  assert world.dispatch(policy, step, version) == expected


def test_bounded_counts_whole_groups_and_free_prompts():
  world = World(group_size=4)
  policy = make(batch=8, in_flight=14, group_size=4)
  assert world.dispatch(policy, 0, 0) == 12
  world = World(per_prompt=2, tasks=TASKS[:2])
  policy = make(max_lag=9, in_flight=12, num_tasks=2, per_prompt=2)
  assert world.dispatch(policy, 0, 0) == 4


def test_bounded_takes_the_oldest_versions_first():
  world, policy = World(), make(max_lag=3)
  world.send(2, 1, 2, 1)
  world.answer(0, 1)
  assert choose(policy, world, 2) == ['r1', 'r0']
  world.answer(2, 3)
  assert choose(policy, world, 2) == ['r1', 'r3']


def test_bounded_waits_for_what_no_later_step_may_take():
  world, policy = World(), make(max_lag=1)
  world.send(0, 1, 1, 1)
  world.answer(1, 2, 3)
  assert choose(policy, world, 0, 1) == ['r1', 'r2']
  assert choose(policy, world, 1) is None  # r0 is due
  world.answer(0)
  assert choose(policy, world, 1) == ['r0', 'r1']


def test_bounded_waits_where_overtaking_leaves_too_much_for_one_step():
  world, policy = World(), make(max_lag=2)
  # Three of version 0 at step 1: due by step 2, which takes two.
  world.send(0, 0, 0, 1, 1)
  world.answer(3, 4)
  assert choose(policy, world, 1) is None
  world.answer(1)
  # One of them goes with step 1, two are left for step 2.
  assert choose(policy, world, 1) == ['r1', 'r3']


def test_bounded_may_leave_a_full_batch_to_each_later_step():
  world, policy = World(), make(max_lag=2)
  # At step 1, version 0 is due by step 2 and version 1 by step 3.
  world.send(0, 0, 1, 1, 2, 2)
  world.answer(4, 5)
  assert choose(policy, world, 1) == ['r4', 'r5']
  world.send(1)
  assert choose(policy, world, 1) is None


def test_discarding_drops_what_is_overdue_and_never_gives_a_short_batch():
  world = World()
  policy = make(max_lag=4, batch=4, discards=True)
  # Lags of 5, 6, 7 and 9 at step 10, where 4 are allowed.
  world.send(5, 4, 3, 1)
  world.answer(0, 1, 2, 3)
  assert choose(policy, world, 10) is None
  assert world.batcher.statuses == {types.Status.OK: 0, types.Status.STALE: 4}
  assert not world.batcher.finished
  world.send(6, 7, 8, 9, 1)
  world.answer(4, 5, 6)
  assert choose(policy, world, 10) is None
  world.answer(7)
  # A lag of 4 is allowed, and nobody waits for what will be dropped.
  assert choose(policy, world, 10) == ['r4', 'r5', 'r6', 'r7']


def test_in_order_the_oldest_dispatched_are_taken():
  world, policy = World(), make(in_order=True)
  assert not policy.refills
  world.send(0, 0, 0)
  world.answer(2, 1)
  assert choose(policy, world, 0) is None
  world.answer(0)
  assert choose(policy, world, 0) == ['r0', 'r1']


def test_interruptible_files_under_the_version_at_dispatch():
  ticket = scripted_sampler.ticket(0, version=3)
  trajectory = scripted_sampler.trajectory(version=4)
  for name, event in (
    ('drain', 4),
    ('bounded', 4),
    ('scheduled', 4),
    ('interruptible', 3),
  ):
    policy = make(name)
    assert policy.event(ticket, trajectory) == event
    assert policy.interrupts == (name == 'interruptible')


def test_scheduled_asks_each_lag_of_its_own_version():
  """max_lag 2: a step's lags of 1 come from one version, of 2 from another."""
  world, policy = World(), make('scheduled', 2, batch=4)
  by_version = {}
  for version in range(6):
    tickets = policy.tickets(
      Clock(version, version), world.dispatcher, world.batcher
    )
    assert {ticket.policy_version for ticket in tickets} <= {version}
    by_version[version] = [ticket.step for ticket in tickets]
  # Steps 0 and 1 find version 0 alone.
  assert by_version[0].count(0) == 4
  assert by_version[0].count(1) == 4
  drawn = [
    np.random.default_rng((7, step)).integers(1, 2, 4, endpoint=True).tolist()
    for step in range(8)
  ]
  for step in range(2, 6):
    assert by_version[step - 1].count(step) == drawn[step].count(1)
    assert by_version[step - 2].count(step) == drawn[step].count(2)


def test_scheduled_waits_for_the_flight_and_takes_the_groups_of_the_step():
  world, policy = World(), make('scheduled', 1)
  assert world.dispatch(policy, 0, 0) == 4  # of steps 0 and 1
  ids = [ticket.group_id for ticket in world.batcher.in_flight]
  world.sampler._active = 0
  for _ in range(3):
    assert choose(policy, world, 0) is None
    world.batcher.wait()
  world.batcher.wait()
  assert choose(policy, world, 0) == ids[:2]
  assert choose(policy, world, 1) == ids[2:]


def test_scheduled_replaces_what_is_lost():
  # ASYNC-03: a batch is never short, nor learned from twice.
  policy = make('scheduled', 1, group_size=2, batch=4)
  world = World(group_size=2)
  world.batcher = batcher_lib.Batcher(
    scripted_sampler.Sampler(outcome=lambda _: outcomes.pop(0)),
    scripted_sampler.SAMPLING,
    budget=retries.RetryBudget(1),
    keep_truncated=True,
    rollout_timeout_s=1.0,
  )
  world.batcher.publish({}, 0)
  failed, ok = types.Status.ENV_ERROR, types.Status.OK

  def settle(step, *answers):
    outcomes.extend(answers)
    count = world.dispatch(policy, step, 0)
    while world.batcher.num_in_flight:
      world.batcher.wait()
    return count

  outcomes = []
  # Groups a, b of step 0 and c, d of step 1; all of a is lost and half of b.
  assert settle(0, failed, failed, ok, failed, ok, ok, ok, failed) == 8
  assert choose(policy, world, 0, 0) is None
  # Another group in place of a, one more member of b: it fails too.
  assert settle(0, failed, ok, ok) == 3
  assert choose(policy, world, 0, 0) is None
  assert settle(0, ok) == 1
  groups = choose(policy, world, 0, 0)
  assert settle(0) == 0
  taken = world.batcher.take(groups)
  assert [item.ticket.step for item in taken] == [0] * 4
  assert len({item.ticket.request_id for item in taken}) == 4
  assert len({item.ticket.seed for item in taken}) == 4
  by_group = collections.Counter(
    (item.ticket.group_id, item.ticket.task_id) for item in taken
  )
  assert sorted(by_group.values()) == [2, 2]
  # Half of d is missed only when its own step comes.
  assert choose(policy, world, 1, 0) is None
  assert settle(1, ok) == 1
  assert len(choose(policy, world, 1, 0)) == 2


def test_the_plan_of_scheduled_outlives_a_run():
  world, policy = World(), make('scheduled', 3, batch=4)
  policy.tickets(Clock(0, 0), world.dispatcher, world.batcher)
  other = make('scheduled', 3, batch=4)
  other.load_state_dict(policy.state_dict())
  twin = World()
  twin.dispatcher.load_state_dict(world.dispatcher.state_dict())
  for version in range(1, 5):
    clock = Clock(version, version)
    assert policy.tickets(clock, world.dispatcher, world.batcher) == (
      other.tickets(clock, twin.dispatcher, twin.batcher)
    )


def test_an_unknown_policy_is_refused_by_name():
  with pytest.raises(ValueError, match=r"'never'.*must be one of"):
    make('never')
