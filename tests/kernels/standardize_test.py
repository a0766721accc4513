import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import standardize


def _standardize(advantages, weights, usable=None, **kwargs):
  advantages = np.asarray(advantages, np.float32)
  if usable is None:
    usable = np.ones(len(advantages), bool)
  return standardize.standardize(
    advantages, np.asarray(weights, np.float32), np.asarray(usable), **kwargs
  )


def test_n01_trajectory_measure_is_eq_4(vectors):
  vector = vectors['N01_traj_whiten']
  got = _standardize(vector['inputs']['A'], np.ones(4))
  np.testing.assert_allclose(got, vector['expected']['adv'], rtol=2e-6)


def test_n02_action_token_measure_is_eq_6(vectors):
  vector = vectors['N02_token_whiten']
  got = _standardize(vector['inputs']['A'], vector['inputs']['L'])
  np.testing.assert_allclose(got, vector['expected']['adv'], rtol=2e-6)
  assert abs(np.dot(got, vector['inputs']['L'])) < 1e-5


def test_n04_epsilon_is_added_to_the_deviation(vectors):
  vector = vectors['N04_eps_placement']
  inputs = vector['inputs']
  got = _standardize(inputs['A'], inputs['L'])
  np.testing.assert_allclose(
    got, vector['expected']['sigma_plus_eps'], rtol=1e-5
  )


def test_n05_degenerate(vectors):
  vector = vectors['N05_degenerate']
  inputs, expected = vector['inputs'], vector['expected']
  got = _standardize(inputs['A'], inputs['L'])
  np.testing.assert_array_equal(got, expected['zero_var'])
  got = _standardize(inputs['A2'], inputs['L2'])
  np.testing.assert_allclose(got[:2], expected['with_L0_first_two'], rtol=1e-6)
  assert got[2] == 0


def test_adv06_variance_in_two_passes(cases):
  case = cases['ADV-06']
  got = _standardize(case['input']['rewards_float32'], np.ones(8))
  sample = np.array(case['expected']['grpo_population']) * np.sqrt(7 / 8)
  np.testing.assert_allclose(got, sample, rtol=1e-6)


def test_adv07_constant_advantages_give_exactly_zero(cases):
  case = cases['ADV-07']
  got = _standardize(case['input']['A_float32'], case['input']['L'])
  np.testing.assert_array_equal(got, case['expected']['A_tilde'])
  got = _standardize(case['input']['A_float32'], np.ones(7))
  np.testing.assert_array_equal(got, case['expected']['A_tilde'])


def test_adv09_total_weight_of_at_most_one_is_defined(cases):
  case = cases['ADV-09']
  got = _standardize(case['input']['A'], case['input']['L'])
  np.testing.assert_array_equal(got, case['expected']['A_tilde'])
  np.testing.assert_array_equal(_standardize([0.3], [5]), [0])
  np.testing.assert_array_equal(_standardize([0.3, 0.9], [0, 0]), [0, 0])
  nobody = _standardize([0.3, 0.9], [4, 2], [False, False])
  np.testing.assert_array_equal(nobody, [0, 0])


def test_adv10_mean_is_over_counted_tokens(cases):
  case = cases['ADV-10']
  got = _standardize(case['input']['A'], case['input']['L'])
  np.testing.assert_allclose(got, case['expected']['A_tilde'], rtol=1e-6)


def test_adv11_small_spread_survives_float32(cases):
  case = cases['ADV-11']
  got = _standardize(case['input']['A'], case['input']['L'])
  np.testing.assert_allclose(got, case['expected']['A_tilde'], atol=1e-2)


@pytest.mark.parametrize('garbage', [np.nan, np.inf, 1e30])
@pytest.mark.parametrize('weights', [[2, 1, 0, 5], [1, 1, 0, 1]])
def test_the_excluded_are_not_read(garbage, weights):
  # Slot 2 has weight 0, slot 3 is not usable: two ways of not counting.
  got = _standardize(
    [1, -1, garbage, garbage], weights, [True, True, True, False]
  )
  alone = _standardize([1, -1], weights[:2])
  np.testing.assert_array_equal(got, [*alone, 0, 0])


_BATCHES = st.lists(
  st.tuples(st.floats(-1, 1, width=32), st.integers(0, 9)),
  min_size=1,
  max_size=12,
)


