import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import importance, surrogate


def _surrogate(log_ratio, advantages, mask=None, dual_clip=2.0, **kwargs):
  log_ratio = jnp.asarray(log_ratio, jnp.float32).reshape(1, -1)
  options = {'clip_low': 0.2, 'clip_high': 0.28, **kwargs}
  if mask is None:
    mask = np.ones(log_ratio.shape, bool)
  return surrogate.clipped_surrogate(
    current_logprobs=log_ratio,
    proximal_logprobs=jnp.zeros_like(log_ratio),
    advantages=jnp.broadcast_to(
      jnp.asarray(advantages, jnp.float32).reshape(1, -1), log_ratio.shape
    ),
    mask=np.asarray(mask).reshape(log_ratio.shape),
    dual_clip=dual_clip,
    **options,
  )


@pytest.mark.parametrize('sign', ['pos', 'neg'])
@pytest.mark.parametrize('cap', [None, 10, 3, 2])
def test_p01_clip_then_dual_clip(vectors, sign, cap):
  vector = vectors[f'P01_ppo_{sign}']
  inputs, expected = vector['inputs'], vector['expected']
  options = {
    'clip_low': inputs['eps_low'],
    'clip_high': inputs['eps_high'],
    'dual_clip': cap,
  }
  log_ratio = np.log(inputs['r']).astype(np.float32)
  got = _surrogate(log_ratio, inputs['A'], **options).loss[0]
  np.testing.assert_allclose(got, expected[f'loss_c{cap}'], rtol=1e-5)
  if f'dloss_dlogp_c{cap}' in expected:
    gradient = jax.grad(
      lambda x: _surrogate(x, inputs['A'], **options).loss.sum()
    )(jnp.asarray(log_ratio))
    np.testing.assert_allclose(
      gradient, expected[f'dloss_dlogp_c{cap}'], rtol=1e-5
    )


def test_p02_the_cap_holds_for_negative_advantages_alone(vectors):
  vector = vectors['P02_dualclip_sign_bug']
  inputs = vector['inputs']
  got = _surrogate(
    np.log([inputs['r']] * 2), inputs['A'], dual_clip=inputs['c']
  )
  np.testing.assert_allclose(
    got.loss[0], vector['expected']['correct'], rtol=1e-6
  )


def test_ratio02_dual_clip(cases):
  case = cases['RATIO-02']
  width = case['input']['clip_eps']
  for one, loss in zip(
    case['input']['cases'], case['expected']['loss'], strict=True
  ):
    got = _surrogate(
      np.log([one['ratio']]),
      one['A'],
      dual_clip=one['c'],
      clip_low=width,
      clip_high=width,
    )
    np.testing.assert_allclose(got.loss, [[loss]], rtol=1e-5)


def test_i04_decoupled_loss(vectors):
  vector = vectors['I04_decoupled_ppo']
  inputs = vector['inputs']
  mask = np.ones((1, 3), bool)
  theta, proximal, behaviour, advantages = (
    np.array([inputs[name]], np.float32)
    for name in ('logp_theta', 'logp_prox', 'logp_behave', 'A')
  )
  terms = surrogate.clipped_surrogate(
    current_logprobs=theta,
    proximal_logprobs=proximal,
    advantages=advantages,
    mask=mask,
    clip_low=inputs['eps'],
    clip_high=inputs['eps'],
    dual_clip=None,
  )
  np.testing.assert_allclose(
    terms.ratio[0], vector['expected']['ratio'], rtol=1e-6
  )
  weights = importance.truncate(
    importance.log_ratio(proximal, behaviour, mask), cap=inputs['cap']
  )
  np.testing.assert_allclose(
    (terms.loss * weights)[0],
    vector['expected']['token_loss_clamped'],
    rtol=1e-5,
  )


def test_clip_fraction_follows_the_sign():
  #                     A > 0: r low, r high    A < 0: r low, r high   A = 0
  ratios = np.log([0.5, 1.5, 0.5, 1.5, 1.5])
  got = _surrogate(ratios, [1, 1, -1, -1, 0])
  np.testing.assert_array_equal(got.clipped, [[0, 1, 1, 0, 0]])


def test_dual_clip_is_reported_where_it_decides():
  got = _surrogate(np.log([3.0, 3.0, 1.9, 0.1]), [-1, 1, -1, -1])
  np.testing.assert_array_equal(got.dual_clipped, [[1, 0, 0, 0]])
  got = _surrogate(np.log([3.0]), [-1], dual_clip=None)
  np.testing.assert_array_equal(got.dual_clipped, [[0]])


