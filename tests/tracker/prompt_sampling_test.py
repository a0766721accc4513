import collections

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


def _enumerated(weights, slots, count):
  """Probability of every sequence of draws, one draw after another."""
  if not count:
    return {(): 1.0}
  pool = [w if slots[i] > 0 else 0.0 for i, w in enumerate(weights)]
  found = {}
  for row, weight in enumerate(pool):
    if weight:
      left = [n - (i == row) for i, n in enumerate(slots)]
      for rest, chance in _enumerated(weights, left, count - 1).items():
        found[row, *rest] = weight / sum(pool) * chance
  return found


# 0 weights cannot be drawn; 5 and 6 leaves lie on two levels of the tree.
@pytest.mark.parametrize(
  'weights, slots, count',
  [
    ([0.05, 0.55, 0.3, 0.1, 0.2], [1, 1, 1, 1, 1], 2),
    ([0.05, 5.0, 0.3, 0.1], [1, 1, 1, 1], 4),
    ([1.0, 2.0, 0.0, 3.0, 1.0, 4.0], [1, 0, 1, 1, 1, 1], 3),
    ([1.0, 6.0, 3.0], [2, 1, 1], 3),
  ],
)
def test_draws_are_sequential_in_proportion_to_the_weights_left(
  weights, slots, count
):
  sampler = prompt_sampling.PromptSampler(weights)
  rng = np.random.default_rng(0)
  number = 20_000
  drawn = collections.Counter(
    tuple(sampler.sample(count, rng=rng, slots=slots.__getitem__).tolist())
    for _ in range(number)
  )
  expected = _enumerated(weights, slots, count)
  assert set(drawn) <= set(expected)
  assert sum(expected.values()) == pytest.approx(1)
  # Rare sequences share one cell, so that chi-square holds for all of them.
  rare = [key for key, p in expected.items() if p * number < 10]
  cells = [[key] for key in expected if key not in rare] + [rare] * bool(rare)
  seen = np.array([sum(drawn[key] for key in cell) for cell in cells])
  mean = number * np.array([sum(expected[k] for k in cell) for cell in cells])
  freedom = len(cells) - 1
  chi_square = ((seen - mean) ** 2 / mean).sum()
  # Mean and variance of chi-square are the degrees and twice the degrees.
  assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_t05_first_and_second_draw(vectors):
  vector = vectors['T05_sampler']
  sampler = prompt_sampling.PromptSampler(
    prompt_sampling.prompt_weights(vector['inputs']['v'])
  )
  rng = np.random.default_rng(0)
  drawn = [sampler.sample(2, rng=rng) for _ in range(20_000)]
  first, second = np.transpose(drawn)
  assert (first != second).all()
  chances = np.array(vector['expected']['prob'])
  share = np.bincount(first, minlength=5) / len(drawn)
  np.testing.assert_allclose(share, chances, atol=0.015)
  # P(second = j) = sum over i != j of p_i p_j / (1 - p_i).
  follow = chances * ((chances / (1 - chances)).sum() - chances / (1 - chances))
  share = np.bincount(second, minlength=5) / len(drawn)
  np.testing.assert_allclose(share, follow, atol=0.015)


@pytest.mark.parametrize('size', [1, 2, 3, 7, 8, 9, 100])
def test_a_changed_tree_is_the_tree_of_the_changed_weights(size):
  rng = np.random.default_rng(size)
  weights = rng.random(size)
  sampler = prompt_sampling.PromptSampler(weights)
  for _ in range(20):
    rows = rng.permutation(size)[: rng.integers(size + 1)]
    # Sums that added differences would keep the rounding of 1e20.
    weights[rows] = rng.random(len(rows)) * 10.0 ** rng.integers(-20, 21)
    sampler.update(rows, weights[rows])
    np.testing.assert_array_equal(sampler.weights, weights)
    fresh = prompt_sampling.PromptSampler(weights)
    one, other = np.random.default_rng(5), np.random.default_rng(5)
    count = min(size, 3)
    np.testing.assert_array_equal(
      sampler.sample(count, rng=one), fresh.sample(count, rng=other)
    )
    assert one.random() == other.random()


def test_updates_move_the_chances():
  sampler = prompt_sampling.PromptSampler(np.ones(9))
  sampler.update(np.array([8, 0, 3]), np.array([1000.0, 0.0, 500.0]))
  rng = np.random.default_rng(0)
  drawn = [int(sampler.sample(1, rng=rng)[0]) for _ in range(3000)]
  assert drawn.count(0) == 0
  assert 1890 < drawn.count(8) < 2085  # 2/3 of the draws less 6 of 1506
  assert 895 < drawn.count(3) < 1095


