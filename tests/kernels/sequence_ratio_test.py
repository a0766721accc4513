import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import importance, sequence_ratio, surrogate

IDS = np.array([[0, 0, 0, 0], [1, 1, 1, 1]], np.int32)


def _gspo_loss(log_ratios, advantages, mask, ids, count, low, high):
  """Mean over trajectories of the mean over tokens of the clipped loss."""
  ratios = sequence_ratio.token_form_log_ratios(
    log_ratios, mask, ids, num_trajectories=count
  )
  terms = surrogate.clipped_surrogate(
    current_logprobs=ratios,
    proximal_logprobs=jnp.zeros_like(ratios),
    advantages=advantages,
    mask=mask,
    clip_low=low,
    clip_high=high,
    dual_clip=None,
  )
  means = importance.sequence_mean_log_ratios(
    terms.loss, mask, ids, num_trajectories=count
  )
  return means.mean(), terms


def _s01(vectors):
  inputs = vectors['S01_gspo']['inputs']
  mask = np.array(inputs['mask'], bool)
  log_ratios = np.array(inputs['logratio'], np.float32)
  advantages = np.repeat(np.array([inputs['A']], np.float32).T, 4, axis=1)
  return jnp.asarray(log_ratios), advantages, mask, vectors['S01_gspo']


def test_s01_ratio_and_loss(vectors):
  log_ratios, advantages, mask, vector = _s01(vectors)
  expected = vector['expected']
  loss, terms = _gspo_loss(log_ratios, advantages, mask, IDS, 2, 3e-4, 4e-4)
  want = np.where(mask, np.array(expected['s'])[:, None], 0)
  np.testing.assert_allclose(terms.ratio, want, rtol=1e-6)
  np.testing.assert_allclose(
    terms.loss, np.where(mask, np.array(expected['seq_loss'])[:, None], 0)
  )
  np.testing.assert_allclose(loss, expected['loss'], rtol=1e-3)


def test_token_form_has_the_gradient_of_the_sequence_ratio(vectors):
  log_ratios, advantages, mask, _ = _s01(vectors)

  def sequence_loss(log_ratios):
    means = importance.sequence_mean_log_ratios(
      log_ratios, mask, IDS, num_trajectories=2
    )
    return -(jnp.exp(means) * advantages[:, 0]).mean()

  token_loss = lambda x: _gspo_loss(x, advantages, mask, IDS, 2, 0.9, 9.0)[0]
  value, gradient = jax.value_and_grad(token_loss)(log_ratios)
  want, want_gradient = jax.value_and_grad(sequence_loss)(log_ratios)
  np.testing.assert_allclose(value, want, rtol=1e-6)
  np.testing.assert_allclose(gradient, want_gradient, rtol=1e-6)
  assert (np.asarray(gradient)[mask] != 0).all()


def test_agg05_padding_is_no_part_of_the_sequence(cases):
  case = cases['AGG-05']
  inputs = case['input']
  mask = np.array(inputs['mask'], bool)
  loss = lambda x, advantages: _gspo_loss(
    x, advantages, mask, IDS[:1], 1, 0.2, 0.2
  )[0]
  advantages = np.array(inputs['advantage_tokens'], np.float32)
  logprobs = jnp.asarray(inputs['logp'], jnp.float32)
  assert loss(logprobs, advantages) == case['expected']['loss']
  clean = jax.grad(loss)(logprobs, advantages)
  for garbage in (np.nan, np.inf, -np.inf, 1e30):
    dirty = jnp.where(mask, logprobs, garbage)
    dirty_advantages = np.where(mask, advantages, np.float32(garbage))
    value, gradient = jax.value_and_grad(loss)(dirty, dirty_advantages)
    assert value == case['expected']['loss']
    np.testing.assert_array_equal(gradient, clean)


def test_token_form_of_packed_rows_equals_unpacked_ones():
  log_ratios = np.array([[0.3, -0.1, 0.2, -0.4], [0.1, 0.7, 0, 0]], np.float32)
  mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
  ids = np.array([[0, 0, 0, 1], [1, 0, 2, 2]], np.int32)
  got = sequence_ratio.token_form_log_ratios(
    log_ratios, mask, ids, num_trajectories=2
  )
  first, second = (0.3 - 0.1 + 0.2 + 0.7) / 4, (-0.4 + 0.1) / 2
  np.testing.assert_allclose(
    got, [[first, first, first, second], [second, first, 0, 0]], rtol=1e-6
  )


@pytest.mark.parametrize('extreme', [1e4, -1e4])
def test_sequence_ratios_are_finite_far_off_policy(extreme):
  mask = np.ones((2, 4), bool)
  loss = lambda x: _gspo_loss(
    x, -mask.astype(np.float32), mask, IDS, 2, 0.2, 0.2
  )[0]
  value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.full((2, 4), extreme))
  assert jnp.isfinite(value)
  assert jnp.isfinite(gradient).all()


