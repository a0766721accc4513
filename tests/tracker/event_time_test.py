import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from spopp_jax.tracker import base, event_time


def _evidence(success=1.0, failure=1.0, task_ids=('t1',), **kwargs):
  size = len(task_ids)
  return event_time.EventTimeEvidence(
    task_ids, np.full(size, success), np.full(size, failure), **kwargs
  )


def _outcome(event, reward, task_id='t1', request_id=None):
  if request_id is None:
    request_id = f'{task_id}-{event}-{reward}'
  return base.Outcome(request_id, task_id, event, reward)


def _closed_form(success, failure, history, event, retention=0.875):
  """Eq. 3 as printed, with the offline evidence at event 0."""
  alpha = retention**event * success
  beta = retention**event * failure
  for generated, reward in history:
    alpha += retention ** (event - generated) * reward
    beta += retention ** (event - generated) * (1 - reward)
  return alpha, beta


def _e01(vector):
  inputs = vector['inputs']
  evidence = _evidence(
    inputs['alpha0'],
    inputs['beta0'],
    retention=inputs['rho'],
    event=inputs['event0'],
  )
  history = [_outcome(h['event'], h['R']) for h in inputs['history']]
  return evidence, history


def test_e01_closed_form_in_every_order_of_arrival(vectors):
  vector = vectors['E01_event_time']
  event, expected = vector['inputs']['read_event'], vector['expected']
  for order in itertools.permutations(range(3)):
    evidence, history = _e01(vector)
    for i in order:
      evidence.receive([history[i]])
    success, failure = evidence.counts(['t1'], event)
    np.testing.assert_allclose(success, expected['alpha'], rtol=1e-12)
    np.testing.assert_allclose(failure, expected['beta'], rtol=1e-12)
    np.testing.assert_allclose(success + failure, expected['mass'], rtol=1e-12)
    values = evidence.values(['t1'], event)
    np.testing.assert_allclose(values, expected['v'], rtol=1e-12)


def test_e01_in_one_call_is_the_same(vectors):
  vector = vectors['E01_event_time']
  evidence, history = _e01(vector)
  evidence.receive(history[::-1])
  np.testing.assert_allclose(
    evidence.values(['t1'], 6), vector['expected']['v'], rtol=1e-12
  )


def test_e04_mass_is_eight_after_insertion_and_seven_at_the_next_event(vectors):
  expected = vectors['E04_mass_fixed_point']['expected']
  evidence = _evidence()
  for event in range(300):
    evidence.receive([_outcome(event, event % 2)])
  mass = lambda event: sum(evidence.counts(['t1'], event))
  np.testing.assert_allclose(
    mass(299), expected['spo_after_update'], rtol=1e-12
  )
  np.testing.assert_allclose(
    mass(300), expected['spopp_at_next_dispatch'], rtol=1e-12
  )


_HISTORIES = st.lists(
  st.tuples(
    st.integers(0, 40),
    st.floats(0, 1),
    st.sampled_from(['t1', 't2']),
  ),
  max_size=8,
)


@hypothesis.given(_HISTORIES, st.randoms(use_true_random=False), st.data())
@hypothesis.settings(deadline=None)
def test_any_order_and_any_batching_is_eq_3(history, random, data):
  outcomes = [
    _outcome(event, reward, task_id, request_id=str(i))
    for i, (event, reward, task_id) in enumerate(history)
  ]
  random.shuffle(outcomes)
  evidence = _evidence(2.0, 3.0, ('t1', 't2'))
  while outcomes:
    size = data.draw(st.integers(1, len(outcomes)))
    evidence.receive(outcomes[:size])
    outcomes = outcomes[size:]
  for task_id in ('t1', 't2'):
    own = [
      (event, reward) for event, reward, name in history if name == task_id
    ]
    alpha, beta = _closed_form(2.0, 3.0, own, 41)
    success, failure = evidence.counts([task_id], 41)
    np.testing.assert_allclose(success, alpha, rtol=1e-12)
    np.testing.assert_allclose(failure, beta, rtol=1e-12)
    np.testing.assert_allclose(
      evidence.values([task_id], 41), alpha / (alpha + beta), rtol=1e-12
    )


_BATCH = st.lists(
  st.tuples(st.integers(0, 3), st.integers(0, 9), st.floats(0, 1)),
  max_size=40,
)


def _four():
  return _evidence(2.0, 3.0, ('a', 'b', 'c', 'd'), event=4)


def _file(evidence, batch):
  rows, events, rewards = zip(*batch, strict=True) if batch else ((), (), ())
  evidence.file(rows, events, rewards)


