import numpy as np
import pytest

from spopp_jax.tracker import prompt_sampling


def test_t05_weights(vectors):
  vector = vectors['T05_sampler']
  weights = prompt_sampling.prompt_weights(vector['inputs']['v'])
  expected = vector['expected']
  np.testing.assert_allclose(weights, expected['weight'], rtol=1e-12)
  np.testing.assert_allclose(
    weights / weights.sum(), expected['prob'], rtol=1e-12
  )


def test_t06_gamma(vectors):
  vector = vectors['T06_sampler_gamma']
  inputs = vector['inputs']
  weights = prompt_sampling.prompt_weights(
    inputs['v'], floor=inputs['eps'], mass=inputs['N'], gamma=inputs['gamma']
  )
  np.testing.assert_allclose(weights, vector['expected']['weight'], rtol=1e-12)


def test_draws_follow_the_weights(vectors):
  vector = vectors['T05_sampler']
  rng = np.random.default_rng(0)
  drawn = [
    prompt_sampling.sample_prompts(
      vector['inputs']['v'], np.ones(5, bool), 2, rng=rng
    )
    for _ in range(20_000)
  ]
  first, second = np.transpose(drawn)
  assert (first != second).all()
  chances = np.array(vector['expected']['prob'])
  share = np.bincount(first, minlength=5) / len(drawn)
  np.testing.assert_allclose(share, chances, atol=0.015)
  # P(second = j) = sum over i != j of p_i p_j / (1 - p_i).
  follow = chances * ((chances / (1 - chances)).sum() - chances / (1 - chances))
  share = np.bincount(second, minlength=5) / len(drawn)
  np.testing.assert_allclose(share, follow, atol=0.015)


def test_prompts_in_flight_are_never_drawn():
  available = np.array([1, 0, 1, 0, 1], bool)
  rng = np.random.default_rng(0)
  drawn = prompt_sampling.sample_prompts(np.full(5, 0.5), available, 3, rng=rng)
  assert sorted(drawn) == [0, 2, 4]


def test_the_generator_decides_and_moves_on():
  draw = lambda rng: prompt_sampling.sample_prompts(
    np.linspace(0, 1, 50), np.ones(50, bool), 10, rng=rng
  )
  one, other = np.random.default_rng(3), np.random.default_rng(3)
  np.testing.assert_array_equal(draw(one), draw(other))
  assert not np.array_equal(draw(one), draw(np.random.default_rng(3)))


def test_asking_for_too_many_names_both_numbers():
  available = np.array([1, 0, 1], bool)
  rng = np.random.default_rng(0)
  with pytest.raises(ValueError, match=r'3 prompts asked for, 2 are available'):
    prompt_sampling.sample_prompts(np.full(3, 0.5), available, 3, rng=rng)
  nobody = np.zeros(3, bool)
  drawn = prompt_sampling.sample_prompts(np.full(3, 0.5), nobody, 0, rng=rng)
  assert drawn.shape == (0,)


@pytest.mark.parametrize(
  'kwargs, words',
  [
    ({'values': [0.5, 1.1]}, r'value 1.1 of prompt 1'),
    ({'values': [np.nan]}, r'value nan of prompt 0'),
    ({'values': [0.5], 'floor': 0.0}, 'floor'),
    ({'values': [0.5], 'gamma': -1.0}, 'gamma'),
    ({'values': [0.5], 'gamma': 1.0}, 'mass'),
    ({'values': [0.5], 'gamma': 1.0, 'mass': [0.0]}, 'mass'),
  ],
)
def test_arguments_out_of_range_are_refused(kwargs, words):
  with pytest.raises(ValueError, match=words):
    prompt_sampling.prompt_weights(**kwargs)
