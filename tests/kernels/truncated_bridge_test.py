"""Under truncated decoding the exact ratio bridges to the learner's policy.

Every sequence of three tokens over four words is enumerated. The sampler's
odds inside its kept sets add up to six, so 216 draws hold each sequence just
as often as the sampler gives it: a group without sampling error. Tempering
the group's weights must give the policy between the sampler and the learner,
both restricted to what the sampler kept:

  E_sampler[rho^alpha f] / E_sampler[rho^alpha] = E_bridge[f],
  bridge(y) ~ sampler(y)^(1 - alpha) learner(y)^alpha
"""

import itertools
import types

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from spopp_jax.kernels import importance, target_ess, token_logprobs

WORDS, LENGTH, SUM, TEMPERATURE = 4, 3, 6, 0.7
DRAWS = SUM**LENGTH
# Odds after temperature, falling; those that decoding keeps add up to SUM.
ODDS = {
  'top_k': np.array([[3, 2, 1, 0.2], [3, 2, 1, 0.9]]),
  'top_p': np.array([[3, 3, 0.9, 0.5], [3, 2, 1, 0.8], [4, 2, 0.9, 0.4]]),
}
TOP_K, TOP_P = 3, 0.8


def keeps(rule, odds):
  """Which of falling odds [..., words] the rule keeps."""
  if rule == 'top_k':
    return np.broadcast_to(np.arange(WORDS) < TOP_K, odds.shape)
  before = np.cumsum(odds, axis=-1) - odds
  return before / odds.sum(axis=-1, keepdims=True) < TOP_P


def make_world(rule):
  """Policies by context, the sequences that can be drawn, and their scores."""
  rng = np.random.default_rng(0)
  sequences = np.array(list(itertools.product(range(WORDS), repeat=LENGTH)))
  # A context is what was drawn before: 1 + 4 + 16 of them.
  place = np.cumsum([0, *(WORDS**depth for depth in range(LENGTH))])
  number = lambda prefix: int(prefix @ WORDS ** np.arange(prefix.size))
  contexts = np.array(
    [
      [place[depth] + number(y[:depth]) for depth in range(LENGTH)]
      for y in sequences
    ]
  )
  patterns = ODDS[rule][rng.integers(0, len(ODDS[rule]), place[-1])]
  shuffle = rng.permuted(np.tile(np.arange(WORDS), (place[-1], 1)), axis=1)
  odds, kept = (
    np.take_along_axis(x, shuffle, axis=1)
    for x in (patterns, keeps(rule, patterns))
  )
  possible = kept[contexts, sequences].all(axis=1)
  return types.SimpleNamespace(
    sampler=odds,
    # It drifts, and gives more to what the sampler cut off.
    learner=odds * np.exp(rng.normal(np.where(kept, 0, 1), 0.8)),
    kept=kept,
    sequences=sequences[possible],
    contexts=contexts[possible],
  )


def sequence_sums(world, values):
  """Sums values [n, LENGTH + 1] over each sequence's drawn tokens."""
  number = len(world.sequences)
  ids = np.broadcast_to(np.arange(number)[:, None], values.shape)
  return importance.sequence_log_weights(
    values, mask_of(world), ids, num_trajectories=number
  )


def mask_of(world):
  shape = (len(world.sequences), LENGTH + 1)
  return np.broadcast_to(np.arange(LENGTH + 1) > 0, shape)


def token_scores(world, odds, *, exact):
  """Log-probs [n, LENGTH + 1] of the drawn tokens under a policy."""
  first = lambda x, fill: np.insert(x, 0, fill, axis=1)
  words = np.arange(WORDS)
  ids = np.where(world.kept[world.contexts], words, -1)
  hidden = np.eye(len(odds))[world.contexts]
  return token_logprobs.token_logprobs(
    np.append(hidden, 0 * hidden[:, :1], axis=1).astype(np.float32),
    (TEMPERATURE * np.log(odds)).T.astype(np.float32),
    first(world.sequences, 0).astype(np.int32),
    mask_of(world),
    first(ids, -1).astype(np.int32)[..., : WORDS if exact else 0],
    temperature=TEMPERATURE,
    chunk_tokens=40,
  ).logprobs