@hypothesis.given(_BATCH, st.randoms(use_true_random=False), st.data())
@hypothesis.settings(deadline=None)
def test_rows_filed_in_any_order_and_batching(batch, random, data):
  whole, shuffled, split = _four(), _four(), _four()
  _file(whole, batch)
  random.shuffle(batch)
  _file(shuffled, batch)
  # Within one call the order changes no bit.
  for name, array in shuffled.state_dict().items():
    np.testing.assert_array_equal(array, whole.state_dict()[name])
  while batch:
    size = data.draw(st.integers(1, len(batch)))
    _file(split, batch[:size])
    batch = batch[size:]
  for name, array in split.state_dict().items():
    np.testing.assert_allclose(
      array, whole.state_dict()[name], rtol=1e-12, atol=0
    )


def test_objects_and_rows_are_filed_alike():
  by_name, by_row = _four(), _four()
  batch = [(2, 5, 1.0), (0, 3, 0.25), (2, 7, 0.5), (2, 5, 0.0)]
  _file(by_row, batch)
  by_name.receive(
    [
      _outcome(event, reward, 'abcd'[row], request_id=str(i))
      for i, (row, event, reward) in enumerate(batch)
    ]
  )
  for name, array in by_name.state_dict().items():
    np.testing.assert_array_equal(array, by_row.state_dict()[name])
  np.testing.assert_array_equal(
    by_row.read([3, 2, 2]), by_name.values(['d', 'c', 'c'], 9)
  )
  np.testing.assert_array_equal(by_row.changed_since(0)[0], [0, 2])


def test_a_fractional_reward_is_shared_between_success_and_failure():
  evidence = _evidence(1.0, 2.0)
  evidence.receive([_outcome(0, 0.25)])
  assert evidence.counts(['t1'], 0) == ([1.25], [2.75])


@pytest.mark.parametrize(
  'rows, events, rewards, words',
  [
    ([0, 4], [4, 4], [1, 1], 'row 4 does not exist'),
    ([0, -1], [4, 4], [1, 1], 'row -1 does not exist'),
    ([0, 1], [4, 4], [1, -1], "reward -1.0 of task 'b'"),
    ([0, 1], [4, 4], [1, np.nan], "reward nan of task 'b'"),
    ([0, 1], [4.0, 4.0], [1, 1], 'events have dtype float64'),
    ([0, 1], [4], [1, 1], r'rows \(2,\), events \(1,\)'),
    ([0, 1], [4, 4], [1], r'rewards \(1,\)'),
    ([[0]], [[4]], [[1]], r'rows \(1, 1\)'),
  ],
)
def test_refused_rows_change_nothing(rows, events, rewards, words):
  evidence = _four()
  before = evidence.state_dict()
  with pytest.raises(ValueError, match=words):
    evidence.file(rows, events, rewards)
  for name, array in evidence.state_dict().items():
    np.testing.assert_array_equal(array, before[name])
  assert evidence.changed_since(0)[0].shape == (0,)


def test_files_and_memory_hold_the_same(tmp_path):
  in_files = _evidence(2.0, 3.0, ('a', 'b', 'c', 'd'), directory=tmp_path)
  in_memory = _evidence(2.0, 3.0, ('a', 'b', 'c', 'd'))
  for evidence in (in_files, in_memory):
    _file(evidence, [(2, 5, 1.0), (0, 3, 0.25), (2, 7, 0.5)])
  state = in_files.state_dict()
  _file(in_files, [(1, 9, 1.0), (2, 9, 1.0)])
  for name, array in in_memory.state_dict().items():
    np.testing.assert_array_equal(state[name], array)
    assert type(state[name]) is np.ndarray
  in_files.load_state_dict(state)
  np.testing.assert_array_equal(np.load(tmp_path / 'events.npy'), [3, 0, 7, 0])
  np.testing.assert_array_equal(
    in_files.read(range(4)), in_memory.read(range(4))
  )


def test_reading_rows_under_an_event_checks_the_clock():
  evidence = _four()
  _file(evidence, [(1, 6, 1.0)])
  np.testing.assert_array_equal(evidence.read([1]), evidence.read([1], 6))
  with pytest.raises(ValueError, match='policy event 5 lies before event 6'):
    evidence.read([0, 1], 5)


