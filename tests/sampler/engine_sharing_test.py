"""Prompts that share a beginning, long turns, and layers with a state."""

import dataclasses

import engine_world
import jax
import numpy as np
import pytest
from engine_world import CONFIG, END, Episode, make_parameters, play

from spopp_jax.models import dense, parameters, qwen3_5
from spopp_jax.sampler import engine as engine_lib

HYBRID = qwen3_5.Config(
  vocab_size=7,
  hidden_size=16,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=8,
  intermediate_size=16,
  layer_types=(qwen3_5.LINEAR, qwen3_5.FULL),
  partial_rotary_factor=0.5,
  linear_num_key_heads=1,
  linear_num_value_heads=2,
  linear_key_head_dim=4,
  linear_value_head_dim=6,
)
CONTEXT, TURN = 64, 20
CONFIGS = {'dense': CONFIG, 'hybrid': HYBRID}


def parameters_of(config):
  if type(config) is dense.DecoderConfig:
    return make_parameters()
  rng = np.random.default_rng(0)
  _, shapes = parameters.graph(config)
  return {
    name: rng.normal(0, 0.6, shape).astype('f4')
    for name, shape in sorted((k, v.shape) for k, v in shapes.items())
  }


class Counting(engine_lib.DecodeEngine):
  """Counts the tokens that are fed and the rows that are copied."""

  fed = copied = 0

  def _feed(self, chunk, width):
    before = sum(state.length for state in chunk.values())
    super()._feed(chunk, width)
    self.fed += sum(state.length for state in chunk.values()) - before

  def _copy(self, copies):
    super()._copy(copies)
    self.copied += len(copies)


def make_engine(config, kind=Counting, **changes):
  settings = {
    'num_slots': 8,
    'max_context': CONTEXT,
    'max_turn_tokens': TURN,
    'stop_ids': (END,),
    'tokens_a_step': 4,
    'feed_buckets': (4, 8),
    'shortest_piece': 32,
    'min_shared': 4,
  }
  engine = kind(config, **(settings | changes))
  engine.load(parameters_of(config), version=3, checksum='abc')
  return engine


@pytest.fixture(scope='module', params=CONFIGS)
def config(request):
  return CONFIGS[request.param]


@pytest.fixture(scope='module')
def engine(config):
  return make_engine(config)


@pytest.fixture(scope='module')
def plain(config):
  """One that never takes over what another has."""
  return make_engine(config, min_shared=CONTEXT)


@pytest.fixture(autouse=True)
def nothing_cached(engine):
  for slot in list(engine._slots):
    engine.close(slot)
  engine.load(parameters_of(engine._config), version=3, checksum='abc')
  engine.fed = engine.copied = 0


def prompt(seed, length):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 7, length).astype(np.int32)


def assert_same_play(one, other):
  assert one.tokens == other.tokens
  np.testing.assert_allclose(
    one.trajectory().behaviour_logprobs,
    other.trajectory().behaviour_logprobs,
    atol=1e-5,
  )


def test_logprobs_are_those_of_whole_sequences(engine, config):
  """The R1 grid: temperatures, turns in pieces, slots filled and emptied."""
  for temperature in (0.7, 1.0, 1.5):
    sampling = dataclasses.replace(
      engine_world.SAMPLING, temperature=temperature, max_turn_tokens=TURN
    )
    episodes = {
      slot: Episode(slot, [prompt(slot, n) for n in lengths], sampling)
      for slot, lengths in enumerate(
        [(3, 2, 5), (13, 1), (1,), (8, 4, 4), (20, 7), (3, 9)]
      )
    }
    play(engine, episodes)
    for episode in episodes.values():
      trajectory = episode.trajectory()
      logits = engine_world.action_logits(
        config, parameters_of(config), trajectory, 128
      )
      tokens = trajectory.tokens[trajectory.action_mask]
      expected = [
        engine_world.renormalised(row, token, range(7), temperature)
        for row, token in zip(logits, tokens, strict=True)
      ]
      np.testing.assert_allclose(
        trajectory.behaviour_logprobs[trajectory.action_mask],
        expected,
        atol=1e-4,
      )


def test_rollouts_of_one_prompt_feed_it_once(engine, plain):
  texts = [prompt(1, 22), prompt(2, 3)]
  group = {slot: Episode(slot, texts) for slot in range(8)}
  play(engine, group)
  assert engine.copied == 7
  # The prompt but for its last token, and what followed the first turns.
  assert engine.fed == 21 + 8 * 3
  alone = {slot: Episode(slot, texts) for slot in range(8)}
  play(plain, alone)
  for slot in range(8):
    assert_same_play(group[slot], alone[slot])
  assert len({str(episode.tokens) for episode in group.values()}) > 1


def test_prompts_share_what_they_begin_with(engine, plain, config):
  """A system text before each task; only what can be cut is shared by it."""
  system = prompt(3, 17)
  texts = [np.concatenate([system, prompt(10 + i, 6)]) for i in range(4)]
  group = {slot: Episode(slot, [text]) for slot, text in enumerate(texts)}
  play(engine, group)
  if config.caches_can_be_cut:
    assert engine.copied == 3
    assert engine.fed < 22 + 3 * 8
  else:
    assert engine.copied == 0
    assert engine.fed == 4 * 22
  for slot, text in enumerate(texts):
    alone = Episode(slot, [text])
    play(plain, {slot: alone})
    assert_same_play(group[slot], alone)