_jitted = jax.jit(standardize.standardize)


def _padded(advantages, weights, size):
  """Standardizes in `size` slots, the later ones not usable."""
  count = len(advantages)
  pad = lambda x: np.pad(x, (0, size - count)).astype(np.float32)
  usable = np.arange(size) < count
  return np.asarray(_jitted(pad(advantages), pad(weights), usable))[:count]


@hypothesis.given(_BATCHES)
@hypothesis.settings(deadline=None)
def test_eq_6_is_eq_4_on_one_entry_a_token(batch):
  advantages, lengths = (np.array(x) for x in zip(*batch, strict=True))
  repeated = np.repeat(advantages, lengths)
  hypothesis.assume(len(repeated) > 1)
  spread = repeated.std()
  hypothesis.assume(spread == 0 or spread > 1e-3)
  by_length = _padded(advantages, lengths, 12)
  by_token = _padded(repeated, np.ones(len(repeated)), 108)
  np.testing.assert_allclose(
    np.repeat(by_length, lengths), by_token, rtol=1e-3, atol=1e-4
  )
  assert abs(np.dot(by_length, lengths)) <= 1e-3 * lengths.sum()


@hypothesis.given(
  value=st.floats(-1e3, 1e3, width=32),
  lengths=st.lists(st.integers(0, 4096), min_size=1, max_size=12),
)
@hypothesis.settings(deadline=None, max_examples=50)
def test_equal_advantages_are_exactly_zero(value, lengths):
  for weights in (lengths, np.sign(lengths)):
    got = _padded(np.full(len(lengths), value), weights, 12)
    np.testing.assert_array_equal(got, 0)


def test_order_shift_and_scale_do_not_matter():
  rng = np.random.default_rng(0)
  advantages, lengths = rng.uniform(-1, 1, 9), rng.integers(1, 30, 9)
  order = rng.permutation(9)
  got = np.asarray(_standardize(advantages, lengths))
  np.testing.assert_allclose(
    _standardize(advantages[order], lengths[order]), got[order], rtol=1e-5
  )
  np.testing.assert_allclose(
    _standardize(3 * advantages + 0.5, lengths), got, rtol=1e-4, atol=1e-5
  )


def test_parts_can_be_left_out():
  advantages, lengths = [1.0, -1.0], [2, 1]
  deviation = np.sqrt(4 / 3)  # mean 1/3, squares (2 * 4/9 + 16/9) / 2
  np.testing.assert_allclose(
    _standardize(advantages, lengths, scale=False), [2 / 3, -4 / 3], rtol=1e-6
  )
  np.testing.assert_allclose(
    _standardize(advantages, lengths, center=False),
    np.array(advantages) / deviation,
    rtol=1e-6,
  )
  np.testing.assert_array_equal(
    _standardize([0.3], [1], center=False, scale=False), np.float32([0.3])
  )


def test_statistics_run_over_the_mapped_axis():
  rng = np.random.default_rng(1)
  advantages = rng.uniform(-1, 1, 8).astype(np.float32)
  lengths = rng.integers(0, 30, 8).astype(np.float32)
  usable = np.arange(8) != 5
  whole = standardize.standardize(advantages, lengths, usable)
  spread = jax.vmap(
    lambda a, w, u: standardize.standardize(a, w, u, axis_name='data'),
    axis_name='data',
  )(*(x.reshape(4, 2) for x in (advantages, lengths, usable)))
  np.testing.assert_allclose(spread.reshape(-1), whole, rtol=1e-5, atol=1e-6)


def test_bfloat16_statistics_are_float32():
  rng = np.random.default_rng(2)
  advantages = jnp.asarray(rng.uniform(-1, 1, 64), jnp.bfloat16)
  lengths = jnp.asarray(rng.integers(1, 500, 64), jnp.float32)
  usable = jnp.ones(64, bool)
  got = jax.jit(standardize.standardize)(advantages, lengths, usable)
  exact = standardize.standardize(
    advantages.astype(jnp.float32), lengths, usable
  )
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, exact, rtol=1e-6)


def test_shapes_and_types_are_checked():
  with pytest.raises(AssertionError):
    _standardize([1.0, 2.0], [1.0])
  with pytest.raises(AssertionError):
    _standardize([1.0, 2.0], [1.0, 2.0], [1.0, 1.0])
