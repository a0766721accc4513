import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax import types


def _reference(episodes, *, measure, dual_clip, level):
  """The recipe in float64 loops: A~ [N], numerator and raw token weights."""
  counted = [m.sum() for m in episodes.action_mask]
  advantages = episodes.rewards.astype(float) - episodes.values
  weights = np.array(counted) if measure == 'action_token' else np.sign(counted)
  mean = (weights * advantages).sum() / weights.sum()
  variance = (weights * (advantages - mean) ** 2).sum() / (weights.sum() - 1)
  scaled = (advantages - mean) / (math.sqrt(variance) + 1e-8)
  scaled[np.array(counted) == 0] = 0
  numerator, raw = 0.0, []
  for i, mask in enumerate(episodes.action_mask):
    steps = (episodes.proximal[i] - episodes.behaviour[i])[mask]
    if level == 'sequence':
      steps = np.full(len(steps), steps.sum())
    ratios = np.exp((episodes.current[i] - episodes.proximal[i])[mask])
    raw.extend(np.exp(steps))
    for ratio, weight in zip(ratios, np.exp(steps), strict=True):
      a = scaled[i]
      loss = max(-a * ratio, -a * min(max(ratio, 0.8), 1.28))
      if a < 0:
        loss = min(loss, -dual_clip * a)
      numerator += min(weight, 2.0) * loss
  return scaled, numerator, np.array(raw)


