import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import target_ess

_KAPPA = 0.85


def _arrays(log_ratios, valid=None):
  log_ratios = np.asarray(log_ratios, np.float32)
  if valid is None:
    valid = np.ones(log_ratios.shape)
  return log_ratios, np.asarray(valid, bool)


def _exponent(log_ratios, valid=None, kappa=_KAPPA, **kwargs):
  return target_ess.tempering_exponent(
    *_arrays(log_ratios, valid), target_ess_fraction=kappa, **kwargs
  )


def _weights(log_ratios, exponent, valid=None, **kwargs):
  return target_ess.tempered_weights(
    *_arrays(log_ratios, valid), exponent, **kwargs
  )


def _ess(log_ratios, exponent, valid=None):
  return np.exp(target_ess.log_ess(*_arrays(log_ratios, valid), exponent))


def _reference_ess(log_ratios, exponent):
  """ESS in float64 from the weights themselves."""
  tempered = exponent * np.asarray(log_ratios, np.float64)
  weights = np.exp(tempered - tempered.max())
  return weights.sum() ** 2 / (weights**2).sum()


@pytest.mark.parametrize(
  ('name', 'log_ratios'),
  [
    ('equal8', np.zeros(8)),
    ('near_onehot', [0, -800, -900]),
    ('w1234', np.log([1, 2, 3, 4])),
  ],
)
def test_w01_ess(vectors, name, log_ratios):
  expected = vectors['W01_ess']['expected']
  np.testing.assert_allclose(_ess(log_ratios, 1.0), expected[name], rtol=1e-6)


def test_w01_ess_does_not_know_the_normalisation(vectors):
  log_ratios = np.log([1, 2, 3, 4]) + 1000
  expected = vectors['W01_ess']['expected']['shifted']
  np.testing.assert_allclose(_ess(log_ratios, 1.0), expected, rtol=1e-4)


def test_w02_ess_curve(vectors):
  vector = vectors['W02_ess_curve']
  got = [
    _ess(vector['inputs']['l'], float(exponent))
    for exponent in vector['inputs']['alpha']
  ]
  np.testing.assert_allclose(got, vector['expected']['ess'], rtol=2e-6)


def test_w03_feasible_end(vectors):
  vector = vectors['W03_tetpo_alpha']
  inputs, expected = vector['inputs'], vector['expected']
  exponent = _exponent(inputs['l'])
  np.testing.assert_allclose(exponent, expected['alpha'], atol=5e-7)
  got = _weights(inputs['l'], exponent)
  np.testing.assert_allclose(got, expected['w_mean_one'], rtol=1e-5)
  dispersion = np.mean((np.asarray(got) - 1) ** 2)
  np.testing.assert_allclose(dispersion, expected['dispersion'], rtol=1e-5)
  got = _weights(inputs['l'], exponent, scale='sum_one')
  np.testing.assert_allclose(got, expected['w_norm'], rtol=1e-5)


@pytest.mark.parametrize('iterations', [1, 2, 3, 6, 10])
def test_coarse_bisection_returns_the_feasible_end(vectors, iterations):
  vector = vectors['W03_tetpo_alpha']
  got = float(_exponent(vector['inputs']['l'], iterations=iterations))
  exact = vector['expected']['alpha_exact']
  # The feasible end is the grid point of the last halving below the root.
  assert got == math.floor(exact * 2**iterations) / 2**iterations


def test_w05_closed_form_of_two_members(vectors):
  vector = vectors['W05_tetpo_G2_closed_form']
  distance = vector['inputs']['d']
  got = _exponent([0, distance], kappa=vector['inputs']['kappa'])
  np.testing.assert_allclose(got, vector['expected']['alpha'], rtol=2e-6)
  for kappa in (0.6, 0.7, 0.95):
    share = 2 * kappa - 1
    want = -math.log((1 - math.sqrt(1 - share**2)) / share) / 8
    np.testing.assert_allclose(_exponent([3, -5], kappa=kappa), want, rtol=1e-5)


def test_w07_non_finite_ratios_are_left_out(vectors):
  vector = vectors['W07_tetpo_nonfinite']
  log_ratios = [float(x) for x in vector['inputs']['l']]
  expected = vector['expected']
  exponent = _exponent(log_ratios)
  np.testing.assert_allclose(exponent, expected['alpha'], atol=1e-6)
  got = _weights(log_ratios, exponent, scale='sum_one')
  np.testing.assert_allclose(got, expected['w'], rtol=2e-6)
  np.testing.assert_allclose(np.sum(_weights(log_ratios, exponent)), 4)
  members = target_ess.finite_members(*_arrays(log_ratios))
  assert np.sum(members) == expected['n_valid']


def test_w09_sums_of_log_ratios(vectors):
  vector = vectors['W09_tetpo_surrogates']
  expected = vector['expected']
  exponent = _exponent(expected['l'])
  np.testing.assert_allclose(exponent, expected['alpha'], atol=2e-6)
  got = _weights(expected['l'], exponent)
  np.testing.assert_allclose(got, expected['w_mean_one'], rtol=1e-5)
  means = np.asarray(expected['l']) / 2
  assert _exponent(means) == expected['mean_reduction']['alpha']


