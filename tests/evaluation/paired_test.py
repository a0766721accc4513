import math

import numpy as np
import pytest

from spopp_jax.evaluation import curves, paired


def test_worked_by_hand():
  result = paired.paired_difference(
    {2: [4.0], 0: [1.0], 1: [2.0]},
    {0: [0.5], 1: [2.0], 2: [1.0]},
    curves.step_mean,
  )
  np.testing.assert_array_equal(result.differences, [0.5, 0, 3])
  assert result.mean == pytest.approx(3.5 / 3)
  # Squares of deviations -2/3, -7/6, 11/6 over n - 1 = 2.
  assert result.sample_sd == pytest.approx(math.sqrt((16 + 49 + 121) / 72))
  assert result.wins == 2


def test_both_curves_are_cut_to_the_common_length():
  long, short = [1.0, 1.0, 9.0], [1.0, 3.0]
  forward = paired.paired_difference({0: short}, {0: long}, curves.step_mean)
  assert forward.mean == 1.0
  backward = paired.paired_difference({0: long}, {0: short}, curves.step_mean)
  assert backward.mean == -1.0


def test_every_pair_is_cut_by_itself():
  result = paired.paired_difference(
    {0: [1.0, 1.0], 1: [0.0, 0.0, 9.0]},
    {0: [0.0, 0.0, 9.0], 1: [0.0, 0.0, 0.0]},
    curves.step_mean,
  )
  np.testing.assert_array_equal(result.differences, [1, 3])


def test_one_replicate_has_no_deviation():
  result = paired.paired_difference({3: [1.0]}, {3: [0.0]}, curves.area)
  assert result.mean == 1.0
  assert math.isnan(result.sample_sd)


def test_a_common_offset_does_not_matter():
  rng = np.random.default_rng(0)
  first = {seed: rng.uniform(size=8) for seed in range(4)}
  second = {seed: rng.uniform(size=8) for seed in range(4)}
  plain = paired.paired_difference(first, second, curves.area)
  shifted = paired.paired_difference(
    {seed: run + seed for seed, run in first.items()},
    {seed: run + seed for seed, run in second.items()},
    curves.area,
  )
  np.testing.assert_allclose(plain.differences, shifted.differences)


def test_unmatched_replicates_are_refused():
  with pytest.raises(ValueError, match=r'\[1, 2\]'):
    paired.paired_difference(
      {0: [1.0], 1: [1.0]}, {0: [1.0], 2: [1.0]}, curves.area
    )
  with pytest.raises(ValueError, match='no replicates'):
    paired.paired_difference({}, {}, curves.area)
