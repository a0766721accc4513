import concurrent.futures
import json
import pathlib
import random

import pytest

from spopp_jax.envs import household

_TRANSCRIPTS = (
  pathlib.Path(__file__).parents[2] / 'golden/household/transcripts.jsonl'
)
_WALKS = [
  json.loads(line)
  for line in _TRANSCRIPTS.read_text(encoding='utf-8').splitlines()
]


@pytest.mark.parametrize(
  'walk', _WALKS, ids=[f'{walk["id"]}-{walk["walk"]}' for walk in _WALKS]
)
def test_says_what_the_official_engine_said(walk, golden_games, compare):
  compare(golden_games[walk['id']], walk)


def test_transcripts_cover_types_sizes_and_outcomes(golden_games):
  shown = {(golden_games[w['id']].task_type, w['id'][:5]) for w in _WALKS}
  assert {
    (kind, size) for kind in household.TASK_TYPES for size in _SIZES
  } <= shown
  steps = [step for walk in _WALKS for step in walk['steps'][1:]]
  said = ' '.join(step[1] for step in steps)
  for part in ('sliced', 'a cold', 'hot and clean', 'is on', 'a normal'):
    assert part in said
  assert sum(step[1] == 'Nothing happens.' for step in steps) > 50
  assert sum(step[2] for step in steps) > 18


_SIZES = ('small', 'mediu', 'large')


@pytest.fixture
def environment(golden_games):
  return household.HouseholdEnvironment(golden_games['quirks-elsewhere'])


def _play(environment, *commands):
  for command in commands:
    observation = environment.step(command).observation
  return observation


def test_the_old_put_wording_does_nothing(environment):
  _play(environment, 'go to countertop 1', 'take apple 1 from countertop 1')
  said = _play(environment, 'put apple 1 in/on countertop 1')
  assert said == 'Nothing happens.'
  assert 'move apple 1 to countertop 1' in environment.admissible_commands
  assert not any(
    command.startswith('put') for command in environment.admissible_commands
  )


def test_blanks_around_a_command_do_not_matter(environment):
  assert _play(environment, '  go to fridge 1\n').startswith('You arrive')
  assert _play(environment, 'look ').startswith('You are facing the fridge 1')
  assert _play(environment, 'open  fridge 1') == 'Nothing happens.'


def test_another_name_of_the_present_place_does_nothing(environment):
  _play(environment, 'go to countertop 1')
  assert 'go to sinkbasin 1' not in environment.admissible_commands
  result = environment.step('go to sinkbasin 1')
  assert (result.observation, result.done) == ('Nothing happens.', False)
  said = _play(environment, 'go to fridge 1')
  assert said == 'You arrive at fridge 1. The fridge 1 is closed.'


def test_success_is_the_goal_not_a_latch(environment):
  for command in environment.walkthrough[:-1]:
    assert not environment.step(command).success
  assert environment.step(environment.walkthrough[-1]).done
  assert environment.step('look').success
  assert not environment.step('take apple 1 from fridge 1').success


def test_reset_forgets_everything(environment):
  first = environment.reset()
  commands = environment.admissible_commands
  _play(environment, *environment.walkthrough)
  assert environment.reset() == first
  assert environment.admissible_commands == commands


@pytest.mark.parametrize(
  'command',
  ['', ' ', 'take', 'take mug 2', 'take  from ', 'go to', 'x' * 10_000, '\0 é'],
)
def test_any_wording_is_answered(environment, command):
  assert _play(environment, command) == 'Nothing happens.'


def test_every_admissible_command_is_carried_out():
  rng = random.Random(0)
  games = household.generate_games(num_games=6, seed=1, size='medium')
  for game in games:
    environment = household.HouseholdEnvironment(game)
    environment.reset()
    for _ in range(60):
      command = rng.choice(environment.admissible_commands)
      assert environment.step(command).observation != 'Nothing happens.'


def test_episodes_of_one_game_do_not_share_state(golden_games):
  game = golden_games['large-clean-7-2']

  def episode(seed):
    rng = random.Random(seed)
    environment = household.HouseholdEnvironment(game)
    said = [environment.reset()]
    for _ in range(40):
      command = rng.choice(environment.admissible_commands)
      said.append(environment.step(command).observation)
    return said

  alone = [episode(seed) for seed in range(8)]
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    together = list(pool.map(episode, range(8), timeout=60))
  assert together == alone


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', ['train_3553.jsonl.xz', 'train_128.jsonl.xz', 'valid_seen.jsonl.xz']
)
@pytest.mark.timeout(300)
def test_every_official_walkthrough_wins(data_dir, name):
  games = household.load_games(data_dir / name)
  assert [game.id for game in games if not _wins(game)] == []


def test_official_walkthroughs_win(data_dir):
  games = household.load_games(data_dir / 'json_2.1.1')
  assert {game.task_type for game in games} == set(household.TASK_TYPES)
  assert [game.id for game in games if not _wins(game)] == []


def _wins(game):
  environment = household.HouseholdEnvironment(game)
  environment.reset()
  return [environment.step(c).success for c in game.walkthrough][-1]
