import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recipe_by_hand

from spopp_jax import types
from spopp_jax.kernels import aggregate, surrogate


def _batch(behaviour, rewards, *, groups=None, usable=None):
  """One trajectory a row, every token an action."""
  behaviour = np.asarray(behaviour, np.float32)
  rows, width = behaviour.shape
  zeros = np.zeros((rows, width), np.int32)
  if groups is None:
    groups = np.zeros(rows)
  if usable is None:
    usable = np.ones(rows)
  return types.PackedBatch(
    tokens=zeros,
    positions=zeros + np.arange(width, dtype=np.int32),
    segment_ids=zeros + 1,
    trajectory_ids=zeros + np.arange(rows, dtype=np.int32)[:, None],
    action_mask=np.ones((rows, width), bool),
    behaviour_logprobs=behaviour,
    kept_ids=np.zeros((rows, width, 0), np.int32),
    rewards=np.asarray(rewards, np.float32),
    values=np.zeros(rows, np.float32),
    usable=np.asarray(usable, bool),
    group_ids=np.asarray(groups, np.int32),
  )


@pytest.fixture
def w09(vectors):
  vector = vectors['W09_tetpo_surrogates']
  arrays = {
    name: np.array(vector['inputs'][f'logp_{name}'], np.float32)
    for name in ('behave', 'theta', 'prox')
  }
  arrays['A'] = np.array(vector['inputs']['A'], np.float32)
  batch = _batch(arrays['behave'], np.zeros(4))
  return batch, arrays, vector['expected']


def _value(objective, current, batch, advantages, weights):
  numerator, count, _ = objective.loss(current, batch, advantages, weights)
  return numerator / count


def test_w09_weights(make_jitted, w09):
  batch, arrays, expected = w09
  for log_ratio, exponent in (
    ('sum', expected['alpha']),
    ('mean', expected['mean_reduction']['alpha']),
  ):
    objective = make_jitted(
      'tetpo', group_size=4, tempering_log_ratio=log_ratio
    )
    weights, metrics = objective.weights(batch, arrays['theta'], arrays['A'])
    np.testing.assert_allclose(
      metrics['tempering_exponent'], exponent, rtol=5e-6
    )
    if log_ratio == 'sum':
      np.testing.assert_allclose(
        weights.importance,
        np.repeat(np.array([expected['w_mean_one']]).T, 2, axis=1),
        rtol=2e-6,
      )


def test_w09_reading_a_clips_what_comes_after_the_proximal_policy(
  make_jitted, w09
):
  batch, arrays, expected = w09
  objective = make_jitted('tetpo', group_size=4, clip_region='ratio')
  weights, _ = objective.weights(batch, arrays['theta'], arrays['A'])
  weights = weights._replace(denominator_logprobs=arrays['prox'])
  got = _value(objective, arrays['theta'], batch, arrays['A'], weights)
  np.testing.assert_allclose(
    got, expected['A_weighted_clip_vs_prox'], rtol=1e-6
  )


@pytest.mark.parametrize(
  ('reading', 'key'),
  [('clip_weight', 'B_clip_the_weight'), ('unclipped', 'B_unclipped')],
)
def test_w09_reading_b_has_the_weight_alone(make_jitted, w09, reading, key):
  batch, arrays, expected = w09
  objective = make_jitted(
    'tetpo', group_size=4, clip_region='ratio', surrogate=reading
  )
  weights, _ = objective.weights(batch, arrays['theta'], arrays['A'])
  got = _value(objective, arrays['theta'], batch, arrays['A'], weights)
  np.testing.assert_allclose(got, expected[key], rtol=1e-5)


def test_w09_reading_c_counts_the_step_from_the_sampler_twice(make_jitted, w09):
  batch, arrays, expected = w09
  objective = make_jitted('tetpo', group_size=4)
  weights, _ = objective.weights(batch, arrays['theta'], arrays['A'])
  terms = surrogate.clipped_surrogate(
    current_logprobs=arrays['theta'],
    proximal_logprobs=arrays['behave'],
    advantages=np.repeat(arrays['A'][:, None], 2, axis=1),
    mask=batch.action_mask,
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
  )
  numerator, count = aggregate.seq_mean_token_mean(
    weights.importance * terms.loss,
    batch.action_mask,
    batch.trajectory_ids,
    num_trajectories=4,
  )
  np.testing.assert_allclose(
    numerator / count, expected['C_weighted_clip_vs_behave'], rtol=1e-6
  )


