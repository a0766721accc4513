import dataclasses
import functools

import jax
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

from spopp_jax import types
from spopp_jax.learner import forward, packing
from spopp_jax.models import parameters
from spopp_jax.sampler import engine as engine_lib


@pytest.fixture(scope='module')
def shared_engine():
  return engine_lib.DecodeEngine(
    CONFIG,
    num_slots=8,
    max_context=CONTEXT,
    max_turn_tokens=TURN,
    stop_ids=(END,),
    feed_buckets=(4, 8),
    shortest_piece=16,
  )


@pytest.fixture
def engine(shared_engine):
  """The shared one, so that shapes compile once; no slot is open."""
  for slot in range(shared_engine.num_slots):
    if slot in shared_engine._slots:
      shared_engine.close(slot)
  shared_engine.load(make_parameters(), version=3, checksum='abc')
  return shared_engine


def learner_logprobs(trajectories, temperature, params=None):
  batch = packing.pack(
    trajectories,
    [0.0] * len(trajectories),
    num_slots=8,
    minibatches=1,
    row_length=64,
    row_buckets=(4,),
  )
  rows = jax.tree.map(lambda x: x[0] if x.ndim >= 3 else x, batch)
  score = jax.jit(
    functools.partial(
      forward.packed_logprobs,
      parameters.graph(CONFIG)[0],
      forward.Settings(temperature=temperature, chunk_tokens=64),
    )
  )
  got = np.asarray(score(params or make_parameters(), rows))
  return packing.unpack(batch, got[None], [len(t.tokens) for t in trajectories])


@pytest.mark.parametrize('temperature', [0.7, 1.0, 1.5])
def test_logprobs_are_those_of_the_learner(engine, temperature):
  sampling = dataclasses.replace(SAMPLING, temperature=temperature)
  episodes = {
    slot: make_episode(slot, lengths, sampling)
    for slot, lengths in {
      0: (3, 2, 5),
      1: (13, 1),  # longer than the largest bucket
      3: (1,),
      6: (8, 4, 4, 1),
      7: (20, 7),
    }.items()
  }
  play(engine, episodes)
  trajectories = [e.trajectory() for e in episodes.values()]
  expected = learner_logprobs(trajectories, temperature)
  for trajectory, logprobs in zip(trajectories, expected, strict=True):
    np.testing.assert_allclose(
      trajectory.behaviour_logprobs, logprobs, atol=1e-4
    )
    assert (trajectory.behaviour_logprobs[trajectory.action_mask] < 0).all()


@pytest.fixture(scope='module')
def mates():
  return [
    make_episode(50, (2, 3, 2, 1)),
    make_episode(51, (17,), dataclasses.replace(SAMPLING, temperature=3.0)),
    make_episode(52, (9, 9)),
  ]


def test_a_turn_ends_with_the_first_of_several_stop_ids(engine):
  other = engine_lib.DecodeEngine(
    CONFIG,
    num_slots=8,
    max_context=CONTEXT,
    max_turn_tokens=TURN,
    stop_ids=(2, END),
    feed_buckets=(4, 8),
    shortest_piece=16,
  )
  other.load(make_parameters(), version=3, checksum='abc')
  ended = []
  for seed in range(30):
    one, two = make_episode(seed, (3,)), make_episode(seed, (3,))
    play(engine, {0: one})
    play(other, {0: two})
    (tokens,), (turn,) = one.tokens, two.turns
    stops = [i for i, token in enumerate(tokens) if token in (2, END)]
    expected = tokens[: stops[0] + 1] if stops else tokens
    assert turn.tokens.tolist() == expected
    assert turn.ended == bool(stops)
    ended.append(expected[-1] if stops else None)
  # By either of the two, and not at all.
  assert {2, END, None} <= set(ended)


@pytest.mark.parametrize('stop_ids', [(), (END, 7), (-1,)])
def test_stop_ids_that_are_no_tokens_are_refused(stop_ids):
  with pytest.raises(ValueError, match=r'stop_ids .* in \[0, 7\)'):
    engine_lib.DecodeEngine(
      CONFIG,
      num_slots=1,
      max_context=CONTEXT,
      max_turn_tokens=TURN,
      stop_ids=stop_ids,
    )


