"""Truncated decoding: what is drawn from what, and what it costs others."""

import dataclasses

import engine_world
import numpy as np
import pytest
from engine_world import (
  CONFIG,
  CONTEXT,
  END,
  SAMPLING,
  TURN,
  Episode,
  make_episode,
  make_parameters,
  play,
)
from truncation_by_hand import by_hand

from spopp_jax import types
from spopp_jax.sampler import engine as engine_lib

V = CONFIG.vocab_size


@pytest.fixture(scope='module')
def engine():
  engine = engine_lib.DecodeEngine(
    CONFIG,
    num_slots=8,
    max_context=CONTEXT,
    max_turn_tokens=TURN,
    stop_ids=(END,),
    feed_buckets=(8,),
    shortest_piece=CONTEXT,
  )
  engine.load(make_parameters(), version=3, checksum='abc')
  return engine


def truncating(temperature=1.0, **limits):
  return dataclasses.replace(SAMPLING, temperature=temperature, **limits)


# Together in one batch, an untruncated slot among them.
MIXED = (
  SAMPLING,
  truncating(top_k=1),
  truncating(0.7, top_k=3),
  truncating(1.5, top_p=0.8),
  truncating(top_k=4, top_p=0.6),
  truncating(0.7, top_p=1e-6),
  truncating(min_p=0.3),
  truncating(1.5, top_k=2**32 - 1, top_p=0.95),
)


def sets_of(trajectory):
  kept = trajectory.kept
  return [piece.tolist() for piece in np.split(kept.ids, kept.offsets[1:-1])]


def test_every_token_comes_from_its_recorded_set(engine):
  # The last turn of some is cut by the context.
  shapes = ((3, 2, 5), (8, 1, 3, 2), (CONTEXT - 2,), (1, 1, 1, 1))
  sizes = {sampling: set() for sampling in MIXED}
  for seed in range(4):
    episodes = {
      slot: make_episode(10 * seed + slot, shapes[(seed + slot) % 4], sampling)
      for slot, sampling in enumerate(MIXED)
    }
    play(engine, episodes)
    for episode in episodes.values():
      sampling = episode.sampling
      if not sampling.truncated:
        assert all(turn.kept is None for turn in episode.turns)
        continue
      trajectory = episode.trajectory()
      logits = engine_world.action_logits(
        CONFIG, make_parameters(), trajectory, CONTEXT
      )
      logprobs = trajectory.behaviour_logprobs[trajectory.action_mask]
      tokens = trajectory.tokens[trajectory.action_mask]
      mass = np.exp(trajectory.kept.log_mass)
      rows = zip(
        tokens, logprobs, logits, sets_of(trajectory), mass, strict=True
      )
      for token, logprob, row, ids, left in rows:
        expected, values = by_hand(
          row,
          sampling.temperature,
          sampling.top_k,
          sampling.top_p,
          sampling.min_p,
        )
        assert ids == sorted(expected)
        whole = engine_world.renormalised(
          row, np.array(ids), range(V), sampling.temperature
        )
        np.testing.assert_allclose(left, np.exp(whole).sum(), rtol=1e-4)
        np.testing.assert_allclose(
          logprob, values[expected.index(token)], atol=1e-5
        )
        sizes[sampling].add(len(ids))
  assert sizes[MIXED[1]] == sizes[MIXED[5]] == {1}
  assert sizes[MIXED[2]] == {3}
  assert len(sizes[MIXED[3]]) > 1
  assert len(sizes[MIXED[4]]) > 1
  assert max(sizes[MIXED[4]]) <= 4
  assert len(sizes[MIXED[6]]) > 1
  assert max(sizes[MIXED[7]]) > 4


def test_each_turn_has_its_own_sets(engine):
  episode = make_episode(1, (3, 2, 5), truncating(top_k=3))
  play(engine, {0: episode})
  for turn in episode.turns:
    kept = turn.kept
    assert kept.offsets.tolist() == [*range(0, 3 * len(turn.tokens) + 1, 3)]
    assert (kept.ids.dtype, kept.offsets.dtype) == (np.int32, np.int64)


@pytest.mark.parametrize('index', range(len(MIXED)))
def test_truncation_is_each_slots_own(engine, index):
  """Mates that truncate more, less or not at all change no token and no set."""
  alone = make_episode(9, (5, 3, 6), MIXED[index])
  play(engine, {0: alone})
  together = make_episode(9, (5, 3, 6), MIXED[index])
  mates = {
    slot: make_episode(50 + slot, (5, 2, 1), MIXED[(index + slot) % 8])
    for slot in range(1, 7)
  }
  play(engine, {7: together, **mates})
  assert together.tokens == alone.tokens
  first, second = alone.trajectory(), together.trajectory()
  if MIXED[index].truncated:
    np.testing.assert_array_equal(first.kept.ids, second.kept.ids)
    np.testing.assert_array_equal(first.kept.offsets, second.kept.offsets)
  np.testing.assert_allclose(
    first.behaviour_logprobs, second.behaviour_logprobs, atol=1e-5
  )


def test_first_tokens_follow_the_renormalised_probabilities(engine):
  prompt = np.array([3, 1, 6], np.int32)
  sampling = types.SamplingParams(0.7, top_k=3, max_turn_tokens=1)
  counts = np.zeros(V)
  for start in range(0, 1200, 8):
    episodes = {i: Episode(start + i, [prompt], sampling) for i in range(8)}
    play(engine, episodes)
    for episode in episodes.values():
      counts[episode.turns[0].tokens[0]] += 1
  (logits,) = engine_world.action_logits(
    CONFIG, make_parameters(), episodes[0].trajectory(), CONTEXT
  )
  kept, logprobs = by_hand(logits, 0.7, 3, 1.0)
  assert counts[kept].sum() == 1200
  expected = 1200 * np.exp(logprobs)
  # Beyond 18.42 falls one of 10,000 samples with 2 degrees of freedom.
  assert ((counts[kept] - expected) ** 2 / expected).sum() < 18.42


def test_a_top_p_that_float32_rounds_to_one_is_still_truncated(engine):
  episode = make_episode(2, (3, 2), truncating(top_p=1 - 1e-12))
  play(engine, {0: episode})
  for turn in episode.turns:
    assert np.diff(turn.kept.offsets).tolist() == [V] * len(turn.tokens)


def test_broken_parameters_show_as_nan(engine):
  good = make_parameters()
  broken = {k: np.full_like(v, np.nan) for k, v in good.items()}
  engine.load(broken, version=4, checksum='')
  spoilt = {i: make_episode(i, (3,), s) for i, s in enumerate(MIXED)}
  play(engine, spoilt)
  engine.load(good, version=5, checksum='')
  for episode in spoilt.values():
    assert np.isnan(episode.turns[0].logprobs).all()


def test_similar_limits_share_a_program(engine):
  """Up to 1, 2 or 4 tokens, or the whole vocabulary of 7; or no limit."""

  def programs(*samplings):
    play(engine, {i: make_episode(i, (3,), s) for i, s in enumerate(samplings)})
    return engine._decode._cache_size()

  for number, limits in enumerate(
    [{}, {'top_k': 1}, {'top_k': 2}, {'top_k': 3}, {'top_k': 5}]
  ):
    assert programs(truncating(**limits)) <= 5, number
  known = programs(SAMPLING)
  assert known == 5
  for top_k in (4, 7, 8, 2**32 - 1):
    assert programs(truncating(top_k=top_k, top_p=0.5), SAMPLING) == known
  assert programs(truncating(top_p=0.5), truncating(top_k=2)) == known