@pytest.mark.parametrize('kappa', [0.5, 0.85, 0.99])
@pytest.mark.parametrize('spread', [0.05, 1.0, 30.0])
def test_one_exponent_for_a_single_stream_batch(make_jitted, kappa, spread):
  rng = np.random.default_rng(int(100 * kappa + spread))
  steps = rng.normal(0, spread, (9, 4)).astype(np.float32)
  usable = np.arange(9) != 3
  behaviour = np.full((9, 4), -2, np.float32)
  # Ids of prompt groups mean nothing to a single stream.
  batch = _batch(behaviour, np.zeros(9), groups=np.arange(9), usable=usable)
  objective = make_jitted(
    'spopp',
    correction='tempered',
    tempering_scope='batch',
    target_ess_fraction=kappa,
  )
  weights, metrics = objective.weights(batch, behaviour + steps, np.zeros(9))
  got = np.asarray(weights.importance, float)
  np.testing.assert_array_equal(got, got[:, :1].repeat(4, axis=1))
  np.testing.assert_array_equal(got[3], 0)
  got = got[usable, 0]
  np.testing.assert_allclose(got.mean(), 1, rtol=1e-5)
  fraction = got.sum() ** 2 / (got**2).sum() / 8
  assert fraction >= kappa * (1 - 1e-5)
  np.testing.assert_allclose(
    metrics['tempered_ess_fraction'], fraction, rtol=1e-5
  )

  logs = np.float64((behaviour + steps) - behaviour).sum(axis=1)[usable]
  exponent = recipe_by_hand.largest_exponent(logs, kappa, 24)
  want = np.exp(exponent * (logs - logs.max()))
  np.testing.assert_allclose(got, want / want.mean(), rtol=2e-4, atol=1e-6)
  for name in ('tempering_exponent', 'tempering_exponent_min'):
    np.testing.assert_allclose(metrics[name], exponent, rtol=1e-4, atol=2**-23)
  assert (exponent == 1) == (spread == 0.05)


def test_tempering_is_reported_over_the_groups_that_have_members(make_jitted):
  # Group 0 is healthy, 1 is not and has lost a member, 2 has nobody.
  steps = np.array([[0.1], [-0.1], [0.0], [3.0], [0.0], [np.inf]], np.float32)
  groups = [0, 0, 0, 1, 1, 1]
  behaviour = np.full((6, 1), -2, np.float32)
  full = _batch(behaviour, np.zeros(6), groups=groups)
  more = _batch(
    np.pad(behaviour, ((0, 3), (0, 0))),
    np.zeros(9),
    groups=[*groups, 2, 2, 2],
    usable=np.arange(9) < 6,
  )
  exponent = recipe_by_hand.largest_exponent([3.0, 0.0], 0.85, 24)
  objective = make_jitted('tetpo', group_size=3)
  for batch in (full, more):
    number = len(batch.rewards)
    moved = np.pad(steps, ((0, number - 6), (0, 0)))
    weights, metrics = objective.weights(
      batch, batch.behaviour_logprobs + moved, np.zeros(number)
    )
    np.testing.assert_allclose(
      metrics['tempering_exponent'], (1 + exponent) / 2, rtol=1e-5
    )
    np.testing.assert_allclose(
      metrics['tempering_exponent_min'], exponent, rtol=1e-5
    )
    assert metrics['tempering_dropped'] == 1
    assert weights.importance[5, 0] == 0
    healthy = recipe_by_hand.ess([0.1, -0.1, 0.0], 1) / 3
    np.testing.assert_allclose(
      metrics['tempered_ess_fraction'], (healthy + 0.85) / 2, rtol=1e-5
    )