@pytest.mark.parametrize('slot', [0, 7])
def test_batch_mates_and_slot_change_nothing(engine, mates, slot):
  alone = make_episode(9, (5, 3, 6))
  play(engine, {0: alone})
  together = make_episode(9, (5, 3, 6))
  others = [dataclasses.replace(mate, turns=[]) for mate in mates]
  play(engine, {slot: together, **dict(zip((3, 4, 1), others, strict=True))})
  assert together.tokens == alone.tokens
  np.testing.assert_allclose(
    together.trajectory().behaviour_logprobs,
    alone.trajectory().behaviour_logprobs,
    atol=1e-5,
  )


def test_an_idle_episode_is_left_alone(engine):
  whole = make_episode(4, (3, 4, 2))
  play(engine, {2: whole})
  # The same with pauses in which its neighbours play.
  engine.open(2, seed=4, sampling=SAMPLING)
  tokens = []
  for turn, text in enumerate(whole.texts):
    play(engine, {1: make_episode(turn, (5, 2)), 3: make_episode(77, (6,))})
    engine.append(2, text)
    (got,) = engine.step()
    tokens.append(got.tokens.tolist())
  assert tokens == whole.tokens


def test_a_reopened_slot_starts_clean(engine):
  fresh = make_episode(4, (3, 2))
  play(engine, {2: fresh})
  play(engine, {2: make_episode(5, (20, 5))})
  again = make_episode(4, (3, 2))
  play(engine, {2: again})
  assert again.tokens == fresh.tokens
  np.testing.assert_allclose(
    again.trajectory().behaviour_logprobs,
    fresh.trajectory().behaviour_logprobs,
    atol=1e-6,
  )
  # Also when it was closed in the middle of a turn, its queue half fed.
  engine.open(2, seed=1, sampling=SAMPLING)
  engine.append(2, np.ones(15, np.int32))
  assert engine.step() == []
  engine.close(2)
  assert engine.step() == []
  again = make_episode(4, (3, 2))
  play(engine, {2: again})
  assert again.tokens == fresh.tokens


def test_broken_parameters_leave_nothing_behind(engine):
  before = make_episode(4, (3, 2))
  play(engine, {2: before})
  good = make_parameters()
  broken = {k: np.full_like(v, np.nan) for k, v in good.items()}
  engine.load(broken, version=4, checksum='')
  spoilt = make_episode(4, (20,))
  play(engine, {2: spoilt})
  assert np.isnan(spoilt.turns[0].logprobs).all()
  engine.load(good, version=5, checksum='')
  after = make_episode(4, (3, 2))
  play(engine, {2: after})
  assert after.tokens == before.tokens


def test_a_seed_repeats_and_seeds_differ(engine):
  seeds = [0, 1, 2, 2**32 - 1]
  first, second = (
    {
      i: Episode(seed, [np.arange(4, dtype=np.int32)] + [np.array([1])] * 2)
      for i, seed in enumerate(seeds)
    }
    for _ in range(2)
  )
  play(engine, first)
  play(engine, second)
  tokens = [episode.tokens for episode in first.values()]
  assert tokens == [episode.tokens for episode in second.values()]
  assert all(a != b for i, a in enumerate(tokens) for b in tokens[:i])


# Beyond it a chi-square statistic of 6 degrees of freedom falls in one of
# 10,000 samples.
CHI_SQUARE = 27.86


def chi_square(counts, probabilities):
  expected = counts.sum() * probabilities
  return float(((counts - expected) ** 2 / expected).sum())


def test_first_tokens_follow_the_tempered_softmax(engine):
  prompt = np.array([3, 1, 6], np.int32)
  sampling = types.SamplingParams(temperature=0.7, max_turn_tokens=1)
  counts = np.zeros(7)
  for start in range(0, 1600, 8):
    episodes = {i: Episode(start + i, [prompt], sampling) for i in range(8)}
    play(engine, episodes)
    for episode in episodes.values():
      counts[episode.turns[0].tokens[0]] += 1

  def softmax(temperature):
    following = [
      dataclasses.replace(
        episodes[0].trajectory(),
        tokens=np.append(prompt, token).astype(np.int32),
        action_mask=np.array([False, False, False, True]),
        behaviour_logprobs=np.zeros(4, np.float32),
      )
      for token in range(7)
    ]
    scored = learner_logprobs(following, temperature)
    return np.exp([logprobs[-1] for logprobs in scored])

  np.testing.assert_allclose(softmax(0.7).sum(), 1, rtol=1e-5)
  assert chi_square(counts, softmax(0.7)) < CHI_SQUARE
  # The sample is large enough to tell another temperature.
  assert chi_square(counts, softmax(1.0)) > CHI_SQUARE


