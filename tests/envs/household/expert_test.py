import random

import pytest

from spopp_jax.envs import household
from spopp_jax.envs.household import expert


def _replay(game, episode):
  """Asserts that the episode is what the game answers; returns successes."""
  environment = household.HouseholdEnvironment(game)
  environment.reset()
  successes = []
  for action, observation in episode:
    assert action in environment.admissible_commands
    result = environment.step(action)
    assert result.observation == observation
    successes.append(result.success)
  return successes


@pytest.mark.parametrize('size', ['small', 'medium', 'large'])
@pytest.mark.parametrize('dither', [0.0, 0.4, 1.0])
def test_episodes_end_in_success_and_only_there(size, dither):
  games = household.generate_games(num_games=12, seed=2, size=size)
  for number, game in enumerate(games):
    episode = household.expert_episode(
      game, rng=random.Random(number), dither=dither, max_turns=400
    )
    successes = _replay(game, episode)
    assert successes == [False] * (len(episode) - 1) + [True]


def test_takes_only_what_it_has_been_shown():
  games = household.generate_games(num_games=60, seed=4, size='medium')
  for number, game in enumerate(games):
    shown = ''
    for action, observation in household.expert_episode(
      game, rng=random.Random(number), dither=0.2, max_turns=400
    ):
      if action.startswith(('take ', 'use ')):
        name = ' '.join(action.split()[1:3])
        assert f'a {name}' in shown
      shown += observation


def test_opens_what_it_cannot_see_into():
  games = household.generate_games(num_games=60, seed=4, size='medium')
  opened_in_vain = 0
  for number, game in enumerate(games):
    episode = household.expert_episode(
      game, rng=random.Random(number), dither=0, max_turns=400
    )
    takes = [i for i, (a, _) in enumerate(episode) if a.startswith('take ')]
    for i, (action, observation) in enumerate(episode[: takes[0]]):
      if observation.endswith('is closed.'):
        assert episode[i + 1][0] == action.replace('go to', 'open')
        opened_in_vain += i + 2 != takes[0]
  assert opened_in_vain > 20


def test_searches_in_every_order():
  game = household.generate_games(num_games=1, seed=0, task_types=['put'])[0]
  firsts = {
    household.expert_episode(
      game, rng=random.Random(seed), dither=0, max_turns=50
    )[0][0]
    for seed in range(40)
  }
  target = game.task.removesuffix('.').split()[-1]
  kinds = {name.split()[2] for name in firsts}
  assert len(firsts) >= 2
  assert target not in kinds


def test_dithering_lengthens_and_the_limit_undoes_it():
  game = household.generate_games(num_games=1, seed=1, task_types=['put'])[0]

  def length(dither, max_turns):
    return len(
      household.expert_episode(
        game, rng=random.Random(0), dither=dither, max_turns=max_turns
      )
    )

  clean = length(0.0, 50)
  assert length(1.0, 200) >= 2 * clean
  assert length(1.0, clean) == clean
  shortest = len(game.walkthrough)
  assert length(1.0, shortest) == shortest
  with pytest.raises(ValueError, match=r'max_turns \(3\)'):
    length(0.0, 3)


def test_rejects_bad_dither():
  game = household.generate_games(num_games=1, seed=1)[0]
  with pytest.raises(ValueError, match=r'dither \(1.5\)'):
    household.expert_episode(
      game, rng=random.Random(0), dither=1.5, max_turns=9
    )


@pytest.mark.parametrize(
  'key, errand',
  [
    ('put-7-0', (None, None)),
    ('examine_in_light-7-1', (None, 'desklamptype')),
    ('heat-7-3', ('heat', None)),
    ('cool-7-4', ('cool', None)),
    ('clean-7-2', ('clean', None)),
    ('put_two-7-5', (None, None)),
  ],
)
def test_reads_the_errand(golden_games, key, errand):
  game = golden_games[f'large-{key}']
  read = expert.read_errand(game.goal)
  assert (read.treatment, read.lamp_type) == errand
  words = game.task.removesuffix('.').split()
  assert read.object_type.removesuffix('type') in words
  if read.lamp_type is None:
    assert f'{words[-1]}type' == read.target_type


def test_reads_no_errand_where_there_is_none():
  with pytest.raises(ValueError, match='no errand can be read'):
    expert.read_errand(('and', ('isclean', 'mug_bar_1')))


def test_solves_official_games(data_dir):
  for game in household.load_games(data_dir / 'json_2.1.1'):
    episode = household.expert_episode(
      game, rng=random.Random(game.id), dither=0.2, max_turns=400
    )
    assert _replay(game, episode)[-1]