@pytest.mark.parametrize('level', ['token', 'sequence'])
@pytest.mark.parametrize(
  'name, measure, dual_clip',
  [('spopp', 'action_token', 2.0), ('spo', 'trajectory', 10.0)],
)
def test_the_whole_recipe(
  make_jitted, episodes, name, measure, dual_clip, level
):
  objective = make_jitted(name, correction=level)
  batch, proximal, current = episodes.pack()
  advantages = objective.advantages(batch)
  weights, scalars = objective.weights(batch, proximal, advantages)
  numerator, count, metrics = objective.loss(
    current, batch, advantages, weights
  )
  want, total, raw = _reference(
    episodes, measure=measure, dual_clip=dual_clip, level=level
  )
  np.testing.assert_allclose(advantages, want, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(numerator, total, rtol=1e-4)
  assert count == len(raw)
  np.testing.assert_allclose(
    metrics['rollout_weight'], np.minimum(raw, 2).sum(), rtol=1e-5
  )
  got = objective.diagnostics(batch, advantages, proximal, weights)
  used = np.minimum(raw, 2)
  np.testing.assert_allclose(
    got['weight_token_used_mean'], used.mean(), rtol=1e-5
  )
  np.testing.assert_allclose(
    got['weight_token_used_ess_fraction'],
    used.sum() ** 2 / (used**2).sum() / len(used),
    rtol=1e-5,
  )
  np.testing.assert_allclose(
    scalars['weight_truncated_fraction'], (raw > 2).mean(), rtol=1e-6
  )
  if level == 'token':
    np.testing.assert_allclose(got['weight_token_mean'], raw.mean(), rtol=1e-5)
    np.testing.assert_allclose(got['weight_token_max'], raw.max(), rtol=1e-5)
    np.testing.assert_allclose(
      got['weight_token_ess_fraction'],
      raw.sum() ** 2 / (raw**2).sum() / len(raw),
      rtol=1e-5,
    )
    assert raw.max() > 2  # statistics after truncation would differ


def _diagnostics(objective, batch, proximal):
  advantages = objective.advantages(batch)
  weights, _ = objective.weights(batch, proximal, advantages)
  return objective.diagnostics(batch, advantages, proximal, weights)


def test_token_measure_centres_what_the_loss_sees(make_jitted, episodes):
  batch, proximal, _ = episodes.pack()
  got = _diagnostics(make_jitted('spopp'), batch, proximal)
  np.testing.assert_allclose(got['advantage_token_mean'], 0, atol=1e-6)
  assert abs(got['length_residual']) > 1e-2


def test_trajectory_measure_leaves_the_eq_5_residual(make_jitted, episodes):
  batch, proximal, _ = episodes.pack()
  got = _diagnostics(make_jitted('spo'), batch, proximal)
  np.testing.assert_allclose(
    got['advantage_token_mean'], got['length_residual'], rtol=1e-4
  )
  assert abs(got['length_residual']) > 1e-2


def test_the_measure_is_the_only_difference_of_the_measure_switch(
  make_jitted, episodes
):
  batch, *_ = episodes.pack()
  one = make_jitted('spopp', measure='trajectory')
  spo = make_jitted('spo')
  np.testing.assert_array_equal(one.advantages(batch), spo.advantages(batch))


def test_a_trajectory_without_actions_enters_no_statistic(
  make_jitted, episodes
):
  batch, *_ = episodes.pack()
  for name in ('spo', 'spopp'):
    objective = make_jitted(name)
    want = objective.advantages(batch)
    assert want[2] == 0
    batch.rewards[2] = np.nan
    np.testing.assert_array_equal(objective.advantages(batch), want)


@pytest.mark.parametrize('name', ['spo', 'spopp'])
def test_adv07_equal_advantages_make_no_update(make_jitted, cases, name):
  case = cases['ADV-07']
  lengths = case['input']['L']
  mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
  size = len(lengths)
  zeros = np.zeros(mask.shape, np.int32)
  logprobs = np.full(mask.shape, -1.0, np.float32)
  batch = types.PackedBatch(
    tokens=zeros,
    positions=zeros,
    segment_ids=zeros + 1,
    trajectory_ids=zeros + np.arange(size, dtype=np.int32)[:, None],
    action_mask=mask,
    behaviour_logprobs=logprobs,
    kept_ids=np.zeros((*zeros.shape, 0), np.int32),
    rewards=np.array(case['input']['A_float32'], np.float32),
    values=np.zeros(size, np.float32),
    usable=np.ones(size, bool),
    group_ids=np.arange(size, dtype=np.int32),
  )
  objective = make_jitted(name)
  advantages = objective.advantages(batch)
  weights, _ = objective.weights(batch, logprobs, advantages)
  numerator, *_ = objective.loss(logprobs, batch, advantages, weights)
  got = objective.diagnostics(batch, advantages, logprobs, weights)
  gradient = jax.grad(
    lambda x: objective.loss(x, batch, advantages, weights)[0]
  )(logprobs)
  assert np.abs(gradient).sum() == case['expected']['grad_norm']
  np.testing.assert_array_equal(advantages, case['expected']['A_tilde'])
  assert numerator == case['expected']['loss']
  assert (
    got['degenerate_batch'] == case['expected']['metrics']['degenerate_batch']
  )


def test_agg05_sequence_weights_read_no_padding(make_jitted, cases):
  case = cases['AGG-05']
  mask = np.array(case['input']['mask'], bool)
  zeros = np.zeros(mask.shape, np.int32)
  dirty = np.where(mask, 0.0, 10.0).astype(np.float32)
  batch = types.PackedBatch(
    tokens=zeros,
    positions=zeros,
    segment_ids=zeros + 1,
    trajectory_ids=zeros,
    action_mask=mask,
    behaviour_logprobs=-dirty,
    kept_ids=np.zeros((*zeros.shape, 0), np.int32),
    rewards=np.ones(1, np.float32),
    values=np.zeros(1, np.float32),
    usable=np.ones(1, bool),
    group_ids=np.zeros(1, np.int32),
  )
  objective = make_jitted('spopp', correction='sequence')
  advantages = jnp.ones(1)
  weights, _ = objective.weights(batch, dirty, advantages)
  numerator, count, _ = objective.loss(dirty, batch, advantages, weights)
  assert numerator / count == case['expected']['loss']


def test_dual_clip_off(make_jitted):
  # One negative token far above the clip range, at weight 1.
  ids = np.zeros((1, 1), np.int32)
  batch = types.PackedBatch(
    tokens=ids,
    positions=ids,
    segment_ids=ids + 1,
    trajectory_ids=ids,
    action_mask=np.ones((1, 1), bool),
    behaviour_logprobs=np.zeros((1, 1), np.float32),
    kept_ids=np.zeros((1, 1, 0), np.int32),
    rewards=np.zeros(1, np.float32),
    values=np.ones(1, np.float32),
    usable=np.ones(1, bool),
    group_ids=np.zeros(1, np.int32),
  )
  zero = np.zeros((1, 1), np.float32)
  for dual_clip, want in ((0.0, 20.0), (3.0, 3.0)):
    objective = make_jitted('spopp', dual_clip=dual_clip)
    weights, _ = objective.weights(batch, zero, -np.ones(1))
    numerator, *_ = objective.loss(
      zero + np.float32(np.log(20)), batch, -np.ones(1), weights
    )
    np.testing.assert_allclose(numerator, want, rtol=1e-5)


@pytest.mark.parametrize('name', ['spopp', 'spo'])
def test_a_single_action_token_makes_no_update(make_jitted, episodes, name):
  batch, proximal, current = episodes.pack()
  mask = np.zeros_like(batch.action_mask)
  mask[tuple(np.argwhere(batch.action_mask)[0])] = True
  batch = batch._replace(action_mask=mask)
  objective = make_jitted(name)
  advantages = objective.advantages(batch)
  np.testing.assert_array_equal(advantages, 0)
  weights, _ = objective.weights(batch, proximal, advantages)
  numerator, count, _ = objective.loss(current, batch, advantages, weights)
  assert (numerator, count) == (0, 1)


def test_a03_what_is_observed_between_actions_resets_nothing(
  make_jitted, vectors
):
  # Undiscounted, every action of a trajectory has the same return.
  mask = np.array([vectors['A03_rfpp_returns']['inputs']['mask']] * 2, bool)
  zeros = np.zeros((2, 3), np.int32)
  logprobs = np.full((2, 3), -1, np.float32)
  batch = types.PackedBatch(
    tokens=zeros,
    positions=zeros + np.arange(3, dtype=np.int32),
    segment_ids=zeros + 1,
    trajectory_ids=zeros + np.array([[0], [1]], np.int32),
    action_mask=mask,
    behaviour_logprobs=logprobs,
    kept_ids=np.zeros((2, 3, 0), np.int32),
    rewards=np.array([1, 0], np.float32),
    values=np.zeros(2, np.float32),
    usable=np.ones(2, bool),
    group_ids=np.zeros(2, np.int32),
  )
  objective = make_jitted('reinforce_pp_baseline')
  advantages = objective.advantages(batch)
  weights, _ = objective.weights(batch, logprobs, advantages)
  gradient = jax.grad(
    lambda x: objective.loss(x, batch, advantages, weights)[0]
  )(logprobs)
  # Four tokens of +-1/2: deviation sqrt(1/3).
  want = np.sqrt(3) / 2
  np.testing.assert_allclose(
    gradient, [[-want, 0, -want], [want, 0, want]], rtol=1e-6
  )


@pytest.mark.parametrize(
  'name, overrides, where',
  [
    ('grpo', {'token_mask': 'window'}, 'behaviour'),
    ('grpo', {'token_mask': 'geometric_mean'}, 'behaviour'),
    ('gspo', {'token_mask': 'window'}, 'behaviour'),
    ('tetpo', {}, 'learner'),
    ('spopp', {'correction': 'icepop'}, 'learner'),
    ('spopp', {'token_mask': 'window'}, 'learner'),
  ],
)
@pytest.mark.parametrize('garbage', [np.nan, -np.inf])
def test_a_rejected_token_leaks_nothing(
  make_jitted, episodes, name, overrides, where, garbage
):
  objective = make_jitted(name, **overrides)
  batch, proximal, current = episodes.pack()
  at = tuple(np.argwhere(batch.action_mask)[0])
  if where == 'behaviour':
    batch.behaviour_logprobs[at] = garbage
  else:
    proximal[at] = current[at] = garbage
  advantages = objective.advantages(batch)
  weights, _ = objective.weights(batch, proximal, advantages)
  assert weights.importance[at] == 0
  loss = lambda x: objective.loss(x, batch, advantages, weights)[0]
  value, gradient = jax.value_and_grad(loss)(jnp.asarray(current))
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()
  assert gradient[at] == 0
  assert np.abs(gradient).sum() > 0


def test_a_negative_group_is_padding(make_jitted, episodes):
  for name in ('grpo', 'gepo', 'reinforce_pp_baseline'):
    objective = make_jitted(name)
    results = []
    for padding in (-1, 3):
      batch, proximal, _ = episodes.pack()
      batch.group_ids[5] = padding
      advantages = objective.advantages(batch)
      weights, _ = objective.weights(batch, proximal, advantages)
      results.append((advantages, *weights))
    for got, want in zip(*results, strict=True):
      np.testing.assert_array_equal(got, want)
    assert np.isfinite(results[0][1]).all()
