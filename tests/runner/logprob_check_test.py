import math

import numpy as np
import pytest
import scripted_sampler

from spopp_jax.runner import logprob_check


def trajectory(logprobs, actions=None):
  """One prompt token, then actions with these log-probs."""
  mask = [False] + (actions or [True] * len(logprobs))
  return scripted_sampler.trajectory(
    tokens=range(len(mask)), actions=mask, logprobs=[0.0, *logprobs]
  )


def theirs(count=40, seed=0):
  return -np.random.default_rng(seed).uniform(0.1, 6.0, count)


def test_gap_by_hand():
  pair = [trajectory([-1.0, -2.0]), trajectory([-3.0, 9.0], [True, False])]
  ours = [np.array([7.0, -1.5, -2.0]), np.array([7.0, -2.0, 7.0])]
  found = logprob_check.gap(pair, ours)
  # Action tokens only: sampler (-1, -2, -3), learner (-1.5, -2, -2).
  assert found.mean_abs == pytest.approx((0.5 + 0 + 1) / 3, rel=1e-12)
  k3 = (math.exp(-0.5) - 1 + 0.5) + 0 + (math.exp(1) - 1 - 1)
  assert found.k3 == pytest.approx(k3 / 3, rel=1e-12)
  # Moved to the front (-2, -3, -1), and to the back (-3, -1, -2).
  assert found.shifted == pytest.approx(
    ((0.5 + 1 + 1) / 3, (1.5 + 1 + 0) / 3), rel=1e-12
  )


def check(ours, values=None):
  values = theirs() if values is None else values
  return logprob_check.check([trajectory(values)], lambda _: [ours])


def aligned(values):
  return np.concatenate([[0.0], values])


def test_equal_values_pass():
  assert check(aligned(theirs())).mean_abs < 1e-6


def test_the_limit_is_a_mean():
  values = aligned(theirs())
  values[3] += 0.3  # 0.0075 a token
  check(values)
  values[3] += 0.2  # 0.0125 a token
  with pytest.raises(logprob_check.LogprobMismatch, match=r'0\.0125 nats'):
    check(values)


@pytest.mark.parametrize('by', [-1, 1])
def test_values_of_the_neighbour_are_called_shifted(by):
  with pytest.raises(logprob_check.LogprobMismatch, match='shifted by one'):
    check(aligned(np.roll(theirs(), by)))


def test_a_wrong_temperature_is_not_called_shifted():
  with pytest.raises(logprob_check.LogprobMismatch, match='temperature'):
    check(aligned(theirs() / 2))


@pytest.mark.parametrize('value', [math.nan, -math.inf])
def test_values_that_are_no_numbers_are_refused(value):
  values = aligned(theirs())
  values[5] = value
  with pytest.raises(logprob_check.LogprobMismatch):
    check(values)


def test_async13_the_alarm_sounds_at_a_jump(cases):
  case = cases['ASYNC-13']
  gaps = case['input']['mean_abs_logprob_gap_per_step']
  alarm = logprob_check.GapAlarm()
  reasons = [alarm.check(value, 1.0) for value in gaps]
  first = next(i for i, reason in enumerate(reasons, start=1) if reason)
  assert first == case['expected']['first_alarm_step']
  assert '0.201 nats a token, usual at this lag is 0.014' in reasons[first - 1]
  # It goes on where a checkpoint was.
  resumed = logprob_check.GapAlarm(gaps[:2])
  assert [resumed.check(value, 1.0) for value in gaps[2:]] == reasons[2:]


def test_a_slow_rise_and_small_gaps_are_no_alarm():
  alarm = logprob_check.GapAlarm()
  for gap in (1e-6, 0.049, 0.01, 0.02, 0.04, 0.05, 0.1):
    assert not alarm.check(gap, 1.0)
  # Of the first two steps with a lag, and those without, nothing is said.
  fresh = logprob_check.GapAlarm()
  for gap, lag in ((9.0, 0.0), (1e-7, 0.0), (0.03, 1.0), (0.07, 1.0)):
    assert not fresh.check(gap, lag)
  assert list(fresh.earlier) == [0.03, 0.07]
  assert logprob_check.GapAlarm([0.001, 0.001]).check(0.051, 1.0)


def test_a_gap_is_held_against_the_lag_of_its_batch():
  alarm = logprob_check.GapAlarm([0.03, 0.03])
  assert not alarm.check(0.18, 3.0)
  assert alarm.check(0.18, 1.0)
