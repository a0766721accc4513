import dataclasses
import pickle

import pytest

from spopp_jax.envs.household import game as game_lib
from spopp_jax.envs.household import pddl


@pytest.fixture
def game(golden_games):
  return golden_games['small-put-7-0']


def _with_facts(game, *facts):
  return dataclasses.replace(game, facts=(*game.facts, *facts))


def test_unknown_type(game):
  with pytest.raises(game_lib.GameError, match="unknown task type 'juggle'"):
    dataclasses.replace(game, task_type='juggle')


@pytest.mark.parametrize(
  'fact, reason',
  [
    (('pickupable', 'ghost_bar_1'), "unknown entity 'ghost_bar_1'"),
    (('shiny', 'agent1'), "unknown predicate 'shiny'"),
    (('pickupable', 'agent1'), "of type 'agent', not 'object'"),
    (('pickupable',), 'needs 1 arguments'),
    (('atlocation', 'agent1', 'loc_bar_001'), 'found 2'),
  ],
)
def test_bad_facts(game, fact, reason):
  with pytest.raises(game_lib.GameError, match=reason):
    _with_facts(game, fact)


def test_agent_must_stand_somewhere(game):
  facts = tuple(fact for fact in game.facts if fact[0] != 'atlocation')
  with pytest.raises(game_lib.GameError, match='found 0'):
    dataclasses.replace(game, facts=facts)


def test_a_receptacle_stands_at_one_place(game):
  home = next(f for f in game.facts if f[0] == 'receptacleatlocation')
  with pytest.raises(game_lib.GameError, match='several locations'):
    _with_facts(game, (*home[:2], 'loc_bar_000'))


def test_ids_need_a_kind(game):
  entities = (*game.entities, ('lamp', 'object'))
  with pytest.raises(game_lib.GameError, match='needs "_bar_"'):
    dataclasses.replace(
      game, entities=entities, facts=(*game.facts, ('pickupable', 'lamp'))
    )


def test_bad_goal_names_the_game(game):
  with pytest.raises(game_lib.GameError, match=r'small-put-7-0.*not bound'):
    dataclasses.replace(game, goal=pddl.parse('(isClean ?o)'))


def test_games_survive_pickling_after_use(game):
  assert game.world.goal.holds(game.world.facts) is False
  copy = pickle.loads(pickle.dumps(game))
  assert copy == game
  assert copy.world.names == game.world.names
