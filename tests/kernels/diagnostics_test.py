import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import diagnostics, standardize


def _statistics(weights):
  log_weights = np.log(np.asarray(weights, np.float32))
  return diagnostics.weight_statistics(
    log_weights, np.ones(log_weights.shape, bool)
  )


def test_n03_residual_of_trajectory_whitening_is_eq_5(vectors):
  vector = vectors['N03_measure_residual']
  lengths = np.array(vector['inputs']['L'], np.float32)
  whitened = standardize.standardize(
    np.array(vector['inputs']['A'], np.float32),
    np.ones(4, np.float32),
    np.ones(4, bool),
  )
  np.testing.assert_allclose(
    diagnostics.weighted_mean(whitened, lengths),
    vector['expected']['token_mean_of_traj_whitened'],
    rtol=1e-5,
  )
  np.testing.assert_allclose(
    diagnostics.length_coupling(whitened, lengths).residual,
    vector['expected']['cov_n_over_Lbar'],
    rtol=1e-5,
  )


_MEASURES = jax.jit(
  lambda advantages, lengths: [
    standardize.standardize(advantages, measure, np.ones(8, bool))
    for measure in (jnp.sign(lengths), lengths)
  ]
)


@hypothesis.given(
  st.lists(
    st.tuples(st.floats(-1, 1, width=32), st.integers(1, 500)),
    min_size=8,
    max_size=8,
  )
)
@hypothesis.settings(deadline=None, max_examples=40)
def test_eq_5_is_exact_and_eq_6_leaves_no_residual(batch):
  advantages, lengths = (np.float32(x) for x in zip(*batch, strict=True))
  hypothesis.assume(advantages.std() > 1e-2)
  by_trajectory, by_token = (
    np.float64(x) for x in _MEASURES(advantages, lengths)
  )
  token_mean = lambda x: (lengths * x).sum() / np.float64(lengths.sum())
  covariance = np.cov(lengths, by_trajectory, ddof=0)[0, 1]
  np.testing.assert_allclose(
    token_mean(by_trajectory), covariance / lengths.mean(), atol=1e-4
  )
  np.testing.assert_allclose(
    diagnostics.length_coupling(by_trajectory, lengths).residual,
    covariance / lengths.mean(),
    atol=1e-4,
  )
  assert abs(token_mean(by_token)) < 1e-4


def test_w01_effective_sample_size(vectors):
  expected = vectors['W01_ess']['expected']
  np.testing.assert_allclose(
    8 * _statistics(np.ones(8)).ess_fraction, expected['equal8'], rtol=1e-6
  )
  np.testing.assert_allclose(
    4 * _statistics([1, 2, 3, 4]).ess_fraction, expected['w1234'], rtol=1e-6
  )
  shifted = diagnostics.weight_statistics(
    np.log(np.float32([1, 2, 3, 4])) + np.float32(1000), np.ones(4, bool)
  )
  np.testing.assert_allclose(
    4 * shifted.ess_fraction, expected['shifted'], rtol=1e-3
  )
  assert all(np.isfinite(value) for value in shifted)


def test_statistics_by_hand():
  got = _statistics([1, 3])
  np.testing.assert_allclose(got, (2, 3, 16 / 20, 4), rtol=1e-6)


def test_statistics_are_of_raw_weights():
  got = _statistics([1, 1, 1, 50])  # truncation at 2 would hide the 50
  np.testing.assert_allclose(got.max, 50, rtol=1e-5)
  np.testing.assert_allclose(got.ess_fraction, 53**2 / (4 * 2503), rtol=1e-5)


def test_rejected_weights_count_as_zero():
  with np.errstate(divide='ignore'):
    got = _statistics([1, 3, 0, 0])
    none = _statistics([0, 0])
  np.testing.assert_allclose(got, (1, 3, 16 / 40, 1.5), rtol=1e-6)
  np.testing.assert_array_equal(none, (0, 0, 0, -1))


def test_masked_weights_are_not_read():
  for garbage in (np.nan, np.inf, 1e30):
    got = diagnostics.weight_statistics(
      np.log(np.float32([[1, 3, 1]])) + np.float32([[0, 0, garbage]]),
      np.array([[True, True, False]]),
    )
    np.testing.assert_allclose(got, (2, 3, 16 / 20, 4), rtol=1e-6)


def test_nothing_counted_gives_zeros():
  got = diagnostics.weight_statistics(
    np.zeros(3, np.float32), np.zeros(3, bool)
  )
  assert got == (0, 0, 0, 0)
  zeros = jnp.zeros(3)
  assert diagnostics.weighted_mean(jnp.full(3, jnp.nan), zeros) == 0
  assert diagnostics.length_coupling(jnp.full(3, jnp.nan), zeros) == (0, 0, 0)


def test_length_coupling_by_hand_and_against_numpy():
  got = diagnostics.length_coupling(
    np.float32([1, -1, np.nan]), np.float32([3, 1, 0])
  )
  np.testing.assert_allclose(got, (1, 0.5, 1), rtol=1e-6)
  rng = np.random.default_rng(0)
  lengths = rng.integers(1, 50, 20).astype(np.float32)
  advantages = rng.normal(size=20).astype(np.float32)
  got = diagnostics.length_coupling(advantages, lengths)
  np.testing.assert_allclose(
    got.correlation, np.corrcoef(lengths, advantages)[0, 1], rtol=1e-4
  )
  np.testing.assert_allclose(
    got.residual,
    np.cov(lengths, advantages, ddof=0)[0, 1] / lengths.mean(),
    rtol=1e-4,
  )


def test_constant_lengths_have_no_coupling():
  got = diagnostics.length_coupling(
    np.float32([1, -1, 0.5]), np.float32([7, 7, 7])
  )
  np.testing.assert_allclose(got, (0, 0, 0), atol=1e-6)


def test_agg07_observations_do_not_count(cases):
  case = cases['AGG-07']
  mean = diagnostics.weighted_mean(
    np.float32(case['input']['token_kl']),
    np.float32(case['input']['action_mask']),
  )
  np.testing.assert_allclose(mean, case['expected']['mean_kl'], rtol=1e-6)


@pytest.mark.parametrize('devices', [2, 4])
def test_statistics_run_over_the_mapped_axis(devices):
  rng = np.random.default_rng(1)
  values = rng.normal(size=8).astype(np.float32)
  lengths = rng.integers(0, 9, 8).astype(np.float32)

  def everything(values, lengths, axis_name=None):
    return (
      diagnostics.weight_statistics(values, lengths > 0, axis_name=axis_name),
      diagnostics.weighted_mean(values, lengths, axis_name=axis_name),
      diagnostics.length_coupling(values, lengths, axis_name=axis_name),
    )

  whole = jax.tree.leaves(everything(values, lengths))
  spread = jax.vmap(
    lambda v, w: everything(v, w, axis_name='data'), axis_name='data'
  )(values.reshape(devices, -1), lengths.reshape(devices, -1))
  for got, want in zip(jax.tree.leaves(spread), whole, strict=True):
    np.testing.assert_allclose(
      got, np.full(devices, want), rtol=1e-4, atol=1e-6
    )
