import json
import pathlib

import numpy as np
import pytest

from spopp_jax.evaluation import curves

GOLDEN = json.loads(
  (pathlib.Path(__file__).parents[1] / 'golden' / 'evaluation.json').read_text()
)['curve']
ALL = [
  curves.area,
  curves.step_mean,
  curves.final_five,
  curves.learning_composite,
  curves.trailing_mean,
]


@pytest.mark.parametrize(
  'name', ['area', 'step_mean', 'final_five', 'learning_composite']
)
def test_golden(name):
  value = getattr(curves, name)(GOLDEN['rewards'])
  assert value == pytest.approx(GOLDEN[name], rel=1e-14)


def test_worked_by_hand():
  assert curves.area([0, 1, 1]) == 0.75
  assert curves.area([0.25]) == 0.25
  assert curves.area(GOLDEN['rewards'][:1]) == GOLDEN['area_of_first']
  assert curves.final_five([9, 1, 2, 3, 4, 5]) == 3
  np.testing.assert_array_equal(curves.trailing_mean([1, 2, 6], 2), [1, 1.5, 4])


def test_area_is_the_mean_without_half_of_each_end():
  rewards = np.random.default_rng(0).uniform(size=17)
  expected = (17 * rewards.mean() - (rewards[0] + rewards[-1]) / 2) / 16
  assert curves.area(rewards) == pytest.approx(expected, rel=1e-14)


def test_composite_reads_the_first_ten_steps_only():
  rewards = np.random.default_rng(0).uniform(size=12)
  composite = curves.learning_composite(rewards)
  assert composite == curves.learning_composite(rewards[:10])
  expected = (curves.area(rewards[:10]) + rewards[5:10].mean()) / 2
  assert composite == pytest.approx(expected, rel=1e-14)


def test_trailing_mean_of_a_long_curve():
  rewards = np.random.default_rng(0).uniform(size=9)
  smooth = curves.trailing_mean(rewards)
  assert smooth.shape == (9,)
  assert smooth[2] == pytest.approx(rewards[:3].mean())
  assert smooth[8] == pytest.approx(rewards[4:9].mean())
  np.testing.assert_array_equal(curves.trailing_mean(rewards, 1), rewards)


@pytest.mark.parametrize('statistic', ALL)
@pytest.mark.parametrize(
  'rewards, words',
  [
    ([], '0 steps'),
    ([[0.5] * 10], 'shape'),
    ([0.5] * 3 + [float('nan')] + [0.5] * 8, r'rewards\[3\] \(nan\)'),
  ],
)
def test_what_is_no_curve_is_refused(statistic, rewards, words):
  with pytest.raises(ValueError, match=words):
    statistic(rewards)


def test_too_short_a_curve_is_refused():
  with pytest.raises(ValueError, match='4 steps, needs 5'):
    curves.final_five([0.5] * 4)
  with pytest.raises(ValueError, match='9 steps, needs 10'):
    curves.learning_composite([0.5] * 9)
  with pytest.raises(ValueError, match=r'window \(0\)'):
    curves.trailing_mean([0.5], 0)
