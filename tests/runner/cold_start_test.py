import json

import numpy as np
import pytest
import tiny_world

from spopp_jax import envs, types
from spopp_jax.envs import household
from spopp_jax.envs.household import official
from spopp_jax.runner import cold_start
from spopp_jax.runner import config as config_lib
from spopp_jax.sampler import base, rollout


@pytest.fixture
def config(tmp_path):
  return tiny_world.load(
    tmp_path,
    'cold_start.num_games=6',
    'cold_start.dither=0.3',
    "environment.task_types=('put', 'heat')",
  )


class Recited:
  """An engine that says given turns, whatever it is fed."""

  def __init__(self, turns):
    self.num_slots = 1
    self.max_context = 1000
    self.logprob_kind = types.LogprobKind.PROCESSED
    self.policy_version = 0
    self.weights_checksum = ''
    self._turns = iter(turns)

  def open(self, slot, *, seed, sampling):
    self._length = 0

  def append(self, slot, tokens):
    self._length += len(tokens)

  def context_left(self, slot):
    return self.max_context - self._length

  def step(self):
    tokens = next(self._turns)
    self._length += len(tokens)
    return [base.Turn(0, tokens, np.full(len(tokens), -1.0, np.float32), True)]

  def close(self, slot):
    pass


def played(episode, tokenizer, game, max_turns):
  """Plays a demonstration's commands as a policy would have."""
  engine = Recited([tokenizer.action(command) for command, _ in episode.turns])
  tasks = household.HouseholdTasks([game])
  driver = rollout.RolloutDriver(engine, tasks, tokenizer)
  sampling = types.SamplingParams(max_turn_tokens=16, max_turns=max_turns)
  driver.submit(base.Request('r', game.id, 0, 0, sampling))
  finished = []
  while not driver.is_idle:
    finished += driver.step()
  (trajectory,) = finished
  return trajectory


def demonstrated(config):
  return cold_start.demonstrations(config, envs.load_tasks(config.environment))


def games_of(config):
  """The games that are demonstrated, in order."""
  return household.generate_games(
    num_games=config.cold_start.num_games,
    seed=cold_start._DEMONSTRATION_STREAM + config.environment.seed,
    size=config.environment.size,
    task_types=config.environment.task_types,
  )


def test_a_demonstration_is_what_the_rollout_would_have_recorded(config):
  episodes = demonstrated(config)
  tokenizer = cold_start.build_tokenizer(episodes, [])
  assert len({len(episode.turns) for episode in episodes}) > 1
  for episode, game in zip(episodes, games_of(config), strict=True):
    rendered = cold_start.as_trajectory(episode, tokenizer)
    recorded = played(episode, tokenizer, game, config.cold_start.max_turns)
    assert recorded.status == types.Status.OK
    assert (recorded.reward, recorded.num_turns) == (
      rendered.reward,
      rendered.num_turns,
    )
    np.testing.assert_array_equal(rendered.tokens, recorded.tokens)
    np.testing.assert_array_equal(rendered.action_mask, recorded.action_mask)
    assert rendered.tokens.dtype == recorded.tokens.dtype
    assert rendered.action_mask.dtype == bool
    assert rendered.behaviour_logprobs.shape == rendered.tokens.shape


def test_demonstrations_end_in_success_within_their_turns(config):
  for episode in demonstrated(config):
    assert 1 <= len(episode.turns) <= config.cold_start.max_turns


def test_demonstrated_scenes_are_not_the_tasks(config):
  tasks = household.load_tasks(
    num_tasks=10,
    seed=config.environment.seed,
    size=config.environment.size,
    task_types=config.environment.task_types,
  )
  assert not set(tasks.task_ids) & {game.id for game in games_of(config)}