def test_the_second_moment_mask_is_of_the_whole_minibatch(make_jitted, vectors):
  vector = vectors['M01_m2po']
  inputs, expected = vector['inputs'], vector['expected']
  steps = np.array([inputs['log_ratio']], np.float32).T
  advantages = np.array(inputs['A'], np.float32)
  batch = _batch(np.zeros((8, 1)), np.zeros(8))
  for variant, key in (
    ('paper', 'paper_keep'),
    ('official_cap', 'official_grad_keep'),
    ('areal', 'areal_keep_all_tokens'),
  ):
    objective = make_jitted('m2po', group_size=8, second_moment_variant=variant)
    weights, metrics = objective.weights(batch, steps, advantages)
    np.testing.assert_array_equal(weights.importance[:, 0], expected[key])
    rejected = 1 - np.mean(expected[key])
    np.testing.assert_allclose(metrics['rejected_fraction'], rejected)
    assert metrics['second_moment_all_masked'] == 0
    if variant != 'paper':
      continue
    np.testing.assert_allclose(
      [metrics['second_moment'], metrics['second_moment_kept']],
      [expected['m2_trust'], expected['m2_after_paper']],
      rtol=1e-6,
    )
    np.testing.assert_allclose(
      _value(objective, steps, batch, advantages, weights),
      expected['paper_loss_all_token_denominator'],
      rtol=1e-6,
    )


def test_m03_all_masked_is_a_loss_of_zero_and_is_reported(make_jitted, vectors):
  inputs = vectors['M03_m2po_edge']['inputs']
  steps = np.array([inputs['log_ratio']], np.float32).T
  advantages = np.array(inputs['A'], np.float32)
  batch = _batch(np.zeros((3, 1)), np.zeros(3))
  objective = make_jitted('m2po', group_size=3)
  weights, metrics = objective.weights(batch, steps, advantages)
  assert metrics['second_moment_all_masked'] == 1
  loss = lambda x: _value(objective, x, batch, advantages, weights)
  value, gradient = jax.value_and_grad(loss)(jnp.asarray(steps))
  assert value == 0
  np.testing.assert_array_equal(gradient, 0)


def test_rejected_tokens_stay_in_the_denominator_unless_told(make_jitted):
  # Ratios e, 1 and 1: the window drops the first of three tokens.
  batch = _batch(np.zeros((1, 3)), [0.0], groups=[0])
  proximal = np.array([[1.0, 0.0, 0.0]], np.float32)
  for denominator, count in (('all', 3), ('kept', 2)):
    objective = make_jitted(
      'spopp',
      correction='none',
      token_mask='window',
      window_high=2.0,
      denominator=denominator,
    )
    advantages = np.ones(1, np.float32)
    weights, metrics = objective.weights(batch, proximal, advantages)
    numerator, divisor, sums = objective.loss(
      proximal, batch, advantages, weights
    )
    assert (numerator, divisor, weights.tokens) == (-2, count, count)
    assert sums['ratio'] == count
    np.testing.assert_allclose(metrics['rejected_fraction'], 1 / 3, rtol=1e-6)


def test_a_sequence_weight_is_the_product_of_its_token_ratios(
  make_jitted, cases
):
  case = cases['RATIO-04']
  tokens = case['input']['tokens']
  batch = _batch(np.zeros((1, tokens)), [0.0])
  steps = np.full((1, tokens), case['input']['log_ratio_each'], np.float32)
  objective = make_jitted('spopp', correction='sequence')
  weights, _ = objective.weights(batch, steps, np.ones(1))
  np.testing.assert_allclose(
    weights.importance,
    np.full((1, tokens), case['expected']['sum_form']),
    rtol=1e-4,
  )


def test_ratio03_filter_and_weight_are_separate(make_jitted, cases):
  case = cases['RATIO-03']
  steps = np.log([case['input']['token_ratios']]).astype(np.float32)
  objective = make_jitted('spopp', token_mask='geometric_mean', window_high=2.0)
  batch = _batch(np.zeros((1, 2)), [0.0])
  weights, metrics = objective.weights(batch, steps, np.ones(1))
  np.testing.assert_allclose(
    weights.importance[0], case['expected']['token_weights'], rtol=1e-6
  )
  assert metrics['rejected_fraction'] == 0
  rejected, _ = objective.weights(batch, steps + np.float32(1), np.ones(1))
  np.testing.assert_array_equal(rejected.importance, 0)