def test_adv04_masked_nan_leaves_the_gradient_alone(cases):
  case = cases['ADV-04']
  inputs = case['input']
  old = np.array([[float(x) for x in inputs['old_logp'][0]]], np.float32)
  mask = np.array(inputs['mask'], bool)

  @functools.partial(jax.value_and_grad, has_aux=True)
  def loss(logprobs):
    terms = surrogate.clipped_surrogate(
      current_logprobs=logprobs,
      proximal_logprobs=old,
      advantages=np.array(inputs['advantage'], np.float32),
      mask=mask,
      clip_low=inputs['clip_eps'],
      clip_high=inputs['clip_eps'],
      dual_clip=None,
    )
    return terms.loss.sum() / mask.sum(), terms.k1.sum()

  (value, k1), gradient = loss(np.array(inputs['logp'], np.float32))
  assert value == case['expected']['loss']
  assert k1 == case['expected']['approx_kl']
  np.testing.assert_array_equal(gradient, case['expected']['grad_wrt_logp'])


@pytest.mark.parametrize('garbage', [np.nan, np.inf, -np.inf, 1e30])
def test_masked_slots_change_nothing(garbage):
  mask = np.array([[True, False]])

  def loss(current, proximal, advantage):
    terms = surrogate.clipped_surrogate(
      current_logprobs=current,
      proximal_logprobs=proximal,
      advantages=advantage,
      mask=mask,
      clip_low=0.2,
      clip_high=0.28,
      dual_clip=2.0,
    )
    return terms.loss.sum(), terms

  row = lambda first, second: np.array([[first, second]], np.float32)
  clean = (row(-1, 0), row(-1.1, 0), row(0.7, 0))
  dirty = (row(-1, garbage), row(-1.1, garbage), row(0.7, garbage))
  (got, terms), gradient = jax.value_and_grad(loss, has_aux=True)(*dirty)
  (want, clean_terms), want_gradient = jax.value_and_grad(loss, has_aux=True)(
    *clean
  )
  assert got == want
  np.testing.assert_array_equal(gradient, want_gradient)
  for name in terms._fields:
    np.testing.assert_array_equal(
      getattr(terms, name), getattr(clean_terms, name)
    )
    assert getattr(terms, name)[0, 1] == 0


@pytest.mark.parametrize('log_ratio', [1e4, -1e4, 30.0, -30.0])
@pytest.mark.parametrize('advantage', [1.0, -1.0])
def test_gradients_are_finite_far_off_policy(log_ratio, advantage):
  loss = lambda x: _surrogate(x, advantage, dual_clip=None).loss.sum()
  value, gradient = jax.value_and_grad(loss)(jnp.asarray([log_ratio]))
  assert jnp.isfinite(value)
  assert jnp.isfinite(gradient).all()


def test_only_the_current_policy_carries_gradient():
  def loss(current, proximal, advantages):
    return surrogate.clipped_surrogate(
      current_logprobs=current,
      proximal_logprobs=proximal,
      advantages=advantages,
      mask=np.ones((1, 1), bool),
      clip_low=0.2,
      clip_high=0.28,
      dual_clip=2.0,
    ).loss.sum()

  one = jnp.ones((1, 1))
  gradients = jax.grad(loss, argnums=(0, 1, 2))(-one, -one, 0.5 * one)
  np.testing.assert_array_equal(jnp.stack(gradients).ravel(), [-0.5, 0, 0])


def test_kl_estimates_by_hand():
  got = _surrogate(np.log([2.0, 0.5]), [1.0, 1.0])
  np.testing.assert_allclose(got.k1, [[-np.log(2), np.log(2)]], rtol=1e-6)
  np.testing.assert_allclose(
    got.k3, [[1 - np.log(2), np.log(2) - 0.5]], rtol=1e-5
  )
  small = _surrogate([1e-4], [1.0]).k3  # exp(l) - 1 - l cancels to noise
  np.testing.assert_allclose(small, [[5e-9]], rtol=0.1)


def test_agg06_arguments_cannot_change_places(cases):
  case = cases['AGG-06']
  got = _surrogate(
    [0.0, 0.0], [-2.0, -2.0], clip_high=case['input']['clip_eps']
  )
  assert got.loss.mean() == case['expected']['loss']
  zeros = jnp.zeros((1, 2))
  with pytest.raises(TypeError):
    surrogate.clipped_surrogate(zeros, zeros, zeros, zeros)
  with pytest.raises(AssertionError):
    _surrogate([0.0, 0.0], [-2.0, -2.0], mask=[-2.0, -2.0])


def _cispo(current, proximal, advantages, mask, clip_low=1.0, clip_high=0.2):
  return surrogate.weighted_likelihood(
    current_logprobs=current,
    proximal_logprobs=proximal,
    advantages=advantages,
    mask=mask,
    clip_low=clip_low,
    clip_high=clip_high,
  )


