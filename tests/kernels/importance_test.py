import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import importance, surrogate


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


def test_i01_icepop_and_geometric_means(vectors):
  vector = vectors['I01_tis']
  mask = np.array(vector['inputs']['mask'], bool)
  log_ratios = np.array(vector['inputs']['log_train_minus_rollout'], np.float32)
  weights = importance.icepop(log_ratios, low=0.5, high=2.0)
  np.testing.assert_allclose(
    np.where(mask, weights, 0), vector['expected']['icepop'], rtol=1e-6
  )
  means = importance.sequence_mean_log_ratios(
    log_ratios, mask, np.array([[0] * 3, [1] * 3]), num_trajectories=2
  )
  np.testing.assert_allclose(
    jnp.exp(means), vector['expected']['geo'], rtol=1e-6
  )


def test_i03_the_window_is_on_the_ratio_not_on_its_inverse(vectors):
  vector = vectors['I03_k1_bounds_sign']
  log_ratios = np.log(vector['inputs']['ratio']).astype(np.float32)
  kept = importance.in_window(log_ratios, low=0.6, high=1.4)
  np.testing.assert_array_equal(kept, vector['expected']['correct_keep'])


def test_i04_capped_and_masked_decoupled_weights(vectors):
  vector = vectors['I04_decoupled_ppo']
  inputs, expected = vector['inputs'], vector['expected']
  mask = np.ones((1, 3), bool)
  proximal, behaviour = _row(*inputs['logp_prox']), _row(*inputs['logp_behave'])
  log_weights = importance.log_ratio(proximal, behaviour, mask)
  terms = surrogate.clipped_surrogate(
    current_logprobs=_row(*inputs['logp_theta']),
    proximal_logprobs=proximal,
    advantages=_row(*inputs['A']),
    mask=mask,
    clip_low=inputs['eps'],
    clip_high=inputs['eps'],
    dual_clip=None,
  )
  masked = terms.loss * importance.icepop(
    log_weights, low=0.0, high=inputs['cap']
  )
  np.testing.assert_allclose(
    masked[0], expected['token_loss_masked'], rtol=1e-5, atol=1e-7
  )
  # The denominator stays 3, although a token was masked.
  np.testing.assert_allclose(
    masked.sum() / mask.sum(), expected['mean_mask_orig_denominator'], rtol=1e-5
  )


def test_i05_a3po_interpolates_the_proximal_policy(vectors):
  vector = vectors['I05_a3po']
  inputs, expected = vector['inputs'], vector['expected']
  versions = np.array([inputs['v_behave']], np.int32)
  coefficients = importance.proximal_coefficients(versions, inputs['v_theta'])
  np.testing.assert_allclose(coefficients[0], expected['alpha'], rtol=1e-6)

  def proximal(current):
    return importance.interpolated_proximal(
      behaviour_logprobs=np.full((1, 6), inputs['logp_behave'], np.float32),
      current_logprobs=current,
      coefficients=coefficients,
      mask=np.ones((1, 6), bool),
    )

  current = jnp.full((1, 6), inputs['logp_theta'], jnp.float32)
  np.testing.assert_allclose(
    proximal(current)[0], expected['logp_prox'], rtol=1e-6
  )
  gradient = jax.grad(lambda x: proximal(x).sum())(current)
  np.testing.assert_array_equal(gradient, np.zeros((1, 6)))


def test_ratio03_filter_and_weight_are_separate(cases):
  case = cases['RATIO-03']
  log_ratios = np.log([case['input']['token_ratios']]).astype(np.float32)
  mask = np.ones((1, 2), bool)
  ids = np.zeros((1, 2), np.int32)
  mean = importance.sequence_mean_log_ratios(
    log_ratios, mask, ids, num_trajectories=1
  )
  np.testing.assert_allclose(
    jnp.exp(mean), [case['expected']['geometric_mean']], rtol=1e-6
  )
  kept = importance.geometric_mean_mask(
    log_ratios, mask, ids, num_trajectories=1, low=0.5, high=2.0
  )
  weights = jnp.where(kept, importance.truncate(log_ratios, cap=2.0), 0)
  np.testing.assert_allclose(
    weights[0], case['expected']['token_weights'], rtol=1e-6
  )


def test_ratio04_sequence_mean_is_the_other_aggregation(cases):
  case = cases['RATIO-04']
  tokens = case['input']['tokens']
  means = importance.sequence_mean_log_ratios(
    np.full((1, tokens), case['input']['log_ratio_each'], np.float32),
    np.ones((1, tokens), bool),
    np.zeros((1, tokens), np.int32),
    num_trajectories=1,
  )
  np.testing.assert_allclose(
    jnp.exp(means), [case['expected']['mean_form']], rtol=1e-6
  )