def test_tetpo01(group_cases):
  case = group_cases['TETPO-01']
  log_ratios, expected = case['input']['group_log_rho'], case['expected']
  exponent = _exponent(log_ratios, iterations=case['input']['iterations'])
  np.testing.assert_allclose(exponent, expected['alpha_24_iter'], atol=3e-7)
  got = _weights(log_ratios, exponent, scale='sum_one')
  np.testing.assert_allclose(got, expected['weights_selfnormalised'], rtol=2e-6)
  fraction = _ess(log_ratios, exponent) / 4
  np.testing.assert_allclose(fraction, expected['ess_over_G'], rtol=1e-6)


def test_tetpo02_healthy_equal_and_single_groups_stay_as_they_are(group_cases):
  case = group_cases['TETPO-02']
  groups = case['input']['groups_log_rho']
  for i, log_ratios in enumerate(groups):
    exponent = _exponent(log_ratios)
    assert exponent == case['expected']['alpha'][i]
    got = _weights(log_ratios, exponent, scale='sum_one')
    np.testing.assert_allclose(got, case['expected']['weights'][i], atol=1e-6)


def test_kappa_one_keeps_only_equal_groups():
  assert _exponent([0.0, 1e-4], kappa=1.0) == 0
  assert _exponent([0.3] * 7, kappa=1.0) == 1
  np.testing.assert_array_equal(_weights([0.0, 1e-4], 0.0), [1, 1])


@pytest.mark.parametrize('number', [2, 3, 7, 49])
def test_kappa_of_one_member_leaves_the_weights(number):
  log_ratios = np.zeros(number)
  log_ratios[0] = 1e4
  assert _exponent(log_ratios, kappa=1 / number) == 1
  assert _exponent(log_ratios, kappa=1.1 / number) < 1


@pytest.mark.parametrize('kappa', [0.0, -0.1, 1.0001, math.nan])
def test_kappa_outside_its_range_is_refused(kappa):
  with pytest.raises(ValueError, match='target_ess_fraction'):
    _exponent([0.0, 1.0], kappa=kappa)


def test_no_iteration_and_unknown_scale_are_refused():
  with pytest.raises(ValueError, match='iterations'):
    _exponent([0.0, 1.0], iterations=0)
  with pytest.raises(ValueError, match='scale'):
    _weights([0.0, 1.0], 1.0, scale='mean')


def test_nobody_gives_zero_weights():
  valid = [False, False]
  assert _exponent([3.0, np.nan], valid) == 1
  np.testing.assert_array_equal(_weights([3.0, np.nan], 1.0, valid), [0, 0])
  assert target_ess.log_ess(*_arrays([3, np.nan], valid), 1.0) == -np.inf


def test_target_counts_members_and_not_slots():
  log_ratios = [0.0, 3.0]
  padded = [np.nan, 0.0, 1e30, 3.0, -np.inf]
  valid = [False, True, False, True, True]
  exponent = _exponent(padded, valid)
  assert exponent == _exponent(log_ratios)
  got = np.asarray(_weights(padded, exponent, valid))
  np.testing.assert_array_equal(got[[1, 3]], _weights(log_ratios, exponent))
  np.testing.assert_array_equal(got[[0, 2, 4]], 0)


_LOG_RATIOS = st.sampled_from([0.0625, 1.0, 8.0, 1e4]).flatmap(
  lambda size: st.lists(
    st.floats(-size, size, width=32), min_size=8, max_size=8
  )
)
_solve = jax.jit(
  functools.partial(target_ess.tempering_exponent, target_ess_fraction=_KAPPA)
)
_temper = jax.jit(target_ess.tempered_weights)
_curve = jax.jit(jax.vmap(target_ess.log_ess, in_axes=(None, None, 0)))


@hypothesis.given(_LOG_RATIOS)
@hypothesis.settings(deadline=None, max_examples=60)
def test_exponent_is_the_largest_feasible(log_ratios):
  exponent = float(_solve(*_arrays(log_ratios)))
  assert 0 <= exponent <= 1
  target = _KAPPA * 8
  assert _reference_ess(log_ratios, exponent) >= target * (1 - 1e-5)
  grid = np.linspace(0, 1, 513)
  feasible = [_reference_ess(log_ratios, x) >= target for x in grid]
  assert exponent >= grid[feasible].max() - 1e-5
  if exponent < 1:
    # One step of the bracket further the target is missed.
    further = exponent + 2**-23 + 1e-5 * exponent
    assert _reference_ess(log_ratios, further) < target * (1 + 1e-6)