def test_s02_cispo(vectors):
  vector = vectors['S02_cispo']
  inputs, expected = vector['inputs'], vector['expected']
  mask = np.array(inputs['mask'], bool)
  current = jnp.asarray(inputs['logp'], jnp.float32)
  proximal = current - jnp.asarray(inputs['logratio'], jnp.float32)
  advantages = np.repeat(np.array([inputs['A']], np.float32).T, 4, axis=1)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def loss(current):
    terms = _cispo(
      current,
      proximal,
      advantages,
      mask,
      inputs['eps_low'],
      inputs['eps_high'],
    )
    return terms.loss.sum(), terms

  (total, terms), gradient = loss(current)
  np.testing.assert_allclose(terms.loss, expected['token_loss'], rtol=1e-5)
  np.testing.assert_allclose(
    total / mask.sum(), expected['token_mean'], rtol=1e-5
  )
  np.testing.assert_allclose(gradient, expected['dloss_dlogp'], rtol=1e-5)
  # log ratios .3 and .2 exceed log 1.2 = .182, whatever the advantage's sign.
  np.testing.assert_array_equal(terms.clipped, [[1, 0, 1, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize('garbage', [np.nan, np.inf, -np.inf, 1e30])
def test_cispo_masked_slots_change_nothing(garbage):
  mask = np.array([[True, False]])
  row = lambda first, second: np.array([[first, second]], np.float32)

  def loss(*arrays):
    terms = _cispo(*arrays, mask)
    return terms.loss.sum(), terms

  (value, terms), gradient = jax.value_and_grad(loss, has_aux=True)(
    row(-1, garbage), row(-1.1, garbage), row(0.7, garbage)
  )
  np.testing.assert_allclose(value, 0.7 * np.exp(0.1), rtol=1e-6)
  np.testing.assert_allclose(gradient, [[-0.7 * np.exp(0.1), 0]], rtol=1e-6)
  for field in terms:
    assert field[0, 1] == 0


@pytest.mark.parametrize('log_ratio', [1e4, -1e4])
def test_cispo_keeps_a_bounded_gradient_far_off_policy(log_ratio):
  one = jnp.ones((1, 1))
  loss = lambda current: _cispo(
    current, current - log_ratio, -one, one == 1, clip_low=0.8
  ).loss.sum()
  gradient = jax.grad(loss)(-one)
  np.testing.assert_allclose(
    gradient, [[1.2 if log_ratio > 0 else 0.2]], rtol=1e-6
  )


@pytest.mark.parametrize(
  ('advantage', 'judged', 'loss', 'slope'),
  [
    (1.0, 1.1, -1.05, -1.05),  # inside: the ratio to the proximal policy
    (1.0, 1.3, -1.2, 0.0),  # left above: the constant bound
    (1.0, 0.5, -1.05, -1.05),  # below is the other side for A > 0
    (-1.0, 0.7, 0.8, 0.0),
    (-1.0, 1.3, 1.05, 1.05),
  ],
)
def test_the_region_may_be_judged_on_another_policy(
  advantage, judged, loss, slope
):
  current = jnp.asarray([[-1.0]])

  def total(current):
    return surrogate.clipped_surrogate(
      current_logprobs=current,
      proximal_logprobs=jnp.asarray([[-1.0]]) - np.log(1.05),
      region_logprobs=jnp.asarray([[-1.0]]) - np.log(judged),
      advantages=np.array([[advantage]], np.float32),
      mask=np.ones((1, 1), bool),
      clip_low=0.2,
      clip_high=0.2,
      dual_clip=None,
    ).loss.sum()

  value, gradient = jax.value_and_grad(total)(current)
  np.testing.assert_allclose([value, gradient[0, 0]], [loss, slope], rtol=1e-5)


@pytest.mark.parametrize('advantage', [1.0, -1.0])
def test_bounds_that_clip_nothing(advantage):
  options = {'clip_low': 1.0, 'clip_high': np.inf, 'dual_clip': None}
  log_ratio = jnp.asarray([-9.0, 0.0, 9.0])
  got = _surrogate(log_ratio, advantage, **options)
  np.testing.assert_allclose(got.loss[0], -advantage * np.exp(log_ratio))
  assert not got.clipped.any()
  gradient = jax.grad(lambda x: _surrogate(x, advantage, **options).loss.sum())(
    log_ratio
  )
  np.testing.assert_allclose(gradient, -advantage * np.exp(log_ratio))


@pytest.mark.parametrize(('advantage', 'log_ratio'), [(1.0, 1.28), (-1.0, 0.8)])
def test_the_bound_itself_is_inside(advantage, log_ratio):
  # One-sided gradients would otherwise be averaged at the tie.
  log_ratio = jnp.log(jnp.asarray([log_ratio], jnp.float32))
  ratio = jnp.exp(log_ratio)
  options = {'clip_low': 1 - float(ratio[0]), 'clip_high': float(ratio[0]) - 1}
  gradient = jax.grad(lambda x: _surrogate(x, advantage, **options).loss.sum())(
    log_ratio
  )
  np.testing.assert_allclose(gradient, -advantage * ratio, rtol=1e-6)
