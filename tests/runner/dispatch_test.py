import collections
import json
import math

import numpy as np
import pytest

from spopp_jax.runner import dispatch
from spopp_jax.tracker import base as tracker
from spopp_jax.tracker import event_time

TASKS = [f'task-{n}' for n in range(6)]


def evidence(task_ids=TASKS, success=1.0, failure=1.0):
  size = len(task_ids)
  return event_time.EventTimeEvidence(
    task_ids, np.full(size, success), np.full(size, failure)
  )


def make(seed=0, task_ids=TASKS, **start):
  filed = evidence(task_ids, **start)
  return dispatch.Dispatcher(task_ids, filed, seed=seed), filed


def issue(dispatcher, count=3, version=0, step=0, busy=()):
  return dispatcher.dispatch(
    count, policy_version=version, step=step, busy=busy
  )


def test_a_ticket_keeps_the_value_of_its_dispatch(cases):
  case = cases['TRK-06']['input'], cases['TRK-06']['expected']
  start, expected = case
  dispatcher, filed = make(
    task_ids=['t'], success=start['alpha0'], failure=start['beta0']
  )
  (first,) = issue(dispatcher, 1)
  (second,) = issue(dispatcher, 1)
  filed.receive([tracker.Outcome(first.request_id, 't', 0, 1.0)])
  assert 1.0 - first.value == expected['A_r1']
  assert 0.0 - second.value == expected['A_r2']
  filed.receive([tracker.Outcome(second.request_id, 't', 0, 0.0)])
  (third,) = issue(dispatcher, 1, version=1)
  assert third.value == expected['v_r3']
  # Between the two outcomes a new ticket would have seen the first one.
  dispatcher, filed = make(task_ids=['t'])
  filed.receive([tracker.Outcome('r', 't', 0, 1.0)])
  assert issue(dispatcher, 1)[0].value == 2 / 3


def test_a_ticket_says_what_it_was_dispatched_for():
  dispatcher, filed = make()
  filed.receive([tracker.Outcome('r', 'task-4', 5, 1.0)])
  for ticket in issue(dispatcher, 6, version=7, step=8):
    assert (ticket.policy_version, ticket.step) == (7, 8)
    assert 0 <= ticket.seed < 2**32
    value = filed.values([ticket.task_id], 7)[0]
    assert ticket.value == value
    assert type(ticket.value) is float
    assert type(ticket.seed) is int


def test_busy_tasks_are_never_drawn():
  dispatcher, _ = make()
  busy = {'task-1', 'task-4'}
  drawn = collections.Counter(
    ticket.task_id
    for _ in range(50)
    for ticket in issue(dispatcher, 2, busy=busy)
  )
  assert set(drawn) == set(TASKS) - busy


def test_a_dispatch_draws_different_tasks():
  dispatcher, _ = make()
  for _ in range(20):
    assert {t.task_id for t in issue(dispatcher, 6)} == set(TASKS)


def test_a_group_is_one_task_with_seeds_of_its_own():
  dispatcher = dispatch.Dispatcher(TASKS, evidence(), seed=0, group_size=3)
  waves = [issue(dispatcher, 7), issue(dispatcher, 12)]  # 2 groups, 4 groups
  assert [len(wave) for wave in waves] == [6, 12]
  groups = collections.defaultdict(list)
  for ticket in waves[0] + waves[1]:
    groups[ticket.group_id].append(ticket)
  assert [len(members) for members in groups.values()] == [3] * 6
  for members in groups.values():
    assert len({t.task_id for t in members}) == 1
  assert len({t.seed for wave in waves for t in wave}) == 18
  for wave in waves:
    assert len({t.task_id for t in wave}) == len(wave) / 3


def test_a_single_request_is_a_group_of_its_own():
  dispatcher, _ = make()
  ids = [t.group_id for _ in range(3) for t in issue(dispatcher, 4)]
  assert len(set(ids)) == 12


def test_more_than_is_free_is_refused():
  dispatcher, _ = make()
  with pytest.raises(ValueError, match='5 are available'):
    issue(dispatcher, 6, busy={'task-0'})


def test_uncertain_tasks_are_drawn_more_often():
  dispatcher, filed = make()
  solved = [
    tracker.Outcome(f'{task}-{n}', task, 0, 1.0)
    for task in TASKS[1:]
    for n in range(400)
  ]
  filed.receive(solved)
  drawn = [issue(dispatcher, 1)[0].task_id for _ in range(300)]
  # The weights are .55 against five of .1: over one half of the draws.
  assert 130 < drawn.count('task-0') < 195


def test_request_ids_are_unique_over_the_whole_run():
  dispatcher, _ = make()
  ids = [t.request_id for _ in range(40) for t in issue(dispatcher, 5)]
  assert len(set(ids)) == 200
  assert not any('/' in request_id for request_id in ids)


def test_requests_draw_from_different_streams():
  dispatcher, _ = make()
  seeds = [t.seed for _ in range(40) for t in issue(dispatcher, 5)]
  assert len(set(seeds)) == 200


def test_the_same_seed_gives_the_same_tickets():
  waves = [
    [issue(dispatcher, 4) for _ in range(3)]
    for dispatcher in (make(seed=3)[0], make(seed=3)[0], make(seed=4)[0])
  ]
  assert waves[0] == waves[1]
  assert waves[0] != waves[2]


def test_a_restored_dispatcher_continues_the_stream():
  dispatcher, _ = make(seed=5)
  issue(dispatcher, 5)
  state = json.loads(json.dumps(dispatcher.state_dict()))
  expected = [issue(dispatcher, 4) for _ in range(3)]
  restored, _ = make(seed=99)
  restored.load_state_dict(state)
  assert [issue(restored, 4) for _ in range(3)] == expected


def every(rollouts=3, **changes):
  settings = {
    'policy_version': 2,
    'seed': 1,
    'purpose': 'evaluation',
    **changes,
  }
  return dispatch.every_task(TASKS, rollouts=rollouts, **settings)


def test_every_task_is_run_equally_often_with_seeds_of_its_own():
  tickets = every()
  counts = collections.Counter(ticket.task_id for ticket in tickets)
  assert counts == dict.fromkeys(TASKS, 3)
  assert len({ticket.seed for ticket in tickets}) == 18
  assert len({ticket.request_id for ticket in tickets}) == 18
  assert {ticket.policy_version for ticket in tickets} == {2}
  # They are measured, not trained on: a baseline would be an error.
  assert all(math.isnan(ticket.value) for ticket in tickets)


def test_purposes_and_training_share_no_request_id():
  ids = [t.request_id for t in issue(make()[0], 6)]
  for purpose in ('evaluation', 'offline values'):
    ids += [ticket.request_id for ticket in every(purpose=purpose)]
  assert len(set(ids)) == len(ids)


def test_every_task_depends_on_the_seed_alone():
  assert [t.seed for t in every()] == [t.seed for t in every()]
  assert [t.seed for t in every()] != [t.seed for t in every(seed=2)]
