import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import importance


def _row(*values):
  return np.array([values], np.float32)


def test_i01_token_and_sequence_weights(vectors):
  vector = vectors['I01_tis']
  mask = np.array(vector['inputs']['mask'], bool)
  proximal = np.array(vector['inputs']['log_train_minus_rollout'], np.float32)
  token = importance.log_ratio(proximal, np.zeros_like(proximal), mask)
  expected = vector['expected']
  np.testing.assert_allclose(
    np.where(mask, jnp.exp(token), 0), expected['token_raw'], rtol=1e-6
  )
  truncated = np.where(mask, importance.truncate(token, cap=2.0), 0)
  np.testing.assert_allclose(truncated, expected['token_tis'], rtol=1e-6)
  np.testing.assert_allclose(
    truncated.sum() / mask.sum(), expected['tis_mean'], rtol=1e-6
  )
  sequence = importance.sequence_log_weights(
    token,
    mask,
    np.array([[0] * 3, [1] * 3], np.int32),
    num_trajectories=2,
  )
  np.testing.assert_allclose(jnp.exp(sequence), expected['seq_raw'], rtol=1e-6)
  np.testing.assert_allclose(
    importance.truncate(sequence, cap=2.0), expected['seq_tis'], rtol=1e-6
  )


def test_i04_weight_is_proximal_over_behaviour(vectors):
  vector = vectors['I04_decoupled_ppo']
  inputs = vector['inputs']
  log_ratio = importance.log_ratio(
    _row(*inputs['logp_prox']),
    _row(*inputs['logp_behave']),
    np.ones((1, 3), bool),
  )
  np.testing.assert_allclose(
    jnp.exp(log_ratio)[0], vector['expected']['behave_w'], rtol=1e-6
  )


def test_ratio03_truncation_has_no_lower_bound(cases):
  case = cases['RATIO-03']
  ratios = np.array(case['input']['token_ratios'], np.float32)
  np.testing.assert_allclose(
    importance.truncate(np.log(ratios), cap=case['input']['token_upper']),
    case['expected']['token_weights'],
    rtol=1e-6,
  )


def test_ratio04_sequence_weight_is_the_product(cases):
  case = cases['RATIO-04']
  tokens = case['input']['tokens']
  sequence = importance.sequence_log_weights(
    np.full((1, tokens), case['input']['log_ratio_each'], np.float32),
    np.ones((1, tokens), bool),
    np.zeros((1, tokens), np.int32),
    num_trajectories=1,
  )
  np.testing.assert_allclose(
    importance.truncate(sequence, cap=2.0)[0],
    case['expected']['sum_form'],
    rtol=1e-5,
  )


def test_a_sequence_weight_is_not_the_exponential_of_a_clamped_sum():
  log_ratios = np.full((1, 60), -0.5, np.float32)  # the sum is -30
  sequence = importance.sequence_log_weights(
    log_ratios,
    np.ones((1, 60), bool),
    np.zeros((1, 60), np.int32),
    num_trajectories=1,
  )
  np.testing.assert_allclose(
    importance.truncate(sequence, cap=2.0), [np.exp(-30.0)], rtol=1e-5
  )


def test_extreme_log_weights_stay_exact():
  weights = importance.truncate(jnp.asarray([1e4, -1e4, 0.0]), cap=2.0)
  np.testing.assert_array_equal(weights, [2, 0, 1])
  assert jnp.isnan(importance.truncate(jnp.asarray([jnp.nan]), cap=2.0))[0]


def test_weights_are_detached():
  gradient = jax.grad(lambda x: importance.truncate(x, cap=2.0).sum())(
    jnp.asarray([0.1, -0.3, 5.0])
  )
  np.testing.assert_array_equal(gradient, [0, 0, 0])


@pytest.mark.parametrize('garbage', [np.nan, np.inf, -np.inf, 1e30])
def test_masked_slots_reach_neither_value_nor_gradient(garbage):
  mask = np.array([[True, False]])

  @jax.jit
  @jax.value_and_grad
  def total(numerator):
    ratio = importance.log_ratio(numerator, _row(-2.0, garbage), mask)
    return jnp.exp(ratio).sum()

  value, gradient = total(_row(-1.0, garbage))
  np.testing.assert_allclose(value, np.e + 1, rtol=1e-6)
  np.testing.assert_allclose(gradient, [[np.e, 0]], rtol=1e-6)


def test_bfloat16_is_subtracted_in_float32():
  numerator = jnp.asarray([[-1.0]], jnp.bfloat16)
  denominator = jnp.asarray([[-1.0009765625]], jnp.float32)
  ratio = importance.log_ratio(numerator, denominator, np.ones((1, 1), bool))
  np.testing.assert_allclose(ratio, [[0.0009765625]], rtol=1e-6)


def test_a_float_mask_is_refused():
  with pytest.raises(AssertionError):
    importance.log_ratio(_row(0.0), _row(0.0), _row(1.0))
