import dataclasses

import numpy as np
import pytest

from spopp_jax import types
from spopp_jax.tracker import receipt_order

_ACTIONS = np.array([0, 1, 0, 1], bool)


def _evidence(task_ids=('t1', 't2'), success=4.0, failure=4.0, **kwargs):
  size = len(task_ids)
  return receipt_order.ReceiptOrderEvidence(
    task_ids, np.full(size, success), np.full(size, failure), **kwargs
  )


def _trajectory(task_id, reward, first_token=0, length=4, **kwargs):
  return types.Trajectory(
    request_id=f'{task_id}-{first_token}',
    task_id=task_id,
    status=types.Status.OK,
    reward=reward,
    policy_version=0,
    weights_checksum='',
    tokens=np.arange(length, dtype=np.int32) + first_token,
    action_mask=np.resize(_ACTIONS, length),
    behaviour_logprobs=np.zeros(length, np.float32),
    num_turns=1,
    sampling=types.SamplingParams(temperature=0.7, top_k=3),
    **kwargs,
  )


class _Policy:
  """Log-probs -1 moved by `shift` a token; keeps what it was asked."""

  def __init__(self, shift=0.0):
    self.shift = np.broadcast_to(shift, 4)
    self.calls = []

  def __call__(self, trajectories):
    self.calls.append(list(trajectories))
    return [np.float32(self.shift - 1) for _ in trajectories]


def test_first_visit_keeps_the_upper_bound():
  evidence = _evidence()
  evidence.consume([_trajectory('t1', 1.0)], _Policy())
  success, failure = evidence.counts(['t1', 't2'], 0)
  np.testing.assert_allclose(success, [0.96 * 4 + 1, 4])
  np.testing.assert_allclose(failure, [0.96 * 4, 4])
  np.testing.assert_allclose(
    evidence.values(['t1', 't2'], 0), [4.84 / 8.68, 0.5]
  )


def test_drift_is_taken_on_the_previous_response_of_the_prompt():
  evidence = _evidence()
  evidence.consume([_trajectory('t1', 1.0, 10)], _Policy())
  # The policy moves by .01 a counted token; the masked ones do not matter.
  policy = _Policy(np.where(_ACTIONS, [0, 0.01, 0, -0.01], 9.0))
  evidence.consume(
    [_trajectory('t2', 0.0, 20), _trajectory('t1', 0.0, 30)], policy
  )
  (asked,) = policy.calls
  assert [t.tokens[0] for t in asked] == [10, 20, 30]
  kept = 2 ** (-0.01 / 0.06)
  success, failure = evidence.counts(['t1', 't2'], 0)
  np.testing.assert_allclose(success, [kept * 4.84, 0.96 * 4], rtol=1e-6)
  np.testing.assert_allclose(failure, [kept * 3.84 + 1, 4.84], rtol=1e-6)


def test_previous_logprobs_are_those_right_after_the_previous_visit():
  evidence = _evidence()
  evidence.consume([_trajectory('t1', 1.0)], _Policy(0.0))
  evidence.consume([_trajectory('t2', 1.0)], _Policy(5.0))
  evidence.consume([_trajectory('t1', 0.0)], _Policy(0.01))
  kept = 2 ** (-0.01 / 0.06)
  np.testing.assert_allclose(
    evidence.counts(['t1'], 0)[0], kept * 4.84, rtol=1e-5
  )


def test_two_outcomes_of_one_prompt_both_count_in_receipt_order():
  evidence = _evidence()
  policy = _Policy()
  evidence.consume(
    [_trajectory('t1', 1.0, 10), _trajectory('t1', 0.0, 20)], policy
  )
  success, failure = evidence.counts(['t1'], 0)
  np.testing.assert_allclose(success, 0.96 * (0.96 * 4 + 1))
  np.testing.assert_allclose(failure, 0.96 * (0.96 * 4) + 1)
  follow = _Policy(0.01)  # the later one is the response to compare with
  evidence.consume([_trajectory('t1', 0.0, 30)], follow)
  assert [t.tokens[0] for t in follow.calls[0]] == [20, 30]


def test_drift_precedes_the_first_of_two_outcomes_alone():
  evidence = _evidence()
  evidence.consume([_trajectory('t1', 1.0)], _Policy())
  evidence.consume(
    [_trajectory('t1', 0.0), _trajectory('t1', 0.0)], _Policy(1.0)
  )
  np.testing.assert_allclose(
    evidence.counts(['t1'], 0)[0], 0.96 * 0.875 * 4.84, rtol=1e-6
  )


def test_response_mask_counts_observations_too():
  def kept(**kwargs):
    evidence = _evidence(**kwargs)
    evidence.consume([_trajectory('t1', 0.0)], _Policy())
    evidence.consume([_trajectory('t1', 0.0)], _Policy([9.0, 0.0, 0.012, 0.0]))
    return evidence.counts(['t1'], 0)[0][0] / (0.96 * 4)

  np.testing.assert_allclose(kept(), 0.96)
  np.testing.assert_allclose(
    kept(drift_mask='response'), 2 ** (-0.004 / 0.06), rtol=1e-5
  )


