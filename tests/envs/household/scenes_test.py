import collections
import hashlib
import os
import subprocess
import sys

import pytest

from spopp_jax.envs import household


def _count(game, kind):
  return sum(
    fact[0] == ('receptacletype' if kind == 'receptacle' else 'objecttype')
    for fact in game.facts
  )


@pytest.mark.parametrize(
  'size, receptacles, objects',
  [
    ('small', (4, 4), (3, 3)),
    ('medium', (8, 12), (8, 14)),
    ('large', (15, 25), (20, 40)),
  ],
)
def test_sizes_and_walkthroughs(size, receptacles, objects):
  games = household.generate_games(num_games=60, seed=3, size=size)
  assert len({game.id for game in games}) == 60
  types = collections.Counter(game.task_type for game in games)
  assert types == dict.fromkeys(household.TASK_TYPES, 10)
  for game in games:
    assert receptacles[0] <= _count(game, 'receptacle') <= receptacles[1]
    assert objects[0] <= _count(game, 'object') <= objects[1]
    environment = household.HouseholdEnvironment(game)
    assert game.task in environment.reset()
    assert not environment.won
    won = [environment.step(c).success for c in environment.walkthrough]
    assert won == [False] * (len(won) - 1) + [True]


def test_walkthroughs_do_what_the_task_says():
  games = household.generate_games(num_games=120, seed=5, size='large')
  for game in games:
    verbs = [command.partition(' ')[0] for command in game.walkthrough]
    moves = {'examine_in_light': 0, 'put_two': 2}.get(game.task_type, 1)
    assert verbs.count('move') == moves
    assert verbs.count('use') == (game.task_type == 'examine_in_light')
    for verb in ('clean', 'heat', 'cool'):
      assert verbs.count(verb) == (game.task_type == verb)


def test_small_put_games_have_few_words():
  games = household.generate_games(num_games=200, seed=0, task_types=['put'])
  names = {name for game in games for name in game.world.ids}
  assert len(names) <= 20
  assert {name.partition(' ')[0] for name in names} == {
    *('book', 'cellphone', 'mug', 'pen'),
    *('desk', 'drawer', 'dresser', 'shelf', 'sidetable'),
  }
  assert len({game.task for game in games}) > 20


def test_seeds_and_prefixes():
  make = household.generate_games
  games = make(num_games=12, seed=0, size='medium')
  assert make(num_games=12, seed=0, size='medium') == games
  assert make(num_games=5, seed=0, size='medium') == games[:5]
  other = make(num_games=12, seed=1, size='medium')
  assert not {game.facts for game in games} & {game.facts for game in other}


_DIGEST = """
import hashlib
from spopp_jax.envs import household
games = household.generate_games(num_games=12, seed=0, size='medium')
print(hashlib.sha256(repr(games).encode()).hexdigest())
"""


def test_hash_seed_does_not_matter():
  games = household.generate_games(num_games=12, seed=0, size='medium')
  expected = hashlib.sha256(repr(games).encode()).hexdigest()
  for hash_seed in ('1', '2'):
    done = subprocess.run(
      [sys.executable, '-c', _DIGEST],
      env={**os.environ, 'PYTHONHASHSEED': hash_seed},
      capture_output=True,
      check=True,
      text=True,
      timeout=60,
    )
    assert done.stdout.strip() == expected


def test_the_drawing_is_pinned(golden_games):
  """Scenes are named by seed in results, so they must not change unnoticed."""
  for size in ('small', 'medium', 'large'):
    for game in household.generate_games(num_games=6, seed=7, size=size):
      assert game == golden_games[game.id]


@pytest.mark.parametrize(
  'changes, reason',
  [
    ({'num_games': 0}, r'num_games \(0\) must be > 0'),
    ({'size': 'huge'}, "size .'huge'. must be one of small, medium, large"),
    ({'task_types': []}, 'must be distinct names'),
    ({'task_types': ['put', 'put']}, 'must be distinct names'),
    ({'task_types': ['juggle']}, 'out of put, examine_in_light'),
  ],
)
def test_rejects(changes, reason):
  with pytest.raises(ValueError, match=reason):
    household.generate_games(**{'num_games': 1, 'seed': 0, **changes})