def _gepo_log_ratios(
  current, behaviour, mask=None, group_ids=None, usable=None, **options
):
  """Token log-ratios of one trajectory a row, ids and counted tokens."""
  current = jnp.asarray(current, jnp.float32)
  count, width = current.shape
  ids = np.repeat(np.arange(count)[:, None], width, axis=1)
  usable = np.ones(count, bool) if usable is None else usable
  mask = np.ones((count, width), bool) if mask is None else mask
  mask = mask & usable[:, None]
  expected = sequence_ratio.group_expectation_logprobs(
    jnp.asarray(behaviour, jnp.float32),
    mask=mask,
    trajectory_ids=ids,
    group_ids=np.zeros(count, int) if group_ids is None else group_ids,
    usable=usable,
    num_groups=count,
    **options,
  )
  return importance.log_ratio(current, expected, mask), ids, mask


def _gepo(current, behaviour, *args, length_normalize=True, **options):
  """Log weights [N]; one trajectory a row, all of one group by default."""
  log_ratios, ids, mask = _gepo_log_ratios(
    current, behaviour, *args, length_normalize=length_normalize, **options
  )
  reduce = (
    importance.sequence_mean_log_ratios
    if length_normalize
    else importance.sequence_log_weights
  )
  return reduce(log_ratios, mask, ids, num_trajectories=len(ids))


def _s03(vectors):
  vector = vectors['S03_gepo']
  two_tokens = lambda means: np.array(means)[:, None] * [[0.5, 1.5]]
  current = two_tokens(vector['inputs']['logp_learner_mean'])
  behaviour = two_tokens(vector['inputs']['logp_sampler_mean'])
  return current, behaviour, np.array(vector['expected']['w'])


def test_s03_length_normalised_weights(vectors):
  current, behaviour, want = _s03(vectors)
  np.testing.assert_allclose(
    jnp.exp(_gepo(current, behaviour)), want, rtol=1e-5
  )


def test_s03_denominator_is_detached(vectors):
  current, behaviour, want = _s03(vectors)
  total = lambda p, q: jnp.exp(_gepo(p, q)).sum()
  gradient, none = jax.grad(total, argnums=(0, 1))(
    jnp.asarray(current, jnp.float32), jnp.asarray(behaviour, jnp.float32)
  )
  np.testing.assert_allclose(gradient, want[:, None] * [[0.5, 0.5]], rtol=1e-5)
  np.testing.assert_array_equal(none, np.zeros((4, 2)))


def test_sums_by_hand():
  # q = [.5, .25]: E = (.25 + .0625) / .75 = 5 / 12; p = q.
  logprobs = np.log([[0.5, 1.0], [0.5, 0.5]])
  got = _gepo(logprobs, logprobs, length_normalize=False)
  np.testing.assert_allclose(jnp.exp(got), [1.2, 0.6], rtol=1e-5)
  normalised = _gepo(logprobs, logprobs)  # q = [sqrt(.5), .5]
  denominator = (0.5 + 0.25) / (np.sqrt(0.5) + 0.5)
  np.testing.assert_allclose(
    jnp.exp(normalised), np.array([np.sqrt(0.5), 0.5]) / denominator, rtol=1e-5
  )


def test_groups_go_by_id_and_hold_only_usable_members(vectors):
  current, behaviour, want = _s03(vectors)
  # The golden group stands at places 1, 2, 3, 5, with others between.
  places = [1, 2, 3, 5]
  spread = lambda rows: np.insert(rows, [0, 3], np.nan, axis=0)
  all_current, all_behaviour = spread(current), spread(behaviour)
  all_current[[0, 4]] = [[-1.0, -1.0], [np.nan, np.nan]]
  all_behaviour[[0, 4]] = [[-1.5, -1.5], [np.nan, np.nan]]
  group_ids = np.array([0, 2, 2, 2, 2, 2])
  usable = np.array([1, 1, 1, 1, 0, 1], bool)
  got = jnp.exp(
    _gepo(all_current, all_behaviour, group_ids=group_ids, usable=usable)
  )
  np.testing.assert_allclose(got[np.array(places)], want, rtol=1e-5)
  # A group of one has p / q; one that is not usable has 1, no NaN.
  np.testing.assert_allclose(
    got[jnp.array([0, 4])], [np.exp(0.5), 1], rtol=1e-5
  )