def test_receiving_changes_nothing():
  evidence = _evidence()
  evidence.receive([])
  np.testing.assert_array_equal(evidence.counts(['t1'], 3), [[4], [4]])


def test_an_empty_batch_asks_for_no_score():
  policy = _Policy()
  _evidence().consume([], policy)
  assert policy.calls == []


def test_refused_outcomes_change_nothing():
  evidence = _evidence()
  evidence.consume([_trajectory('t1', 1.0)], _Policy())
  before = evidence.counts(['t1', 't2'], 0)
  bad = [
    ([_trajectory('t2', 1.0), _trajectory('t1', -1.0)], "-1.0 of task 't1'"),
    ([_trajectory('t2', 1.0), _trajectory('t3', 1.0)], "task id 't3'"),
  ]
  for batch, words in bad:
    with pytest.raises(ValueError, match=words):
      evidence.consume(batch, _Policy())
  with pytest.raises(ValueError, match=r"drift nan .* task 't1'"):
    evidence.consume([_trajectory('t1', 1.0)], _Policy(np.nan))
  np.testing.assert_array_equal(evidence.counts(['t1', 't2'], 0), before)


def test_round_trip_is_exact_and_scores_the_same_responses():
  whole = _evidence()
  whole.consume(
    [_trajectory('t2', 1.0, 10), _trajectory('t1', 0.0, 20)], _Policy()
  )
  state = whole.state_dict()
  assert all(isinstance(array, np.ndarray) for array in state.values())
  resumed = _evidence(success=1.0)
  resumed.load_state_dict(state)
  for name, array in resumed.state_dict().items():
    np.testing.assert_array_equal(array, state[name])
    assert array.dtype == state[name].dtype

  asked = []
  for evidence in (whole, resumed):
    policy = _Policy(0.007)
    evidence.consume(
      [_trajectory('t1', 1.0, 30), _trajectory('t2', 0.5, 40)], policy
    )
    asked.append(policy.calls[0])
  for one, other in zip(*asked, strict=True):
    for field in dataclasses.fields(types.Trajectory):
      np.testing.assert_array_equal(
        getattr(one, field.name), getattr(other, field.name)
      )
  np.testing.assert_array_equal(
    whole.counts(['t1', 't2'], 0), resumed.counts(['t1', 't2'], 0)
  )


class _Drifting:
  """Log-probs that fall by 1 a call, so that any drift keeps the minimum."""

  def __init__(self):
    self.calls = []

  def __call__(self, trajectories):
    self.calls.append([t.task_id for t in trajectories])
    level = np.float32(-len(self.calls))
    return [np.full(len(t.tokens), level) for t in trajectories]


_NAMES = ('t1', 't2', 't3', 't4')


def _consume(evidence, policy, *visits):
  evidence.consume(
    [_trajectory(name, 1.0, length=n) for name, n in visits], policy
  )


def _retained(evidence, policy, name, length=4):
  """What the next visit of the prompt keeps of its evidence."""
  before = evidence.counts([name], 0)[1]
  _consume(evidence, policy, (name, length))
  return float((evidence.counts([name], 0)[1] / before)[0])


def test_the_longest_unvisited_responses_are_forgotten():
  evidence = _evidence(_NAMES, max_stored_tokens=12)
  policy = _Drifting()
  _consume(evidence, policy, ('t1', 4), ('t2', 4), ('t3', 4))
  assert (evidence.stored_tokens, evidence.forgotten_responses) == (12, 0)
  _consume(evidence, policy, ('t1', 4))
  _consume(evidence, policy, ('t4', 5))  # t2 and t3 go, t1 was visited
  assert (evidence.stored_tokens, evidence.forgotten_responses) == (9, 2)
  assert _retained(evidence, policy, 't1') == pytest.approx(0.875)
  assert _retained(evidence, policy, 't2', 3) == pytest.approx(0.96)
  assert policy.calls[-2:] == [['t1', 't1'], ['t2']]
  assert (evidence.stored_tokens, evidence.forgotten_responses) == (12, 2)
  assert _retained(evidence, policy, 't2', 3) == pytest.approx(0.875)


def test_a_value_after_a_forgotten_response_is_that_of_a_first_visit():
  evidence = _evidence(_NAMES, max_stored_tokens=4)
  policy = _Drifting()
  _consume(evidence, policy, ('t1', 4))
  _consume(evidence, policy, ('t2', 4))
  _consume(evidence, policy, ('t1', 4))
  success, failure = 0.96 * (0.96 * 4 + 1) + 1, 0.96 * 0.96 * 4
  np.testing.assert_allclose(
    evidence.values(['t1'], 0), success / (success + failure), rtol=1e-12
  )


def test_the_order_within_a_batch_is_that_of_the_last_visits():
  evidence = _evidence(_NAMES, max_stored_tokens=8)
  policy = _Drifting()
  _consume(evidence, policy, ('t1', 4), ('t2', 4), ('t1', 4))
  _consume(evidence, policy, ('t3', 4))
  assert _retained(evidence, policy, 't1') == pytest.approx(0.875)
  assert evidence.forgotten_responses == 1


