"""Whatever is lost, repeated or late: every ticket is answered once."""

import collections
import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scripted_sampler

from spopp_jax import types
from spopp_jax.runner import batcher as batcher_lib
from spopp_jax.sampler import errors, retries

Status = types.Status
PARAMS = {'w': np.zeros(2, np.float32)}
VERSION = 3


def make(sampler, attempts=3, **changes):
  settings = {'keep_truncated': True, 'rollout_timeout_s': 1.0, **changes}
  return batcher_lib.Batcher(
    sampler,
    scripted_sampler.SAMPLING,
    budget=retries.RetryBudget(attempts),
    **settings,
  )


def tickets(count, version=VERSION):
  return [
    scripted_sampler.ticket(n, value=n / count, version=version)
    for n in range(count)
  ]


def started(sampler, count=0, **changes):
  batcher = make(sampler, **changes)
  batcher.publish(PARAMS, VERSION)
  batcher.submit(tickets(count))
  return batcher


def collect(batcher, groups):
  """Waits for so many groups, or for all; returns their members."""
  while len(batcher.finished) < groups and batcher.in_flight:
    batcher.wait()
  return batcher.take(list(batcher.finished)[:groups])


stem = retries.stem


def ids(finished):
  return [item.trajectory.request_id for item in finished]


def test_first_finished_come_first_and_the_rest_is_drained():
  order = iter([3, 0, 1, 1, 0])  # among those still held
  sampler = scripted_sampler.Sampler(pick=lambda held: next(order))
  batcher = started(sampler, 5)
  assert ids(collect(batcher, 2)) == ['r3', 'r0']
  assert [t.request_id for t in batcher.in_flight] == ['r1', 'r2', 'r4']
  assert ids(batcher.drain()) == ['r2', 'r4', 'r1']
  assert batcher.in_flight == []
  assert batcher.drain() == []
  assert batcher.statuses == {Status.OK: 5}