def test_positions_draw_independently(engine):
  # Without an embedding every token is as likely as any other.
  params = make_parameters()
  params['model.embed_tokens.weight'][:] = 0
  engine.load(params, version=4, checksum='')
  pairs = np.zeros(7)
  for start in range(0, 800, 8):
    episodes = {
      i: Episode(start + i, [np.array([1], np.int32)]) for i in range(8)
    }
    play(engine, episodes)
    for episode in episodes.values():
      (turn,) = episode.turns
      np.testing.assert_allclose(turn.logprobs, -np.log(7), rtol=1e-5)
      for a, b in zip(turn.tokens[:-1], turn.tokens[1:], strict=True):
        pairs[(b - a) % 7] += 1
  # The end token never comes first in a pair; the other 6 do, so that no
  # difference is more likely than another.
  assert pairs.sum() > 1500
  assert chi_square(pairs, np.full(7, 1 / 7)) < CHI_SQUARE


def test_a_turn_ends_with_the_end_token_or_at_its_limit(engine):
  lengths = set()
  for start in range(0, 64, 8):
    limits = [1 + i % TURN for i in range(8)]
    # Hot enough that the end token comes often.
    sampling = dataclasses.replace(SAMPLING, temperature=4.0)
    episodes = {
      i: make_episode(
        start + i, (3,), dataclasses.replace(sampling, max_turn_tokens=limit)
      )
      for i, limit in enumerate(limits)
    }
    play(engine, episodes)
    for episode, limit in zip(episodes.values(), limits, strict=True):
      (turn,) = episode.turns
      assert END not in turn.tokens[:-1]
      assert turn.ended == (turn.tokens[-1] == END)
      assert 1 <= len(turn.tokens) <= limit
      assert turn.ended or len(turn.tokens) == limit
      assert len(turn.logprobs) == len(turn.tokens)
      assert turn.tokens.dtype == np.int32
      assert turn.logprobs.dtype == np.float32
      lengths.add((len(turn.tokens), turn.ended))
  assert lengths >= {(1, True), (1, False), (4, True), (4, False)}


@pytest.mark.parametrize('left', [1, 2, 3])
def test_the_context_bounds_a_turn(engine, left):
  episodes = {i: make_episode(i, (CONTEXT - left,)) for i in range(8)}
  play(engine, episodes, close=False)
  full = 0
  for slot, episode in episodes.items():
    (turn,) = episode.turns
    assert turn.ended or len(turn.tokens) == left
    assert engine.context_left(slot) == left - len(turn.tokens)
    full += len(turn.tokens) == left
    if len(turn.tokens) == left:
      with pytest.raises(ValueError, match='0 of 32 are left'):
        engine.append(slot, np.array([1]))
  assert full > 0
  trajectories = [e.trajectory() for e in episodes.values()]
  for trajectory, logprobs in zip(
    trajectories, learner_logprobs(trajectories, 1.0), strict=True
  ):
    np.testing.assert_allclose(
      trajectory.behaviour_logprobs, logprobs, atol=1e-4
    )


def test_context_left_counts_queued_and_generated(engine):
  engine.open(0, seed=0, sampling=SAMPLING)
  assert engine.context_left(0) == CONTEXT
  engine.append(0, np.ones(3, np.int32))
  assert engine.context_left(0) == CONTEXT - 3
  engine.append(0, np.ones(2, np.int32))
  (turn,) = engine.step()
  assert engine.context_left(0) == CONTEXT - 5 - len(turn.tokens)
  engine.append(0, np.ones(1, np.int32))
  assert engine.context_left(0) == CONTEXT - 6 - len(turn.tokens)


def test_tokens_that_leave_no_room_are_refused_and_not_queued(engine):
  engine.open(0, seed=0, sampling=SAMPLING)
  with pytest.raises(ValueError, match='32 tokens leave no room in slot 0'):
    engine.append(0, np.ones(CONTEXT, np.int32))
  assert engine.context_left(0) == CONTEXT
  assert engine.step() == []
  with pytest.raises(ValueError, match='slot 0 needs at least one token'):
    engine.append(0, np.zeros(0, np.int32))


def test_a_long_queue_takes_several_calls_and_holds_up_nobody(engine):
  long, short = make_episode(1, (21,)), make_episode(2, (3,))
  for slot, episode in ((0, long), (1, short)):
    engine.open(slot, seed=episode.seed, sampling=SAMPLING)
    engine.append(slot, episode.texts[0])
  turns = [[turn.slot for turn in engine.step()] for _ in range(4)]
  assert turns == [[1], [], [0], []]