def test_a_later_rollout_takes_over_from_an_ended_one(engine, plain, config):
  text = prompt(4, 20)
  play(engine, {1: Episode(0, [text])})
  engine.fed = engine.copied = 0
  later = Episode(5, [text])
  play(engine, {6: later})
  # A state has moved on with the first rollout.
  assert (engine.copied, engine.fed) == (
    (1, 0) if config.caches_can_be_cut else (0, 19)
  )
  alone = Episode(5, [text])
  play(plain, {6: alone})
  assert_same_play(later, alone)


def test_rows_that_are_read_and_written_at_once_keep_their_tokens(
  plain, engine
):
  """Row 1 takes over from row 0 while row 2 takes over what row 1 had."""
  if not engine._config.caches_can_be_cut:
    pytest.skip('no row of an ended episode is taken over')
  one, two = prompt(6, 18), prompt(7, 18)
  play(engine, {0: Episode(0, [one]), 1: Episode(1, [two])})
  play(engine, {1: Episode(2, [one]), 2: Episode(3, [two])})
  assert engine.copied == 2
  # Now row 2 alone is left, and it holds the second prompt.
  play(engine, {0: Episode(4, [prompt(8, 18)]), 1: Episode(5, [prompt(9, 18)])})
  engine.fed = engine.copied = 0
  again = Episode(6, [one])
  play(engine, {3: again})
  assert (engine.copied, engine.fed) == (0, 17)
  alone = Episode(6, [one])
  play(plain, {3: alone})
  assert_same_play(again, alone)


def test_other_parameters_take_nothing_over(engine):
  text = prompt(4, 20)
  play(engine, {1: Episode(0, [text])})
  engine.load(parameters_of(engine._config), version=4, checksum='d')
  engine.fed = engine.copied = 0
  play(engine, {2: Episode(1, [text])})
  assert (engine.copied, engine.fed) == (0, 19)


def test_who_waits_for_a_prompt_goes_on_when_its_rollout_is_closed(engine):
  text = prompt(5, 30)
  for slot in (0, 1):
    engine.open(slot, seed=slot, sampling=engine_world.SAMPLING)
    engine.append(slot, text)
  engine.step()  # the first chunk of slot 0; slot 1 waits
  assert engine.fed == 8
  engine.close(0)
  turns = [turn for _ in range(6) for turn in engine.step()]
  assert [turn.slot for turn in turns] == [1]
  expected = Episode(1, [text])
  play(engine, {1 + 1: expected})
  assert turns[0].tokens.tolist() == expected.tokens[0]


def long_turn(engine, slot=0, after=2):
  """Opens an episode whose turn takes several steps; takes some of them."""
  for seed in range(100):
    sampling = dataclasses.replace(
      engine_world.SAMPLING, max_turn_tokens=TURN, temperature=3.0
    )
    episode = Episode(seed, [prompt(seed, 3)], sampling)
    play(engine, {slot: episode})
    if len(episode.tokens[0]) > 14:
      break
  engine.open(slot, seed=episode.seed, sampling=sampling)
  engine.append(slot, episode.texts[0])
  for _ in range(after):
    assert engine.step() == []
  return episode


def test_a_turn_is_the_same_in_pieces(engine, config):
  whole = make_engine(config, tokens_a_step=TURN)
  expected = long_turn(whole, after=0)
  (turn,) = whole.step()
  assert turn.tokens.tolist() == expected.tokens[0]
  got = long_turn(engine, after=3)
  assert got.tokens == expected.tokens
  assert got.turns[0].versions == ((3, 'abc', 4),) * (len(turn.tokens) // 4) + (
    (3, 'abc', len(turn.tokens) % 4),
  ) * (len(turn.tokens) % 4 > 0)


def test_parameters_may_change_within_a_turn(engine, config):
  episode = long_turn(engine, after=2)
  engine.load(parameters_of(config), version=4, checksum='d')
  turns = []
  while not turns:
    turns = engine.step()
  (turn,) = turns
  assert turn.tokens.tolist() == episode.tokens[0]
  assert turn.versions[:2] == ((3, 'abc', 4), (3, 'abc', 4))
  assert {version for version, _, _ in turn.versions[2:]} == {4}
  assert sum(count for _, _, count in turn.versions) == len(turn.tokens)


def test_short_turns_end_while_a_long_one_goes_on(engine):
  episode = long_turn(engine, slot=3, after=1)
  short = Episode(1, [prompt(1, 2)], dataclasses.replace(engine_world.SAMPLING))
  engine.open(5, seed=1, sampling=short.sampling)
  engine.append(5, short.texts[0])
  assert [turn.slot for turn in engine.step()] == [5]
  turns = []
  while not turns:
    turns = engine.step()
  assert turns[0].tokens.tolist() == episode.tokens[0]


def test_bfloat16_is_near_float32_and_halves_the_caches(config):
  coarse = make_engine(config, compute_dtype='bfloat16')
  exact = make_engine(config)
  sizes = [
    sum(cache.nbytes for cache in jax.tree.leaves(engine._caches[-1]))
    for engine in (coarse, exact)
  ]
  assert 2 * sizes[0] == sizes[1]
  sampling = dataclasses.replace(engine_world.SAMPLING, max_turn_tokens=TURN)
  episode = Episode(0, [prompt(0, 9)], sampling)
  play(coarse, {0: episode})
  trajectory = episode.trajectory()
  logits = engine_world.action_logits(
    config, parameters_of(config), trajectory, 128
  )
  tokens = trajectory.tokens[trajectory.action_mask]
  expected = [
    engine_world.renormalised(row, token, range(7), 1.0)
    for row, token in zip(logits, tokens, strict=True)
  ]
  gap = np.abs(trajectory.behaviour_logprobs[trajectory.action_mask] - expected)
  assert 1e-5 < gap.max() < 0.2