def test_trk02_two_outcomes_of_one_prompt_both_count(cases):
  case = cases['TRK-02']
  inputs, expected = case['input'], case['expected']
  evidence = _evidence(
    inputs['alpha0'], inputs['beta0'], retention=inputs['rho']
  )
  evidence.receive(
    [
      _outcome(one['event'], one['R'], one['task'], request_id=str(i))
      for i, one in enumerate(inputs['batch'])
    ]
  )
  counts = evidence.counts(['t1'], inputs['query_event'])
  assert counts == ([expected['alpha']], [expected['beta']])
  assert evidence.values(['t1'], 1) == [expected['v']]


def test_trk03_reward_out_of_range_changes_nothing(cases):
  case = cases['TRK-03']
  evidence = _evidence(task_ids=('t1', 't2'))
  with pytest.raises(ValueError, match=r"reward -1.0 of task 't2'"):
    evidence.receive(
      [_outcome(3, 1), _outcome(3, case['input']['outcome_R'], 't2')]
    )
  np.testing.assert_array_equal(evidence.values(['t1', 't2'], 0), [0.5, 0.5])


def test_trk04_a_resumed_run_reads_the_same_value(cases):
  case = cases['TRK-04']
  inputs = case['input']
  whole = _evidence(inputs['alpha0'], inputs['beta0'])
  for one in inputs['outcomes_before_save']:
    whole.receive([_outcome(one['event'], one['R'])])
  resumed = _evidence(5, 7)
  resumed.load_state_dict(whole.state_dict())
  event = inputs['resume_then_query_event']
  np.testing.assert_allclose(
    resumed.values(['t1'], event), case['expected']['v'], rtol=1e-8
  )
  np.testing.assert_array_equal(resumed.changed_since(0)[0], [0])
  for evidence in (whole, resumed):
    evidence.receive([_outcome(3, 1, request_id='late')])
    evidence.receive([_outcome(5, 0, request_id='new')])
  assert resumed.values(['t1'], event) == whole.values(['t1'], event)
  assert resumed.counts(['t1'], event) == whole.counts(['t1'], event)


def test_trk06_a_value_read_at_dispatch_does_not_see_later_outcomes(cases):
  expected = cases['TRK-06']['expected']
  evidence = _evidence()
  first, second = evidence.values(['t1', 't1'], 0)
  evidence.receive([_outcome(0, 1, request_id='r1')])
  assert 1 - first == expected['A_r1']
  evidence.receive([_outcome(0, 0, request_id='r2')])
  assert 0 - second == expected['A_r2']
  assert evidence.values(['t1'], 1) == [expected['v_r3']]
  assert evidence.counts(['t1'], 1) == (
    [expected['alpha_r3']],
    [expected['beta_r3']],
  )


def test_idle_time_leaves_the_value_alone_and_never_underflows():
  evidence = _evidence(3.0, 5.0)
  assert evidence.values(['t1'], 0) == evidence.values(['t1'], 10**6)
  with np.errstate(all='raise', under='ignore'):
    evidence.receive([_outcome(10**6, 1)])
    assert evidence.values(['t1'], 10**6) == [1.0]
    evidence.receive([_outcome(10**5, 0)])  # far too old to weigh anything
    assert evidence.values(['t1'], 2 * 10**6) == [1.0]
    evidence.receive([_outcome(10**6, 0)])
    assert evidence.values(['t1'], 10**6) == [0.5]


def test_the_clock_must_not_go_back():
  evidence = _evidence(task_ids=('t1', 't2'))
  evidence.receive([_outcome(5, 1)])
  with pytest.raises(ValueError, match=r'policy event 4 lies before event 5'):
    evidence.values(['t2', 't1'], 4)
  assert evidence.values(['t2'], 4) == [0.5]


def test_a_request_is_filed_once():
  evidence = _evidence()
  with pytest.raises(ValueError, match="request 'r' stands twice"):
    evidence.receive([_outcome(1, 1, request_id='r')] * 2)
  assert evidence.values(['t1'], 1) == [0.5]


def test_unknown_task_and_bad_settings_are_refused():
  with pytest.raises(ValueError, match="nearest known one is 't1'"):
    _evidence().receive([_outcome(1, 1, 't11')])
  with pytest.raises(TypeError):
    _evidence().receive([_outcome(1.5, 1)])
  for retention in (0, -0.1, 1.1, np.nan):
    with pytest.raises(ValueError, match='retention'):
      _evidence(retention=retention)


def test_nothing_received_and_nothing_consumed_change_nothing():
  evidence = _evidence(3.0, 5.0)
  evidence.receive([])
  evidence.consume([], lambda trajectories: [])
  assert evidence.counts(['t1'], 0) == ([3.0], [5.0])