@pytest.mark.parametrize(
  'change, words',
  [
    ({'temperature': 0.0}, r'temperature \(0.0\)'),
    ({'temperature': -1.0}, r'temperature \(-1.0\)'),
    ({'temperature': float('nan')}, r'temperature \(nan\)'),
    ({'temperature': float('inf')}, r'temperature \(inf\)'),
    ({'top_p': 0.0}, r'top_p \(0.0\) must be in \(0, 1\]'),
    ({'top_p': 1.1}, r'top_p \(1.1\)'),
    ({'top_p': float('nan')}, r'top_p \(nan\)'),
    ({'top_k': -1}, r'top_k \(-1\) must be at least 0'),
    ({'max_turn_tokens': 0}, r'max_turn_tokens \(0\).*\[1, 4\]'),
    ({'max_turn_tokens': TURN + 1}, r'max_turn_tokens \(5\).*\[1, 4\]'),
  ],
)
def test_sampling_that_cannot_be_honoured_is_refused(engine, change, words):
  with pytest.raises(ValueError, match=words):
    engine.open(0, seed=0, sampling=dataclasses.replace(SAMPLING, **change))
  engine.open(0, seed=0, sampling=SAMPLING)  # the slot is still free
  with pytest.raises(ValueError, match='slot 0 is already open'):
    engine.open(0, seed=0, sampling=SAMPLING)


def next_turn(engine):
  """Returns the one turn that ends next; a long feed takes several steps."""
  while not (turns := engine.step()):
    pass
  return turns[0]


def test_open_episodes_go_on_under_new_parameters_without_the_old_cache(engine):
  interrupted = make_episode(4, (3, 2))
  engine.open(0, seed=4, sampling=SAMPLING)
  engine.append(0, interrupted.texts[0])
  (first,) = engine.step()
  engine.load(make_parameters(1), version=4, checksum='d')
  left = engine.context_left(0)
  engine.append(0, interrupted.texts[1])
  second = next_turn(engine)
  engine.close(0)
  assert left == CONTEXT - 3 - len(first.tokens)
  # The same history, all of it fed under the new parameters.
  engine.open(1, seed=4, sampling=SAMPLING)
  history = (interrupted.texts[0], first.tokens, interrupted.texts[1])
  engine.append(1, np.concatenate(history))
  expected = next_turn(engine)
  engine.close(1)
  np.testing.assert_array_equal(second.tokens, expected.tokens)
  np.testing.assert_allclose(second.logprobs, expected.logprobs, atol=1e-6)
  # Under the old ones they would differ.
  engine.load(make_parameters(0), version=5, checksum='e')
  engine.open(1, seed=4, sampling=SAMPLING)
  engine.append(1, np.concatenate(history))
  old = next_turn(engine)
  same = min(len(old.tokens), len(second.tokens))
  gap = np.abs(old.logprobs[:same] - second.logprobs[:same])
  assert gap[0] > 1e-3


def test_parameters_that_do_not_fit_change_nothing(engine):
  assert (engine.policy_version, engine.weights_checksum) == (3, 'abc')
  before = make_episode(4, (3, 2))
  play(engine, {0: before})
  short = make_parameters(1)
  del short['model.norm.weight']
  with pytest.raises(ValueError, match=r'missing model\.norm\.weight'):
    engine.load(short, version=4, checksum='d')
  assert (engine.policy_version, engine.weights_checksum) == (3, 'abc')
  again = make_episode(4, (3, 2))
  play(engine, {0: again})
  assert again.tokens == before.tokens
  engine.load(make_parameters(1), version=4, checksum='d')
  other = make_episode(4, (3, 2))
  play(engine, {0: other})
  assert (engine.policy_version, engine.weights_checksum) == (4, 'd')
  np.testing.assert_allclose(
    other.trajectory().behaviour_logprobs,
    learner_logprobs([other.trajectory()], 1.0, make_parameters(1))[0],
    atol=1e-4,
  )


def test_each_shape_compiles_once(engine):
  """Two feeds times two lengths read, whatever the episodes."""
  for seed in range(3):
    episodes = {0: make_episode(seed, (2, 9, 1)), 1: make_episode(9, (20, 1))}
    play(engine, episodes)
  assert engine._decode._cache_size() <= 2
  assert engine._prefill._cache_size() <= 8