def test_a_response_beyond_the_cap_is_not_kept_and_drives_none_out():
  evidence = _evidence(_NAMES, max_stored_tokens=8)
  policy = _Drifting()
  _consume(evidence, policy, ('t1', 8))
  _consume(evidence, policy, ('t2', 9))
  assert (evidence.stored_tokens, evidence.forgotten_responses) == (8, 1)
  assert _retained(evidence, policy, 't1', 8) == pytest.approx(0.875)
  assert _retained(evidence, policy, 't2', 9) == pytest.approx(0.96)
  # Its older response is no longer the last visit.
  _consume(evidence, policy, ('t1', 9))
  assert evidence.stored_tokens == 0
  assert _retained(evidence, policy, 't1') == pytest.approx(0.96)


def test_nothing_is_stored_under_a_cap_of_0():
  evidence = _evidence(_NAMES, max_stored_tokens=0)
  policy = _Drifting()
  for _ in range(3):
    assert _retained(evidence, policy, 't1') == pytest.approx(0.96)
  assert (evidence.stored_tokens, evidence.forgotten_responses) == (0, 3)


def test_the_cap_holds_and_a_resumed_run_forgets_the_same():
  rng = np.random.default_rng(0)
  whole, policy = _evidence(_NAMES, max_stored_tokens=20), _Drifting()
  resumed = _evidence(_NAMES, max_stored_tokens=20)
  for step in range(60):
    names = rng.choice(_NAMES, size=2)
    visits = [(str(name), int(rng.integers(1, 13))) for name in names]
    if step >= 30:
      if step == 30:
        assert whole.forgotten_responses > 5
        resumed.load_state_dict(whole.state_dict())
      same = _Drifting()
      same.calls = list(policy.calls)
      _consume(resumed, same, *visits)
    _consume(whole, policy, *visits)
    state = whole.state_dict()
    assert len(state['response_tokens']) == whole.stored_tokens <= 20
    if step >= 30:
      assert same.calls == policy.calls
      for name, array in resumed.state_dict().items():
        np.testing.assert_array_equal(array, state[name])


def test_a_state_beyond_a_lower_cap_loses_its_oldest_responses():
  whole, policy = _evidence(_NAMES), _Drifting()
  _consume(whole, policy, ('t3', 4), ('t1', 4), ('t2', 4))
  resumed = _evidence(_NAMES, max_stored_tokens=8)
  _consume(resumed, policy, ('t4', 8))  # of no account once a state is loaded
  resumed.load_state_dict(whole.state_dict())
  assert resumed.stored_tokens == 8
  np.testing.assert_array_equal(resumed.state_dict()['response_rows'], [0, 1])
  assert resumed.forgotten_responses == 1


def test_consumed_rows_are_news():
  evidence = _evidence(_NAMES)
  _, version = evidence.changed_since(-1)
  _consume(evidence, _Drifting(), ('t3', 4), ('t1', 4), ('t3', 4))
  np.testing.assert_array_equal(evidence.changed_since(version)[0], [0, 2])
  assert evidence.task_ids == _NAMES
  np.testing.assert_array_equal(
    evidence.read([2, 1]), evidence.values(['t3', 't2'], 0)
  )


def test_evidence_may_lie_in_files(tmp_path):
  in_files, in_memory = _evidence(directory=tmp_path), _evidence()
  for evidence in (in_files, in_memory):
    evidence.consume([_trajectory('t2', 1.0)], _Policy())
  np.testing.assert_array_equal(
    np.load(tmp_path / 'success.npy'), in_memory.counts(['t1', 't2'], 0)[0]
  )


def test_sampling_parameters_keep_their_types():
  whole, resumed = _evidence(), _evidence()
  whole.consume([_trajectory('t1', 1.0)], _Policy())
  resumed.load_state_dict(whole.state_dict())
  policy = _Policy()
  resumed.consume([_trajectory('t1', 1.0)], policy)
  sampling = policy.calls[0][0].sampling
  assert sampling == types.SamplingParams(temperature=0.7, top_k=3)
  assert type(sampling.top_k) is int


def test_an_empty_state_round_trips():
  resumed = _evidence(success=1.0)
  resumed.load_state_dict(_evidence().state_dict())
  np.testing.assert_array_equal(resumed.values(['t1'], 0), [0.5])


@pytest.mark.parametrize(
  'settings, words',
  [
    ({'drift_half_life': 0.0}, 'drift_half_life'),
    ({'retention_min': 0.97}, 'retention_min'),
    ({'retention_max': 1.2}, 'retention_max'),
    ({'drift_estimator': 'k2'}, 'drift_estimator'),
    ({'drift_mask': 'all'}, 'drift_mask'),
    ({'max_stored_tokens': -1}, 'max_stored_tokens'),
  ],
)
def test_settings_out_of_range_are_refused(settings, words):
  with pytest.raises(ValueError, match=words):
    _evidence(**settings)
