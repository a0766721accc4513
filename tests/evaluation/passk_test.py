import itertools
import json
import pathlib

import pytest

from spopp_jax.evaluation import passk

GOLDEN = json.loads(
  (pathlib.Path(__file__).parents[1] / 'golden' / 'evaluation.json').read_text()
)['pass_at_k']


@pytest.mark.parametrize('case', GOLDEN)
def test_golden(case):
  value = passk.pass_at_k(case['num_samples'], case['num_correct'], case['k'])
  assert value == pytest.approx(case['unbiased'], rel=1e-14)


@pytest.mark.parametrize('num_correct', range(6))
@pytest.mark.parametrize('k', range(1, 6))
def test_equals_the_share_of_all_subsets(num_correct, k):
  outcomes = [True] * num_correct + [False] * (5 - num_correct)
  subsets = list(itertools.combinations(outcomes, k))
  expected = sum(map(any, subsets)) / len(subsets)
  assert passk.pass_at_k(5, num_correct, k) == pytest.approx(expected)


@pytest.mark.parametrize(
  'arguments, words',
  [
    ((4, 5, 1), r'num_correct \(5\)'),
    ((4, -1, 1), r'num_correct \(-1\)'),
    ((4, 1, 0), r'k \(0\)'),
    ((4, 1, 5), r'k \(5\)'),
  ],
)
def test_out_of_range_is_refused(arguments, words):
  with pytest.raises(ValueError, match=words):
    passk.pass_at_k(*arguments)