def test_geometric_mask_judges_trajectories_not_rows_nor_padding():
  # Trajectory 0 spans rows with ratios 4, 4, 1/4: geometric mean 4^(1/3) =
  # 1.59; trajectory 1 has 3, out. A mean over padding would keep it.
  log = lambda *ratios: np.log(np.array(ratios, np.float32))
  log_ratios = np.stack([log(4, 4, 3, 99), log(0.25, 99, 99, 99)])
  ids = np.array([[0, 0, 1, 1], [0, 1, 2, 2]], np.int32)
  mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], bool)
  kept = importance.geometric_mean_mask(
    log_ratios, mask, ids, num_trajectories=2, low=0.5, high=2.0
  )
  np.testing.assert_array_equal(kept, [[1, 1, 0, 0], [1, 0, 0, 0]])
  np.testing.assert_array_equal(
    importance.sequence_mean_log_ratios(
      log_ratios, np.zeros_like(mask), ids, num_trajectories=2
    ),
    [0, 0],
  )


def test_window_bounds_belong_to_the_window():
  logs = jnp.log(jnp.asarray([0.5, 2.0, 0.49, 2.01]))
  np.testing.assert_array_equal(
    importance.in_window(logs, low=0.5, high=2.0), [1, 1, 0, 0]
  )
  extreme = jnp.asarray([1e4, -1e4, jnp.nan])
  np.testing.assert_array_equal(
    importance.in_window(extreme, low=0.0, high=np.inf), [1, 1, 0]
  )


def test_icepop_is_finite_and_detached_far_off_policy():
  logs = jnp.asarray([1e4, -1e4, 0.5, jnp.inf])
  pop = lambda x: importance.icepop(x, low=0.5, high=5.0)
  np.testing.assert_allclose(pop(logs), [0, 0, np.exp(0.5), 0], rtol=1e-6)
  np.testing.assert_array_equal(jax.vmap(pop)(logs), pop(logs))
  gradient = jax.jit(jax.grad(lambda x: pop(x).sum()))(logs)
  np.testing.assert_array_equal(gradient, [0, 0, 0, 0])


def test_weight_times_ratio_counts_each_step_once():
  # Behaviour -> proximal -> current: the product telescopes. Without a
  # proximal policy of its own (bypass) the weight is 1.
  theta, proximal, behaviour = _row(-1.0), _row(-1.1), _row(-1.3)
  mask = np.ones((1, 1), bool)
  weight = importance.truncate(
    importance.log_ratio(proximal, behaviour, mask), cap=5.0
  )
  ratio = jnp.exp(importance.log_ratio(theta, proximal, mask))
  np.testing.assert_allclose(weight * ratio, [[np.exp(0.3)]], rtol=1e-6)
  bypass = importance.log_ratio(behaviour, behaviour, mask)
  np.testing.assert_array_equal(importance.truncate(bypass, cap=5.0), [[1]])


@pytest.mark.parametrize('garbage', [np.nan, np.inf, -np.inf, 1e30])
def test_masked_slots_do_not_reach_sequence_means_nor_a3po(garbage):
  mask = np.array([[True, True, False]])
  ids = np.array([[0, 0, 0]], np.int32)

  def mean(log_ratios):
    return importance.sequence_mean_log_ratios(
      log_ratios, mask, ids, num_trajectories=1
    )[0]

  value, gradient = jax.value_and_grad(mean)(_row(0.2, 0.4, garbage))
  np.testing.assert_allclose(value, 0.3, rtol=1e-6)
  np.testing.assert_array_equal(gradient, [[0.5, 0.5, 0]])
  proximal = importance.interpolated_proximal(
    behaviour_logprobs=_row(-2.0, -2.0, garbage),
    current_logprobs=_row(-1.0, -1.0, garbage),
    coefficients=_row(0.5, 0.0, garbage),
    mask=mask,
  )
  np.testing.assert_allclose(proximal, [[-1.5, -2.0, 0]], rtol=1e-6)


@pytest.mark.parametrize(
  'low, high', [(2.0, 0.5), (-0.1, 2.0), (1.0, 1.0), (np.nan, 2.0)]
)
def test_a_window_without_room_is_refused(low, high):
  with pytest.raises(ValueError, match='must hold 0 <= low < high'):
    importance.in_window(jnp.zeros(1), low=low, high=high)


def test_icepop_without_a_cap_is_refused():
  with pytest.raises(ValueError, match=r'high \(inf\) must be finite'):
    importance.icepop(jnp.zeros(1), low=0.5, high=np.inf)