def log_ratios(world, *, exact):
  """Sequence log-ratios [n] of the learner over the sampler."""
  learner = token_scores(world, world.learner, exact=exact)
  sampler = token_scores(world, world.sampler, exact=exact)
  return sequence_sums(
    world, importance.log_ratio(learner, sampler, mask_of(world))
  )


def restricted(world, odds):
  """A policy restricted to the kept sets: probabilities [n], by hand."""
  inside = np.where(world.kept, odds, 0)
  inside /= inside.sum(axis=1, keepdims=True)
  return inside[world.contexts, world.sequences].prod(axis=1)


def tempered(world, ratios, alpha):
  """E[rho^alpha 1_y] / E[rho^alpha] of every sequence y over all draws."""
  counts = np.rint(restricted(world, world.sampler) * DRAWS).astype(int)
  draws = np.repeat(np.arange(len(counts)), counts)
  assert len(draws) == DRAWS
  weights = target_ess.tempered_weights(
    np.asarray(ratios)[draws], np.ones(DRAWS, bool), alpha, scale='sum_one'
  )
  return np.bincount(draws, weights, minlength=len(counts)), draws


def bridge(world, alpha):
  mixed = (
    restricted(world, world.sampler) ** (1 - alpha)
    * restricted(world, world.learner) ** alpha
  )
  return mixed / mixed.sum()


@pytest.fixture(scope='module', params=list(ODDS))
def world(request):
  return make_world(request.param)


@pytest.fixture(scope='module')
def ratios(world):
  both = jax.jit(
    lambda: {exact: log_ratios(world, exact=exact) for exact in (True, False)}
  )
  return jax.tree.map(np.asarray, both())


def test_the_world_is_what_the_others_assume(world):
  sampler, learner = (
    restricted(world, odds) for odds in (world.sampler, world.learner)
  )
  np.testing.assert_allclose([sampler.sum(), learner.sum()], 1)
  np.testing.assert_allclose(
    sampler * DRAWS, np.rint(sampler * DRAWS), atol=1e-9
  )
  assert np.abs(sampler - learner).sum() > 0.3
  assert 8 <= len(world.sequences) < WORDS**LENGTH
  lost = world.sampler[~world.kept].sum() / world.sampler.sum()
  assert 0.05 < lost < 0.3


def test_scores_of_kept_sets_are_the_restricted_policies(world):
  for odds in (world.sampler, world.learner):
    scores = jax.jit(
      lambda odds=odds: sequence_sums(
        world, token_scores(world, odds, exact=True)
      )
    )()
    np.testing.assert_allclose(
      np.exp(scores), restricted(world, odds), rtol=1e-5
    )


def test_the_exact_ratio_has_mean_one_and_the_proxy_has_not(world, ratios):
  sampler = restricted(world, world.sampler)
  means = {exact: sampler @ np.exp(ratios[exact]) for exact in ratios}
  assert means[True] == pytest.approx(1, abs=1e-5)
  assert means[False] < 0.9
  np.testing.assert_allclose(
    sampler * np.exp(ratios[True]),
    restricted(world, world.learner),
    rtol=1e-5,
  )


@pytest.mark.parametrize('alpha', [0.0, 0.35, 0.7, 1.0])
def test_the_bridge_holds_for_every_function(world, ratios, alpha):
  # Indicators of single sequences span all functions of a sequence.
  want = bridge(world, alpha)
  np.testing.assert_allclose(
    tempered(world, ratios[True], alpha)[0], want, rtol=2e-5
  )
  gap = np.abs(tempered(world, ratios[False], alpha)[0] - want).sum()
  if alpha == 0:
    assert gap < 1e-5  # both are the sampler
  else:
    assert gap > 0.1 * alpha


