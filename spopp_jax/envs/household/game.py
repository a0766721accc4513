"""The record of one household game and what makes it well formed."""

import dataclasses
import functools

from spopp_jax.envs.household import goals, pddl
from spopp_jax.envs.household.domain import PREDICATES, Atom
from spopp_jax.envs.household.world import World

# Name used in this project -> name in the files of the official data.
OFFICIAL_TYPES = {
  'put': 'pick_and_place_simple',
  'examine_in_light': 'look_at_obj_in_light',
  'clean': 'pick_clean_then_place_in_recep',
  'heat': 'pick_heat_then_place_in_recep',
  'cool': 'pick_cool_then_place_in_recep',
  'put_two': 'pick_two_obj_and_place',
}
TASK_TYPES = tuple(OFFICIAL_TYPES)


class GameError(ValueError):
  """A game that cannot be played; names its source and the reason."""


@dataclasses.dataclass(frozen=True)
class Game:
  """One repeatable household game.

  Entity ids, predicates and variables are lower case, as PDDL ignores case.

  Attributes:
    id: key of the game, unique within a suite.
    task_type: one of TASK_TYPES.
    task: the goal in words, for example 'put some mug on desk.'.
    walkthrough: commands that win the game from its start.
    entities: (id, type) of everything declared, in the order of declaration.
    facts: atoms that hold at the start, sorted, without repeats.
    goal: the goal formula as nested tuples.
  """

  id: str
  task_type: str
  task: str
  walkthrough: tuple[str, ...]
  entities: tuple[tuple[str, str], ...]
  facts: tuple[Atom, ...]
  goal: pddl.Node

  def __post_init__(self) -> None:
    """Raises GameError when the parts do not fit together."""
    if self.task_type not in OFFICIAL_TYPES:
      raise GameError(
        f'game {self.id!r}: unknown task type {self.task_type!r}; allowed are '
        f'{", ".join(TASK_TYPES)}'
      )
    types = dict(self.entities)
    for atom in self.facts:
      self._check_fact(atom, types)
    agents = [atom for atom in self.facts if atom[0] == 'atlocation']
    if len(agents) != 1:
      raise GameError(
        f'game {self.id!r}: exactly one atLocation fact must place the agent, '
        f'found {len(agents)}'
      )
    self._check_homes()
    if self.goal in ((), ('and',)):
      raise GameError(f'game {self.id!r}: the goal is empty')
    try:
      goals.compile_goal(self.goal, self.entities, frozenset(self.facts))
    except ValueError as error:
      raise GameError(f'game {self.id!r}: {error}') from error

  def _check_homes(self) -> None:
    homes = [
      atom[1] for atom in self.facts if atom[0] == 'receptacleatlocation'
    ]
    if len(set(homes)) < len(homes):
      raise GameError(
        f'game {self.id!r}: a receptacle stands at several locations'
      )

  def _check_fact(self, atom: Atom, types: dict[str, str]) -> None:
    wanted = PREDICATES.get(atom[0])
    if wanted is None:
      raise GameError(
        f'game {self.id!r}: unknown predicate {atom[0]!r} in fact {atom}'
      )
    if len(atom) != len(wanted) + 1:
      raise GameError(
        f'game {self.id!r}: fact {atom} needs {len(wanted)} arguments'
      )
    for entity, entity_type in zip(atom[1:], wanted, strict=True):
      if entity not in types:
        raise GameError(
          f'game {self.id!r}: unknown entity {entity!r} in fact {atom}'
        )
      if entity_type not in ('*', types[entity]):
        raise GameError(
          f'game {self.id!r}: {entity!r} in fact {atom} is of type '
          f'{types[entity]!r}, not {entity_type!r}'
        )
      if entity_type in ('object', 'receptacle') and '_bar_' not in entity:
        raise GameError(
          f'game {self.id!r}: id {entity!r} in fact {atom} needs "_bar_" after '
          'its kind'
        )

  @functools.cached_property
  def world(self) -> World:
    """What never changes while the game is played, compiled once."""
    return World(self.entities, self.facts, self.goal)
