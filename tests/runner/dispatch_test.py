import collections
import itertools
import json
import math

import numpy as np
import pytest

from spopp_jax.runner import dispatch
from spopp_jax.tracker import base as tracker
from spopp_jax.tracker import event_time, no_evidence

TASKS = [f'task-{n}' for n in range(6)]


def evidence(task_ids=TASKS, success=1.0, failure=1.0):
  size = len(task_ids)
  return event_time.EventTimeEvidence(
    task_ids, np.full(size, success), np.full(size, failure)
  )


def make(seed=0, task_ids=TASKS, cap=1, **start):
  filed = evidence(task_ids, **start)
  dispatcher = dispatch.Dispatcher(
    task_ids, filed, seed=seed, max_in_flight_per_prompt=cap
  )
  return dispatcher, filed


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


def test_trk06_two_in_flight_of_one_prompt(cases):
  expected = cases['TRK-06']['expected']
  for order in itertools.permutations([(0, 1.0), (1, 0.0)]):
    dispatcher, filed = make(task_ids=['t'], cap=2)
    tickets = issue(dispatcher, 1) + issue(dispatcher, 1, busy={'t': 1})
    with pytest.raises(ValueError, match='1 prompts asked for, 0 are'):
      issue(dispatcher, 1, busy={'t': 2})
    for i, reward in order:
      # Their advantages are those of the dispatch, whoever returns first.
      assert reward - tickets[i].value == expected[f'A_r{i + 1}']
      filed.receive([tracker.Outcome(tickets[i].request_id, 't', 0, reward)])
    (third,) = issue(dispatcher, 1, version=1)
    assert third.value == expected['v_r3']
    assert filed.counts(['t'], 1) == (
      [expected['alpha_r3']],
      [expected['beta_r3']],
    )


def test_receipt_order_of_requests_of_one_prompt_is_immaterial():
  def play(order):
    dispatcher, filed = make(cap=3)
    tickets = issue(dispatcher, 18)
    outcomes = [
      tracker.Outcome(t.request_id, t.task_id, i % 3, (i % 4) / 3)
      for i, t in enumerate(tickets)
    ]
    for i in order:
      filed.receive([outcomes[i]])
    return tickets, filed.values(TASKS, 3), issue(dispatcher, 12, version=3)

  rng = np.random.default_rng(0)
  tickets, values, later = play(range(18))
  assert collections.Counter(t.task_id for t in tickets) == dict.fromkeys(
    TASKS, 3
  )
  for _ in range(5):
    again, same, latest = play(rng.permutation(18))
    assert again == tickets
    np.testing.assert_allclose(same, values, rtol=1e-12)
    for one, other in zip(later, latest, strict=True):
      assert one.task_id == other.task_id
      np.testing.assert_allclose(one.value, other.value, rtol=1e-12)


def test_the_cap_counts_groups_in_flight():
  dispatcher, _ = make(cap=3)
  busy = collections.Counter({'task-0': 3, 'task-1': 2, 'task-2': 1})
  for _ in range(20):
    drawn = collections.Counter(
      t.task_id for t in issue(dispatcher, 12, busy=busy)
    )
    assert drawn == {
      'task-1': 1,
      'task-2': 2,
      'task-3': 3,
      'task-4': 3,
      'task-5': 3,
    }
  with pytest.raises(ValueError, match='13 prompts asked for, 12 are'):
    issue(dispatcher, 13, busy=busy)


def test_more_in_flight_than_the_cap_is_no_debt():
  dispatcher, _ = make()
  with pytest.raises(ValueError, match='6 prompts asked for, 5 are available'):
    issue(dispatcher, 6, busy={'task-0': 4})
  assert len(issue(dispatcher, 5, busy={'task-0': 4})) == 5


def test_names_alone_stand_for_one_group_each():
  for busy in (['task-0', 'task-1'], {'task-0', 'task-1'}, ('task-0',) * 3):
    dispatcher, _ = make(cap=2)
    drawn = collections.Counter(
      t.task_id for t in issue(dispatcher, 12 - len(set(busy)), busy=busy)
    )
    assert drawn == {t: 1 if t in busy else 2 for t in TASKS}


def test_a_refused_dispatch_draws_nothing():
  dispatcher, _ = make(seed=5)
  untouched, _ = make(seed=5)
  with pytest.raises(ValueError, match='5 prompts asked for, 4 are available'):
    issue(dispatcher, 5, busy=['task-1', 'task-4', 'a task of before'])
  assert issue(dispatcher, 6) == issue(untouched, 6)


def test_only_changed_weights_are_taken_anew():
  class Counting(event_time.EventTimeEvidence):
    rows = ()

    def read(self, rows, policy_event=None):
      self.rows = [*self.rows, *np.asarray(rows).tolist()]
      return super().read(rows, policy_event)

  filed = Counting(TASKS, np.ones(6), np.ones(6))
  dispatcher = dispatch.Dispatcher(TASKS, filed, seed=0)
  assert filed.rows == [0, 1, 2, 3, 4, 5]
  filed.receive([tracker.Outcome('r', 'task-4', 0, 1.0)])
  filed.rows = []
  (ticket,) = issue(dispatcher, 1)
  assert filed.rows == [4, TASKS.index(ticket.task_id)]
  filed.rows = []
  (ticket,) = issue(dispatcher, 1)
  assert filed.rows == [TASKS.index(ticket.task_id)]


def test_weights_follow_the_evidence_as_if_taken_anew():
  rng = np.random.default_rng(0)
  dispatcher, filed = make(seed=3)
  for step in range(30):
    filed.file(
      rng.integers(6, size=4), np.full(4, step), rng.integers(2, size=4)
    )
    if step == 15:
      filed.load_state_dict(filed.state_dict())
    fresh = dispatch.Dispatcher(TASKS, filed, seed=99)
    fresh.load_state_dict(dispatcher.state_dict())
    assert issue(fresh, 3, version=step) == issue(dispatcher, 3, version=step)


def test_the_clock_of_the_drawn_must_not_go_back():
  dispatcher, filed = make()
  filed.receive([tracker.Outcome('r', 'task-4', 5, 1.0)])
  with pytest.raises(ValueError, match='policy event 4 lies before event 5'):
    issue(dispatcher, 6, version=4)


def test_group_methods_draw_uniformly():
  nothing = no_evidence.NoEvidence(TASKS, np.ones(6), np.ones(6))
  dispatcher = dispatch.Dispatcher(TASKS, nothing, seed=0)
  drawn = collections.Counter()
  for step in range(1500):
    tickets = issue(dispatcher, 2, version=step)
    drawn.update(t.task_id for t in tickets)
    assert [t.value for t in tickets] == [0, 0]
    nothing.receive(
      [tracker.Outcome(t.request_id, t.task_id, step, 1.0) for t in tickets]
    )
  assert all(420 < drawn[task] < 580 for task in TASKS)


def test_other_tasks_and_a_cap_below_one_are_refused():
  with pytest.raises(ValueError, match='the 5 tasks to dispatch must be'):
    dispatch.Dispatcher(TASKS[:5], evidence(), seed=0)
  with pytest.raises(ValueError, match='in the same order'):
    dispatch.Dispatcher(TASKS[::-1], evidence(), seed=0)
  with pytest.raises(ValueError, match=r'max_in_flight_per_prompt \(0\)'):
    make(cap=0)


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
