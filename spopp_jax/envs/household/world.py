"""What never changes while a household game is played."""

from collections.abc import Iterable

from spopp_jax.envs.household import goals, pddl
from spopp_jax.envs.household.domain import Atom


class World:
  """Static side of a game: names, places, what fits where, the goal test.

  Attributes:
    names: entity id -> name shown, for example 'mug 2'.
    ids: name shown -> entity id, objects and receptacles only.
    agent: id of the agent.
    start: id of the location where the agent starts.
    objects: ids of all objects that occur in facts, sorted.
    receptacles: ids of all receptacles that have a location, sorted.
    home: receptacle id -> location id.
    at: location id -> its receptacles, sorted.
    object_type: object id -> type id.
    receptacle_type: receptacle id -> type id.
    fits: receptacle type id -> object type ids that it can contain.
    facts: everything that holds at the start.
    goal: test of the goal.
  """

  def __init__(
    self,
    entities: tuple[tuple[str, str], ...],
    facts: tuple[Atom, ...],
    goal: pddl.Node,
  ):
    types = dict(entities)
    self.facts = frozenset(facts)
    mentioned = sorted({entity for atom in facts for entity in atom[1:]})
    self.names = _number(mentioned)
    self.objects = tuple(e for e in mentioned if types[e] == 'object')
    ((self.agent, self.start),) = _pairs(facts, 'atlocation')
    self.home = dict(_pairs(facts, 'receptacleatlocation'))
    self.receptacles = tuple(sorted(self.home))
    self.at: dict[str, tuple[str, ...]] = {}
    for receptacle in self.receptacles:
      location = self.home[receptacle]
      self.at[location] = (*self.at.get(location, ()), receptacle)
    self.ids = {
      name: entity
      for entity, name in self.names.items()
      if types[entity] in ('object', 'receptacle')
    }
    self.object_type = dict(_pairs(facts, 'objecttype'))
    self.receptacle_type = dict(_pairs(facts, 'receptacletype'))
    self.fits: dict[str, frozenset[str]] = {}
    for receptacle_type, object_type in _pairs(facts, 'cancontain'):
      self.fits[receptacle_type] = self.fits.get(
        receptacle_type, frozenset()
      ) | {object_type}
    self.goal = goals.compile_goal(goal, entities, self.facts)


def _pairs(facts: Iterable[Atom], predicate: str) -> list[tuple[str, str]]:
  return [(atom[1], atom[2]) for atom in facts if atom[0] == predicate]


def _number(mentioned: Iterable[str]) -> dict[str, str]:
  """Names entities the official way: of a kind, the first id counts highest."""
  kinds = {}
  for entity in mentioned:
    kind, separator, _ = entity.partition('_bar_')
    if separator:
      kinds[entity] = kind + 'basin' if 'basin' in entity else kind
  left: dict[str, int] = {}
  for kind in kinds.values():
    left[kind] = left.get(kind, 0) + 1
  names = {}
  for entity, kind in kinds.items():
    names[entity] = f'{kind} {left[kind]}'
    left[kind] -= 1
  return names
