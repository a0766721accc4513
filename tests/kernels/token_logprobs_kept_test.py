"""Truncated decoding: log-probs over the ids that the sampler kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import importance, token_logprobs

SCORE = jax.jit(
  functools.partial(
    token_logprobs.token_logprobs, chunk_tokens=6, with_entropy=True
  ),
  static_argnames='temperature',
)


def score_one(logits, token, kept_ids, temperature=1.0):
  """Scores one token from its logits [V]; returns scalars."""
  logits = np.asarray(logits, np.float32)
  scores = SCORE(
    np.stack([logits, logits])[None],
    np.eye(len(logits), dtype=np.float32),
    np.array([[0, token]], np.int32),
    np.array([[False, True]]),
    np.tile(np.array(kept_ids, np.int32).reshape(1, 1, -1), (1, 2, 1)),
    temperature=temperature,
  )
  return token_logprobs.TokenScores(*(float(x[0, 1]) for x in scores))


def entropy(probabilities):
  return -(probabilities * np.log(probabilities)).sum()


def test_by_hand():
  logits = np.log([4, 3, 2, 1])
  scores = score_one(logits, 1, [0, 1, -1])
  assert scores == pytest.approx(
    (np.log(3 / 7), np.log(0.7), entropy(np.array([4, 3]) / 7)), abs=1e-6
  )
  # Temperature comes first: odds 16, 9, 4, 1.
  scores = score_one(logits, 2, [2, 0, 3], temperature=0.5)
  assert scores == pytest.approx(
    (np.log(4 / 21), np.log(21 / 30), entropy(np.array([16, 4, 1]) / 21)),
    abs=1e-6,
  )


@pytest.mark.parametrize('kept_ids', [[], [-1, -1], [3, 0, 2, 1]])
def test_no_ids_and_all_ids_are_the_whole_vocabulary(kept_ids):
  scores = score_one(np.log([4, 3, 2, 1]), 3, kept_ids)
  probabilities = np.array([4, 3, 2, 1]) / 10
  assert scores == pytest.approx(
    (np.log(0.1), 0, entropy(probabilities)), abs=1e-6
  )


def test_a_single_id_is_certain():
  assert score_one(np.log([4, 3, 2, 1]), 2, [-1, 2, -1]) == pytest.approx(
    (0, np.log(0.2), 0), abs=1e-6
  )


def test_a_token_that_was_not_kept_is_not_a_number():
  scores = score_one(np.log([4, 3, 2, 1]), 3, [0, 1, 2])
  assert np.isnan(scores.logprobs)
  assert np.isfinite(scores.entropy)


def test_ids_far_below_the_others_keep_their_digits():
  # Beyond float32's exp: the kept set has its own largest logit.
  scores = score_one([1e4, 1.0, 0.0], 1, [1, 2])
  assert scores.logprobs == pytest.approx(-np.log1p(np.exp(-1)), rel=1e-6)
  assert scores.log_kept_mass == pytest.approx(-1e4, rel=1e-3)
  total = lambda logits: sum(
    x.sum()
    for x in token_logprobs.token_logprobs(
      logits,
      jnp.eye(3),
      np.array([[0, 1]], np.int32),
      np.array([[False, True]]),
      np.array([[[-1, -1], [1, 2]]], np.int32),
      chunk_tokens=1,
      with_entropy=True,
    )
  )
  gradient = jax.jit(jax.grad(total))(jnp.array([[[1e4, 1.0, 0.0]] * 2]))
  p = 1 / (1 + np.exp(-1))
  # By the logits that were kept: d log p = [1 - p, p - 1], d log mass =
  # [p, 1 - p] and dH = p (1 - p) [-1, 1].
  np.testing.assert_allclose(
    gradient[0, 0], [-1, 1 - p * (1 - p), p * (1 - p)], atol=1e-5
  )
  np.testing.assert_array_equal(gradient[0, 1], 0)


def test_same_weights_same_token_under_truncation(cases):
  case = cases['TRUNC-01']
  given, expected = case['input'], case['expected']
  behaviour = np.array(given['behaviour_probs'])
  kept, token = given['kept_ids'], given['token']
  sampled = np.log(behaviour[token] / behaviour[kept].sum())
  logits = np.log(given['learner_probs'])
  exact = score_one(logits, token, kept)
  ratio = np.exp(exact.logprobs - sampled)
  assert ratio == pytest.approx(expected['ratio_exact'], abs=1e-6)
  assert np.exp(exact.log_kept_mass) == pytest.approx(
    expected['kept_mass'], abs=1e-6
  )
  whole = score_one(logits, token, [])
  assert np.exp(whole.logprobs - sampled) == pytest.approx(
    expected['ratio_full_vocab_over_processed'], abs=1e-6
  )


def test_same_weights_same_token_under_temperature(cases):
  case = cases['TEMP-01']
  given, expected = case['input'], case['expected']
  at = lambda temperature: (
    score_one(given['logits'], given['token'], [], temperature).logprobs
  )
  assert at(given['temperature']) == pytest.approx(
    expected['logp_at_T'], abs=1e-6
  )
  assert at(1.0) == pytest.approx(expected['logp_at_1'], abs=1e-6)
  assert np.exp(at(1.0) - expected['logp_at_T']) == pytest.approx(
    expected['ratio_wrong'], abs=1e-6
  )


def decode(rng, logits, temperature, top_p, top_k):
  """A plain sampler: returns token, log-prob as sampled, and kept ids."""
  scaled = logits / temperature
  probabilities = np.exp(scaled - scaled.max())
  probabilities /= probabilities.sum()
  order = np.argsort(-probabilities)
  if top_k:
    order = order[:top_k]
  before = np.cumsum(probabilities[order]) - probabilities[order]
  kept = order[before / probabilities[order].sum() < top_p]
  kept_probabilities = probabilities[kept] / probabilities[kept].sum()
  choice = rng.choice(len(kept), p=kept_probabilities)
  return kept[choice], np.log(kept_probabilities[choice]), kept


@pytest.mark.parametrize('temperature', [0.6, 1.0, 1.7])
def test_the_ratio_is_one_on_a_grid_of_decoding_parameters(temperature):
  batch, length, width, vocabulary = 3, 12, 8, 40
  rng = np.random.default_rng(0)
  hidden = rng.normal(0, 1, (batch, length, width))
  matrix = rng.normal(0, 1, (vocabulary, width))
  mask = np.broadcast_to(np.arange(length) > 0, (batch, length))
  for top_p in (1.0, 0.95, 0.5):
    for top_k in (0, 1, 7):
      tokens = np.zeros((batch, length), np.int32)
      behaviour = np.zeros((batch, length), np.float32)
      kept = np.full((batch, length, vocabulary), -1, np.int32)
      for row, column in zip(*np.nonzero(mask), strict=True):
        tokens[row, column], behaviour[row, column], ids = decode(
          rng, matrix @ hidden[row, column - 1], temperature, top_p, top_k
        )
        if top_p < 1 or top_k:
          kept[row, column, : len(ids)] = ids
      scores = SCORE(
        hidden.astype(np.float32),
        matrix.astype(np.float32),
        tokens,
        mask,
        kept,
        temperature=temperature,
      )
      gaps = importance.log_ratio(scores.logprobs, behaviour, mask)
      np.testing.assert_allclose(np.exp(gaps), 1, atol=1e-5)
      # Without the kept ids every ratio would be off by the kept mass.
      mass = np.exp(scores.log_kept_mass[mask])
      assert mass.min() < 0.97 if top_p < 1 or top_k else (mass == 1).all()