@hypothesis.given(_LOG_RATIOS)
@hypothesis.settings(deadline=None, max_examples=60)
def test_ess_is_continuous_and_does_not_increase(log_ratios):
  grid = np.linspace(0, 1, 257, dtype=np.float32)
  curve = np.asarray(_curve(*_arrays(log_ratios), grid))
  assert np.all(np.isfinite(curve))
  np.testing.assert_allclose(curve[0], math.log(8), rtol=1e-6)
  assert np.all(np.diff(curve) <= 2e-6)
  # |d log ESS / d alpha| <= 2 (max l - min l).
  assert np.all(-np.diff(curve) <= 2 * np.ptp(log_ratios) / 256 + 2e-6)
  want = [math.log(_reference_ess(log_ratios, x)) for x in grid[::64]]
  # Rounding of alpha l grows with its size.
  tolerance = 1e-6 * (1 + np.ptp(log_ratios))
  np.testing.assert_allclose(curve[::64], want, atol=tolerance)


@hypothesis.given(_LOG_RATIOS, st.permutations(range(8)))
@hypothesis.settings(deadline=None, max_examples=60)
def test_weights_of_the_solution(log_ratios, order):
  log_ratios, valid = _arrays(log_ratios)
  exponent = _solve(log_ratios, valid)
  weights = np.asarray(_temper(log_ratios, valid, exponent))
  np.testing.assert_allclose(weights.mean(), 1, rtol=1e-5)
  if np.ptp(log_ratios) * exponent < 80:
    assert np.all(weights > 0)
  assert np.mean((weights - 1) ** 2) <= 1 / _KAPPA - 1 + 1e-5
  gradients = np.random.default_rng(0).normal(size=(8, 5))
  mean = weights @ gradients / 8
  bound = np.sqrt(np.mean(np.sum(gradients**2, axis=1)) / _KAPPA)
  assert np.linalg.norm(mean) <= bound * (1 + 1e-5)

  moved = log_ratios[np.array(order)]
  np.testing.assert_allclose(
    _solve(moved, valid), exponent, rtol=1e-4, atol=2**-23
  )
  np.testing.assert_allclose(
    _temper(moved, valid, exponent), weights[np.array(order)], rtol=1e-5
  )


def test_gradient_bound_is_attained():
  exponent = _exponent([0.0, 3.0])
  gradients = np.asarray(_weights([0.0, 3.0], exponent))
  # Gradients along the weights: Cauchy and Schwarz hold with equality.
  norm = gradients @ gradients / 2
  bound = math.sqrt(np.mean(gradients**2) / _KAPPA)
  np.testing.assert_allclose(norm, bound, rtol=1e-5)


def test_vmap_and_jit_are_group_by_group():
  rng = np.random.default_rng(2)
  log_ratios = rng.normal(size=(6, 8)).astype(np.float32)
  log_ratios *= np.array([0.01, 0.3, 1, 3, 100, 1e4], np.float32)[:, None]
  valid = rng.random((6, 8)) < 0.8
  exponents = jax.jit(jax.vmap(_solve))(log_ratios, valid)
  weights = jax.vmap(target_ess.tempered_weights)(log_ratios, valid, exponents)
  for i in range(6):
    want = _exponent(log_ratios[i], valid[i])
    np.testing.assert_allclose(exponents[i], want, rtol=1e-5, atol=2**-23)
    np.testing.assert_allclose(
      weights[i], _weights(log_ratios[i], exponents[i], valid[i]), rtol=1e-5
    )


def test_members_over_devices_are_the_whole():
  log_ratios, valid = _arrays(np.linspace(-3, 4, 8), [1, 1, 0, 1, 1, 1, 1, 1])
  parts = (log_ratios.reshape(4, 2), valid.reshape(4, 2))

  def local(log_ratios, valid):
    exponent = target_ess.tempering_exponent(
      log_ratios, valid, target_ess_fraction=_KAPPA, axis_name='devices'
    )
    weights = target_ess.tempered_weights(
      log_ratios, valid, exponent, axis_name='devices'
    )
    return exponent, weights

  exponents, weights = jax.vmap(local, axis_name='devices')(*parts)
  want = _exponent(log_ratios, valid)
  assert want < 1
  np.testing.assert_allclose(exponents, np.full(4, want), rtol=1e-5)
  np.testing.assert_allclose(
    weights.reshape(-1), _weights(log_ratios, want, valid), rtol=1e-5
  )


def test_everything_is_constant_to_the_gradient():
  valid = np.ones(3, bool)

  def total(log_ratios, exponent):
    weights = target_ess.tempered_weights(log_ratios, valid, exponent)
    solved = target_ess.tempering_exponent(
      log_ratios, valid, target_ess_fraction=_KAPPA
    )
    ess = target_ess.log_ess(log_ratios, valid, exponent)
    return weights[0] + solved + ess

  gradients = jax.grad(total, argnums=(0, 1))(
    jnp.array([0.0, 2.0, 5.0]), jnp.float32(0.5)
  )
  np.testing.assert_array_equal(gradients[0], [0, 0, 0])
  assert gradients[1] == 0


def test_differences_beyond_float32_stay_finite():
  log_ratios = [3e38, -3e38, 0]
  exponent = _exponent(log_ratios)
  assert exponent == 0
  np.testing.assert_array_equal(_weights(log_ratios, exponent), [1, 1, 1])


def test_a_float_mask_is_refused():
  with pytest.raises(AssertionError):
    target_ess.tempered_weights(np.zeros(2, np.float32), np.ones(2), 1.0)