def test_groups_come_whole_in_the_order_in_which_they_end():
  # Groups (0, 1, 2) and (3, 4, 5); the last of the second ends first.
  order = iter([0, 2, 2, 0, 1, 0])  # r0, r3, r4, r1, r5, r2
  sampler = scripted_sampler.Sampler(pick=lambda held: next(order))
  batcher = make(sampler)
  batcher.publish(PARAMS, VERSION)
  batcher.submit(
    [
      scripted_sampler.ticket(n, version=VERSION, group_id=n // 3)
      for n in range(6)
    ]
  )
  assert ids(collect(batcher, 1)) == ['r3', 'r4', 'r5']
  assert [t.request_id for t in batcher.in_flight] == ['r2']
  assert ids(batcher.drain()) == ['r0', 'r1', 'r2']


def test_a_group_without_its_failed_members_still_counts():
  sampler = scripted_sampler.Sampler(
    outcome=lambda request: (
      Status.ENV_ERROR
      if stem(request.request_id) in ('r1', 'r2', 'r3')
      else Status.OK
    )
  )
  batcher = make(sampler)
  batcher.publish(PARAMS, VERSION)
  batcher.submit(
    [
      scripted_sampler.ticket(n, version=VERSION, group_id=n // 2)
      for n in range(6)
    ]
  )
  # Group 1 lost both members: it is none of the two that are collected.
  # Group 0 ends with the last attempt of r1, after the others.
  assert ids(collect(batcher, 2)) == ['r4', 'r5', 'r0']


def test_each_answer_stands_beside_its_own_ticket():
  sampler = scripted_sampler.Sampler(pick=lambda held: -1)
  for item in started(sampler, 4).drain():
    assert item.ticket.request_id == item.trajectory.request_id
    assert item.ticket.task_id == item.trajectory.task_id
    assert item.ticket.value == item.ticket.seed / 4


def test_request_carries_what_the_ticket_says():
  asked = []
  sampler = scripted_sampler.Sampler(
    outcome=lambda request: asked.append(request) or Status.OK
  )
  started(sampler, 2).drain()
  (_, request) = asked
  assert (request.request_id, request.task_id) == ('r1', 'task-1')
  assert (request.policy_version, request.seed) == (VERSION, 1)
  assert request.sampling == scripted_sampler.SAMPLING


def test_repeated_and_unknown_replies_are_counted_and_dropped():
  # The first reply bears an unknown id, the third repeats the second.
  sampler = scripted_sampler.Sampler(surplus_at={0, 2})
  batcher = started(sampler, 3)
  assert ids(batcher.drain()) == ['r0', 'r1', 'r2']
  assert batcher.statuses == {Status.OK: 3, Status.DUPLICATE: 2}


def test_retry_has_a_new_id_and_the_frozen_value():
  failures = iter([Status.ENV_ERROR, Status.SAMPLER_ERROR])
  sampler = scripted_sampler.Sampler(
    outcome=lambda request: next(failures, Status.OK)
  )
  batcher = make(sampler)
  batcher.publish(PARAMS, VERSION)
  first = scripted_sampler.ticket(7, value=0.25, version=VERSION)
  batcher.submit([first])
  (item,) = batcher.drain()
  assert sampler.ids == ['r7', 'r7/2', 'r7/3']
  assert item.ticket.value == 0.25
  assert item.ticket.seed == first.seed
  assert batcher.statuses == {
    Status.ENV_ERROR: 1,
    Status.SAMPLER_ERROR: 1,
    Status.OK: 1,
  }


@pytest.mark.parametrize('attempts', [1, 2, 3])
def test_attempts_are_one_budget_whatever_the_failure(attempts, caplog):
  failures = iter([Status.ENV_ERROR, Status.INVALID, Status.STALE] * 2)
  sampler = scripted_sampler.Sampler(outcome=lambda request: next(failures))
  batcher = started(sampler, 1, attempts=attempts)
  assert batcher.drain() == []
  assert len(sampler.ids) == attempts
  assert batcher.in_flight == []
  assert 'r0 (task-0) ended as env_error' in caplog.text


def test_a_request_that_is_given_up_does_not_block_the_batch():
  sampler = scripted_sampler.Sampler(
    outcome=lambda request: (
      Status.ENV_ERROR if request.task_id == 'task-1' else Status.OK
    )
  )
  batcher = started(sampler, 4)
  assert ids(collect(batcher, 4)) == ['r0', 'r2', 'r3']


def test_truncated_episodes_are_failures_that_count():
  sampler = scripted_sampler.Sampler(
    outcome=lambda request: (
      Status.CONTEXT_LIMIT if request.seed else Status.LENGTH
    )
  )
  batcher = started(sampler, 2)
  finished = batcher.drain()
  assert [item.trajectory.reward for item in finished] == [0.0, 0.0]
  assert sampler.ids == ['r0', 'r1']
  assert batcher.statuses == {Status.CONTEXT_LIMIT: 1, Status.LENGTH: 1}


def test_truncated_episodes_are_dropped_on_demand():
  sampler = scripted_sampler.Sampler(
    outcome=lambda request: Status.CONTEXT_LIMIT
  )
  batcher = started(sampler, 1, keep_truncated=False)
  assert batcher.drain() == []
  assert batcher.statuses == {Status.CONTEXT_LIMIT: 3}


@pytest.mark.parametrize('status', [Status.OK, Status.CONTEXT_LIMIT])
def test_another_version_than_asked_is_stale(status):
  class Old(scripted_sampler.Sampler):
    def next(self, timeout_s):
      (request,) = self.held
      self.held.clear()
      version = VERSION if '/' in request.request_id else VERSION - 1
      return scripted_sampler.trajectory(
        request.request_id, request.task_id, status=status, version=version
      )

  batcher = started(Old(), 1)
  (item,) = batcher.drain()
  assert item.trajectory.policy_version == VERSION
  assert item.trajectory.request_id == 'r0/2'
  assert batcher.statuses == {Status.STALE: 1, status: 1}


def test_timeout_names_what_is_waited_for():
  class Silent(scripted_sampler.Sampler):
    def next(self, timeout_s):
      if len(self.held) > 7:
        return super().next(timeout_s)
      raise errors.SamplerTimeout(f'nothing finished within {timeout_s} s')

  batcher = started(Silent(), 9, rollout_timeout_s=2.5)
  with pytest.raises(batcher_lib.RolloutsFailed) as caught:
    collect(batcher, 9)
  for words in (
    'no rollout ended within 2.5 s (nothing finished within 0.5 s)',
    '7 requests (r2, r3, r4, r5, r6 and 2 more)',
    '--config.run.resume=True',
  ):
    assert words in str(caught.value)


def test_on_finished_is_called_once_a_usable_trajectory():
  failures = iter([Status.ENV_ERROR])
  sampler = scripted_sampler.Sampler(
    outcome=lambda request: next(failures, Status.OK), surplus_at={1}
  )
  batcher = started(sampler, 3)
  calls = []
  batcher.on_finished = lambda: calls.append(1)
  assert len(batcher.drain()) == len(calls) == 3


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
  count=st.integers(1, 8),
  first=st.integers(0, 8),
  attempts=st.integers(1, 3),
  picks=st.lists(st.integers(0, 7), max_size=20),
  failures=st.lists(
    st.sampled_from([Status.OK, Status.ENV_ERROR, Status.CONTEXT_LIMIT]),
    max_size=20,
  ),
  surplus=st.sets(st.integers(0, 30), max_size=6),
  keep_truncated=st.booleans(),
  group_size=st.none() | st.integers(1, 4),
)
def test_every_ticket_is_answered_once_whatever_happens(
  count,
  first,
  attempts,
  picks,
  failures,
  surplus,
  keep_truncated,
  group_size,
):
  order, ends = iter(picks), iter(failures)
  sampler = scripted_sampler.Sampler(
    outcome=lambda request: next(ends, Status.OK),
    pick=lambda held: next(order, 0),
    surplus_at=surplus,
  )
  played(
    sampler,
    count=count,
    first=first,
    group_size=group_size,
    attempts=attempts,
    keep_truncated=keep_truncated,
  )


def played(sampler, *, count, first, group_size, **changes):
  """Plays two waves of two versions and holds them to the promises."""
  batcher = make(sampler, **changes)
  concluded = 0
  for version in (VERSION, VERSION + 1):
    batcher.publish(PARAMS, version)
    wave = [
      scripted_sampler.ticket(
        n + count * version,
        value=n / count,
        version=version,
        group_id=100 * version + n // group_size if group_size else -1,
      )
      for n in range(count)
    ]
    batcher.submit(wave)
    early = collect(batcher, first)
    finished = early + batcher.drain()
    if group_size is not None:
      # Groups come whole, one after another, and no more than were asked for.
      order = [item.ticket.group_id for item in finished]
      changes_of_group = sum(a != b for a, b in itertools.pairwise(order))
      assert changes_of_group == max(len(set(order)) - 1, 0)
      assert len({item.ticket.group_id for item in early}) <= first
      assert {i.ticket.group_id for i in early}.isdisjoint(
        i.ticket.group_id for i in finished[len(early) :]
      )
    assert batcher.in_flight == []
    asked = {ticket.request_id: ticket for ticket in wave}
    answered = [stem(item.ticket.request_id) for item in finished]
    assert len(set(answered)) == len(answered)
    assert set(answered) <= set(asked)
    for item in finished:
      assert item.trajectory.request_id == item.ticket.request_id
      assert item.trajectory.policy_version == version
      assert item.ticket.value == asked[stem(item.ticket.request_id)].value
    concluded += len(finished)
    # Who was not answered had used up its attempts.
    for missing in set(asked) - set(answered):
      tries = {i for i in sampler.ids if stem(i) == missing}
      assert len(tries) == changes.get('attempts', 3)
  counted = collections.Counter(batcher.statuses)
  kept = {Status.OK} | (
    {Status.CONTEXT_LIMIT} if changes.get('keep_truncated', True) else set()
  )
  assert sum(counted[status] for status in kept) == concluded
  assert counted.pop(Status.DUPLICATE, 0) == sampler.surplus
  assert sum(counted.values()) == len(set(sampler.ids)) == batcher.dispatched
  assert (batcher.open, batcher.finished) == ({}, {})
  assert not batcher.busy
  return concluded
