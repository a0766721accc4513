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


def _trajectory(task_id, reward, first_token=0, **kwargs):
  return types.Trajectory(
    request_id=f'{task_id}-{first_token}',
    task_id=task_id,
    status=types.Status.OK,
    reward=reward,
    policy_version=0,
    weights_checksum='',
    tokens=np.arange(4, dtype=np.int32) + first_token,
    action_mask=_ACTIONS,
    behaviour_logprobs=np.zeros(4, np.float32),
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
  ],
)
def test_settings_out_of_range_are_refused(settings, words):
  with pytest.raises(ValueError, match=words):
    _evidence(**settings)