@pytest.mark.parametrize('garbage', [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize('length_normalize', [True, False])
def test_masked_slots_reach_neither_weight_nor_gradient(
  garbage, length_normalize
):
  mask = np.array([[1, 1], [1, 0], [0, 0]], bool)
  clean = np.array([[-0.5, -0.4], [-0.9, 0.0], [0.0, 0.0]], np.float32)
  dirty = np.where(mask, clean, np.float32(garbage))

  @jax.jit
  @jax.value_and_grad
  def total(current, behaviour):
    return _gepo(
      current, behaviour, mask, length_normalize=length_normalize
    ).sum()

  want, want_gradient = total(clean, clean - 0.1)
  value, gradient = total(dirty, dirty - 0.1)
  assert value == want
  np.testing.assert_array_equal(gradient, want_gradient)
  assert (gradient[2] == 0).all()
  # The empty trajectory joined no group: the others see a group of two.
  pair = _gepo(
    clean[:2], clean[:2] - 0.1, mask[:2], length_normalize=length_normalize
  )
  np.testing.assert_allclose(value, pair.sum(), atol=1e-6)


@pytest.mark.parametrize('extreme', [1e4, -1e4])
def test_group_weights_are_exact_far_from_each_other(extreme):
  behaviour = np.array([[extreme], [0.0]])
  got = _gepo([[extreme], [0.0]], behaviour)
  # The larger member dominates both sums.
  np.testing.assert_allclose(got, behaviour[:, 0] - max(extreme, 0))
  gradient = jax.grad(lambda x: _gepo(x, behaviour).sum())(
    jnp.asarray(behaviour)
  )
  np.testing.assert_array_equal(gradient, [[1], [1]])


def test_group_expectations_under_vmap():
  logs = jnp.log(jnp.asarray([[0.5, 0.25, 0.1], [0.2, 0.2, 0.9]]))
  function = lambda log_q: sequence_ratio.group_expectations(
    log_q, np.array([0, 0, 1]), np.ones(3, bool), num_groups=2
  )
  np.testing.assert_allclose(
    jnp.exp(jax.vmap(function)(logs)),
    [[5 / 12, 5 / 12, 0.1], [0.2, 0.2, 0.9]],
    rtol=1e-5,
  )


@pytest.mark.parametrize('length_normalize', [True, False])
def test_gepo_tokens_carry_the_gradient_of_their_trajectory(
  vectors, length_normalize
):
  # w at every token, averaged over tokens and trajectories, is mean(w).
  current, behaviour, want = _s03(vectors)
  if not length_normalize:
    want = np.exp(_gepo(current, behaviour, length_normalize=False))

  def loss(current):
    log_ratios, ids, mask = _gepo_log_ratios(
      current, behaviour, length_normalize=length_normalize
    )
    return surrogate.clipped_surrogate(
      current_logprobs=sequence_ratio.token_form_log_ratios(
        log_ratios,
        mask,
        ids,
        num_trajectories=4,
        length_normalize=length_normalize,
      ),
      proximal_logprobs=jnp.zeros((4, 2)),
      advantages=np.ones((4, 2), np.float32),
      mask=mask,
      clip_low=0.2,
      clip_high=0.2,
      dual_clip=None,
    ).loss.mean()

  value, gradient = jax.value_and_grad(loss)(jnp.asarray(current, jnp.float32))
  np.testing.assert_allclose(value, -np.minimum(want, 1.2).mean(), rtol=1e-5)
  share = -0.125 if length_normalize else -0.25  # d mean / d l_t, d sum / d l_t
  free = np.where(want < 1.2, want, 0)[:, None] * [[share, share]]
  np.testing.assert_allclose(gradient, free, rtol=1e-5)
  assert (want < 1.2).any()


def test_misuse_is_refused():
  flags = np.ones(2, bool)
  with pytest.raises(AssertionError):
    sequence_ratio.group_expectations(
      np.zeros(2, np.float32), flags, flags, num_groups=1
    )
  with pytest.raises(AssertionError):
    sequence_ratio.token_form_log_ratios(
      np.zeros((1, 2), np.float32),
      np.ones((1, 2), np.float32),
      np.zeros((1, 2), np.int32),
      num_trajectories=1,
    )


@pytest.mark.parametrize('garbage', [np.nan, np.inf, -np.inf, 1e30])
def test_token_form_is_zero_at_observations(garbage):
  mask = np.array([[True, False, True, False]])  # the second is within
  ids = np.array([[0, 0, 0, 1]], np.int32)
  log_ratios = np.array([[0.2, garbage, 0.4, garbage]], np.float32)

  def total(log_ratios):
    form = sequence_ratio.token_form_log_ratios(
      log_ratios, mask, ids, num_trajectories=1
    )
    return form.sum(), form

  (_, form), gradient = jax.value_and_grad(total, has_aux=True)(log_ratios)
  np.testing.assert_allclose(form, [[0.3, 0, 0.3, 0]], rtol=1e-6)
  np.testing.assert_array_equal(gradient, [[1, 0, 1, 0]])
