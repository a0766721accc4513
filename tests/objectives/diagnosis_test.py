import numpy as np
import pytest


def _compute(objective, batch, proximal, advantages=None):
  if advantages is None:
    advantages = objective.advantages(batch)
  weights, _ = objective.weights(batch, proximal, advantages)
  return objective.diagnostics(batch, advantages, proximal, weights), weights


def _ess_fraction(weights):
  weights = np.asarray(weights, float)
  return weights.sum() ** 2 / (weights**2).sum() / len(weights)


def _log_ratios(episodes):
  """Log-ratios from the sampler to the learner, of those with actions."""
  return [
    np.float64(p - b)[mask]
    for p, b, mask in zip(
      episodes.proximal, episodes.behaviour, episodes.action_mask, strict=True
    )
    if mask.any()
  ]


def test_shares_of_groups_without_signal(make_jitted, episodes):
  # Pairs (0, 1), (2, 3), (4, 5); number 2 has no action token and is nobody.
  batch, proximal, _ = episodes.pack()
  objective = make_jitted('grpo')
  for rewards, equal, zero, one in (
    ([0, 1, 0, 1, 1, 1], 2, 0, 2),
    ([0, 1, 1, 0, 0, 1], 1, 1, 0),
    ([0, 0, 1, 0.5, 0.5, 0.5], 3, 1, 0),
  ):
    batch = batch._replace(rewards=np.array(rewards, np.float32))
    got, _ = _compute(objective, batch, proximal)
    np.testing.assert_allclose(
      [
        got[f'groups_{name}_fraction']
        for name in ('equal', 'all_zero', 'all_one')
      ],
      [equal / 3, zero / 3, one / 3],
      rtol=1e-6,
    )
  single, _ = _compute(make_jitted('spopp'), batch, proximal)
  assert not [name for name in single if name.startswith('groups_')]


@pytest.mark.parametrize('name', ['spopp', 'spo'])
def test_means_of_advantages_are_over_tokens(make_jitted, episodes, name):
  batch, proximal, _ = episodes.pack()
  rng = np.random.default_rng(2)
  advantages = rng.normal(size=6).astype(np.float32)
  got, weights = _compute(make_jitted(name), batch, proximal, advantages)
  lengths = np.array([mask.sum() for mask in episodes.action_mask])
  np.testing.assert_allclose(
    got['advantage_token_mean'],
    (lengths * advantages).sum() / lengths.sum(),
    rtol=1e-5,
  )
  own = np.append(advantages, 0)[batch.trajectory_ids]
  np.testing.assert_allclose(
    got['advantage_weighted_token_mean'],
    (weights.importance * own).sum() / weights.importance.sum(),
    rtol=1e-5,
  )
  active = lengths > 0
  covariance = np.cov(lengths[active], advantages[active], ddof=0)[0, 1]
  np.testing.assert_allclose(
    [got['length_advantage_covariance'], got['length_residual']],
    [covariance, covariance / lengths[active].mean()],
    rtol=1e-4,
  )


def test_the_token_measure_leaves_no_residual_and_eq_5_is_what_is_left(
  make_jitted, episodes
):
  batch, proximal, _ = episodes.pack()
  token, _ = _compute(make_jitted('spopp'), batch, proximal)
  assert abs(token['advantage_token_mean']) < 1e-6
  trajectory, _ = _compute(make_jitted('spo'), batch, proximal)
  assert abs(trajectory['advantage_token_mean']) > 1e-2
  np.testing.assert_allclose(
    trajectory['advantage_token_mean'],
    trajectory['length_residual'],
    rtol=1e-4,
  )


@pytest.mark.parametrize(
  ('correction', 'scope'),
  [('sequence', 'group'), ('tempered', 'batch')],
)
def test_raw_weights_stand_beside_the_used_ones(
  make_jitted, episodes, correction, scope
):
  batch, proximal, _ = episodes.pack()
  objective = make_jitted('spopp', correction=correction, tempering_scope=scope)
  got, weights = _compute(objective, batch, proximal)
  raw = np.exp([steps.sum() for steps in _log_ratios(episodes)])
  np.testing.assert_allclose(got['weight_sequence_mean'], raw.mean(), rtol=1e-4)
  np.testing.assert_allclose(got['weight_sequence_max'], raw.max(), rtol=1e-4)
  np.testing.assert_allclose(
    got['weight_sequence_chi2'], (raw**2).mean() - 1, rtol=1e-4
  )
  np.testing.assert_allclose(
    got['weight_sequence_ess_fraction'], _ess_fraction(raw), rtol=1e-4
  )
  rows, columns = np.nonzero(batch.action_mask)
  ids = batch.trajectory_ids[rows, columns]
  used = np.array(
    [weights.importance[rows, columns][ids == i].mean() for i in np.unique(ids)]
  )
  np.testing.assert_allclose(
    got['weight_sequence_used_mean'], used.mean(), rtol=1e-5
  )
  np.testing.assert_allclose(
    got['weight_sequence_used_ess_fraction'], _ess_fraction(used), rtol=1e-5
  )
  # Statistics after the correction would hide what it corrected.
  gain = (
    got['weight_sequence_used_ess_fraction']
    - got['weight_sequence_ess_fraction']
  )
  assert gain > 0.05


def test_ratios_that_are_not_finite_are_counted_and_left_out(
  make_jitted, episodes
):
  batch, proximal, _ = episodes.pack()
  objective = make_jitted('spopp', correction='sequence')
  want, _ = _compute(objective, batch, proximal)
  assert want['log_ratio_nonfinite'] == 0
  gaps = np.abs(np.concatenate(_log_ratios(episodes)))
  np.testing.assert_allclose(want['log_ratio_abs_mean'], gaps.mean(), rtol=1e-4)
  row, column = np.argwhere(batch.action_mask)[0]
  proximal[row, column] = -np.inf
  got, _ = _compute(objective, batch, proximal)
  assert got['log_ratio_nonfinite'] == 1
  np.testing.assert_allclose(
    got['log_ratio_abs_mean'], gaps[1:].mean(), rtol=1e-4
  )
  kept = np.exp([steps.sum() for steps in _log_ratios(episodes)[1:]])
  np.testing.assert_allclose(
    got['weight_sequence_mean'], kept.mean(), rtol=1e-4
  )
  np.testing.assert_allclose(
    got['weight_sequence_ess_fraction'], _ess_fraction(kept), rtol=1e-4
  )


def test_equal_advantages_are_a_degenerate_batch(make_jitted, episodes):
  batch, proximal, _ = episodes.pack()
  for name, rewards, degenerate in (
    ('grpo', np.ones(6), 1),
    ('grpo', np.arange(6), 0),
    ('spopp', batch.values + 0.25, 1),
    ('spopp', batch.rewards, 0),
  ):
    got, _ = _compute(
      make_jitted(name),
      batch._replace(rewards=rewards.astype(np.float32)),
      proximal,
    )
    assert got['degenerate_batch'] == degenerate