def test_drawing_leaves_the_weights_alone():
  weights = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
  sampler = prompt_sampling.PromptSampler(weights)
  rng = np.random.default_rng(0)
  assert sorted(sampler.sample(5, rng=rng)) == [0, 1, 2, 3, 4]
  np.testing.assert_array_equal(sampler.weights, weights)
  assert sorted(sampler.sample(5, rng=rng)) == [0, 1, 2, 3, 4]


def test_rows_without_a_slot_are_never_drawn():
  sampler = prompt_sampling.PromptSampler(np.full(5, 0.5))
  slots = [1, 0, 1, -2, 1].__getitem__
  rng = np.random.default_rng(0)
  for _ in range(50):
    assert sorted(sampler.sample(3, rng=rng, slots=slots)) == [0, 2, 4]


def test_a_row_is_drawn_as_often_as_it_has_slots():
  sampler = prompt_sampling.PromptSampler([1.0, 1e-6, 1.0])
  slots = [3, 2, 1].__getitem__
  drawn = sampler.sample(6, rng=np.random.default_rng(0), slots=slots)
  assert sorted(drawn) == [0, 0, 0, 1, 1, 2]


def test_only_drawn_rows_are_asked_for_slots():
  asked = []
  sampler = prompt_sampling.PromptSampler(np.ones(10_000))
  sampler.sample(
    20,
    rng=np.random.default_rng(0),
    slots=lambda row: asked.append(row) or 1,
  )
  assert 20 <= len(asked) == len(set(asked)) < 40


def test_the_last_of_many_is_found_though_its_weight_is_tiny():
  weights = np.full(1000, 1e6)
  weights[123] = 1e-12
  sampler = prompt_sampling.PromptSampler(weights)
  drawn = sampler.sample(1000, rng=np.random.default_rng(0))
  assert sorted(drawn) == list(range(1000))
  assert drawn[-1] == 123


class _Highest:
  """A generator whose every number is the last one below 1."""

  def __init__(self):
    self.bit_generator = self

  def random_raw(self, size):
    return np.full(size, 2**64 - 1, np.uint64)


def test_the_last_number_below_1_is_drawn():
  assert prompt_sampling._uniforms(_Highest(), 2).tolist() == [1 - 2.0**-53] * 2


@pytest.mark.parametrize('size', [3, 5, 64, 99])
def test_rounding_does_not_lead_to_a_row_without_weight(size):
  rng = np.random.default_rng(0)
  for _ in range(50):
    weights = rng.random(size) * (rng.random(size) < 0.3)
    weights[rng.integers(size)] = 0.1
    sampler = prompt_sampling.PromptSampler(weights)
    assert weights[sampler.sample(1, rng=_Highest())[0]] > 0


def test_the_generator_decides_and_moves_on():
  sampler = prompt_sampling.PromptSampler(np.linspace(0.1, 1, 50))
  draw = lambda rng: sampler.sample(10, rng=rng)
  one, other = np.random.default_rng(3), np.random.default_rng(3)
  np.testing.assert_array_equal(draw(one), draw(other))
  assert not np.array_equal(draw(one), draw(np.random.default_rng(3)))


def test_asking_for_too_many_names_both_numbers():
  sampler = prompt_sampling.PromptSampler([1.0, 0.0, 1.0, 1.0])
  rng = np.random.default_rng(0)
  with pytest.raises(ValueError, match='3 draws asked for, 2 are available'):
    sampler.sample(3, rng=rng, slots=[1, 1, 1, 0].__getitem__)
  np.testing.assert_array_equal(sampler.weights, [1, 0, 1, 1])
  assert sampler.sample(0, rng=rng).shape == (0,)


@pytest.mark.parametrize('weight', [-1.0, np.nan, np.inf])
def test_unsound_weights_are_refused(weight):
  with pytest.raises(ValueError, match=f'weight {weight} must be finite'):
    prompt_sampling.PromptSampler([1.0, weight])
  sampler = prompt_sampling.PromptSampler([1.0, 2.0])
  with pytest.raises(ValueError, match=f'weight {weight} must be finite'):
    sampler.update(np.array([0, 1]), [3.0, weight])
  np.testing.assert_array_equal(sampler.weights, [1, 2])
  with pytest.raises(ValueError, match=r'shape \(0,\)'):
    prompt_sampling.PromptSampler([])


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


def test_uniform_numbers_are_those_of_the_generator():
  ours, theirs = (np.random.default_rng(7) for _ in range(2))
  for count in (1, 0, 500, 3):
    got = prompt_sampling._uniforms(ours, count)
    assert got.tolist() == theirs.random(count).tolist()
  assert ours.bit_generator.state == theirs.bit_generator.state