def test_official_games_are_demonstrated_in_turn(tmp_path):
  games = household.generate_games(num_games=2, seed=5, task_types=('put',))
  path = tmp_path / 'games.jsonl'
  path.write_text(
    ''.join(json.dumps(official.game_to_row(game)) + '\n' for game in games)
  )
  config = tiny_world.load(
    tmp_path,
    f'environment.path={path}',
    'environment.num_tasks=2',
    'dispatch.in_flight=2',
    'dispatch.batch_size=2',
    'cold_start.num_games=3',
    'cold_start.dither=0.0',
  )
  firsts = [household.HouseholdEnvironment(game).reset() for game in games]
  assert [episode.first for episode in demonstrated(config)] == [
    firsts[0],
    firsts[1],
    firsts[0],
  ]


def test_the_same_seed_gives_the_same_demonstrations(config, tmp_path):
  assert demonstrated(config) == demonstrated(config)
  other = tiny_world.load(
    tmp_path, 'seed=1', 'cold_start.num_games=6', 'cold_start.dither=0.3'
  )
  assert demonstrated(config) != demonstrated(other)


def test_tokenizer_knows_demonstrations_and_tasks(config):
  episodes = demonstrated(config)
  first = 'You are in a zeppelin.'
  tokenizer = cold_start.build_tokenizer(episodes, [first])
  texts = [first, 'Nothing happens.', *(e.first for e in episodes)]
  texts += [text for e in episodes for turn in e.turns for text in turn]
  for text in texts:
    assert '<unk>' not in tokenizer.decode(tokenizer.encode(text))


@pytest.mark.usefixtures('_compiled')
def test_training_lowers_the_cross_entropy_of_demonstrations(config, capsys):
  config.cold_start.steps = 41
  config.cold_start.learning_rate = 0.02
  config.run.progress = True
  policy = cold_start.train_policy(config, envs.load_tasks(config.environment))
  shown = capsys.readouterr().err
  assert 'cold start: 100%' in shown
  nats = [float(part[:5]) for part in shown.split('nats=')[1:]]
  assert nats[-1] < 0.8 * nats[0]
  assert all(v.dtype == np.float32 for v in policy.params.values())
  assert policy.config.vocab_size == policy.tokenizer.vocab_size
  assert policy.config.hidden_size == config.model.hidden_size


@pytest.mark.usefixtures('_compiled')
def test_a_single_step_is_enough_to_make_a_policy(config):
  config.cold_start.steps = 1
  one = cold_start.train_policy(config, envs.load_tasks(config.environment))
  again = cold_start.train_policy(config, envs.load_tasks(config.environment))
  for name, value in one.params.items():
    np.testing.assert_array_equal(value, again.params[name])


def test_turns_that_no_demonstration_can_do_with_are_refused(config):
  config.cold_start.max_turns = 1
  with pytest.raises(config_lib.ConfigError, match=r'cold_start\.max_turns'):
    cold_start.train_policy(config, envs.load_tasks(config.environment))


def test_demonstrations_longer_than_a_row_are_refused(config):
  config.learner.row_length = 40
  with pytest.raises(config_lib.ConfigError) as caught:
    cold_start.train_policy(config, envs.load_tasks(config.environment))
  limit = config.cold_start.max_turns
  for words in ('row_length is 40', f'cold_start.max_turns ({limit})'):
    assert words in str(caught.value)


def test_every_demonstration_is_seen_once_an_epoch(config):
  episodes = demonstrated(config)
  tokenizer = cold_start.build_tokenizer(episodes, [])
  trajectories = [cold_start.as_trajectory(e, tokenizer) for e in episodes]
  config.cold_start.batch_size = 4
  batches = cold_start._batches(trajectories, config)
  seen = []
  for _ in range(3):  # three batches of 4 are two epochs of 6
    batch = next(batches)
    for i in range(4):
      seen.append(tuple(batch.tokens[batch.trajectory_ids == i]))
  expected = sorted(tuple(t.tokens) for t in trajectories)
  assert sorted(seen[:6]) == expected
  assert sorted(seen[6:]) == expected