def test_the_bridge_holds_at_the_target_ess(world, ratios):
  exponents = {}
  for exact in (True, False):
    _, draws = tempered(world, ratios[exact], 1.0)
    exponents[exact] = float(
      target_ess.tempering_exponent(
        ratios[exact][draws], np.ones(DRAWS, bool), target_ess_fraction=0.85
      )
    )
  alpha = exponents[True]
  assert 0.1 < alpha < 0.95
  assert abs(exponents[False] - alpha) > 1e-3
  got, _ = tempered(world, ratios[True], alpha)
  np.testing.assert_allclose(got, bridge(world, alpha), rtol=2e-5)
  sampler = restricted(world, world.sampler)
  weights = got / sampler
  assert 1 / (sampler @ weights**2) == pytest.approx(0.85, abs=1e-4)


def _chi2(policy, of):
  return policy @ (policy / of) - 1


def test_discrepancy_falls_and_dispersion_rises_with_alpha(world, ratios):
  sampler, learner = (
    restricted(world, odds) for odds in (world.sampler, world.learner)
  )
  bridges = [
    tempered(world, ratios[True], alpha)[0] for alpha in np.linspace(0, 1, 9)
  ]
  discrepancies = [_chi2(learner, of) for of in bridges]
  dispersions = [_chi2(between, sampler) for between in bridges]
  assert np.all(np.diff(discrepancies) < -1e-4)
  assert np.all(np.diff(dispersions) > 1e-4)
  # At the ends stand the sampler and the learner.
  np.testing.assert_allclose(
    [discrepancies[0], dispersions[-1]],
    [_chi2(learner, sampler), _chi2(learner, sampler)],
    rtol=1e-4,
  )
  np.testing.assert_allclose([discrepancies[-1], dispersions[0]], 0, atol=1e-5)
  for seed in range(5):
    rewards = np.random.default_rng(seed).random(len(learner))
    for between, discrepancy in zip(bridges, discrepancies, strict=True):
      error = abs((between - learner) @ rewards)
      assert error <= rewards.max() * np.sqrt(max(discrepancy, 0)) + 1e-5


@jax.jit
@jax.vmap
def _eight(log_ratios, alpha):
  return target_ess.tempered_weights(
    log_ratios, np.ones(8, bool), alpha, scale='sum_one'
  )


@hypothesis.given(
  st.lists(st.floats(-3, 3, width=32), min_size=8, max_size=8), st.booleans()
)
@hypothesis.settings(deadline=None, max_examples=40)
def test_both_are_monotone_for_any_policy_and_strictly_unless_equal(
  log_odds, equal
):
  # The sampler is uniform over eight words: each is drawn once.
  log_odds = np.zeros(8) if equal else np.array(log_odds)
  learner = np.exp(log_odds) / np.exp(log_odds).sum()
  ratios = np.float32(np.log(8 * learner))
  alphas = np.linspace(0, 1, 9, dtype=np.float32)
  bridges = np.float64(_eight(np.tile(ratios, (9, 1)), alphas))
  discrepancies = np.array([_chi2(learner, between) for between in bridges])
  dispersions = np.array(
    [_chi2(between, np.full(8, 1 / 8)) for between in bridges]
  )
  if equal:
    np.testing.assert_allclose([*discrepancies, *dispersions], 0, atol=1e-6)
    return
  rounding = 1e-5 * (1 + discrepancies.max() + dispersions.max())
  assert np.all(np.diff(discrepancies) <= rounding)
  assert np.all(np.diff(dispersions) >= -rounding)
  if np.ptp(log_odds) > 0.5:
    assert discrepancies[0] > discrepancies[4] > discrepancies[-1]
    assert dispersions[0] < dispersions[4] < dispersions[-1]
