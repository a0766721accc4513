"""Draws own household games from a seed; each has been won once."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spopp_jax.envs.household import catalog, expert, pddl
from spopp_jax.envs.household.domain import Atom
from spopp_jax.envs.household.game import TASK_TYPES, Game, GameError

_MAX_DRAWS = 1000

_TASK_TEXTS = {
  'put': ('put a {thing} in {place}.', 'put some {thing} on {place}.'),
  'examine_in_light': (
    'look at {thing} under the {lamp}.',
    'examine the {thing} with the {lamp}.',
  ),
  'clean': (
    'put a clean {thing} in {place}.',
    'clean some {thing} and put it in {place}.',
  ),
  'heat': (
    'put a hot {thing} in {place}.',
    'heat some {thing} and put it in {place}.',
  ),
  'cool': (
    'put a cool {thing} in {place}.',
    'cool some {thing} and put it in {place}.',
  ),
  'put_two': (
    'put two {thing} in {place}.',
    'find two {thing} and put them in {place}.',
  ),
}
_LAMP = 'desklamp'

# Task type -> (appliance kind, kinds it serves, needed and gained predicate).
_TREATED = {
  'clean': ('sinkbasin', catalog.CLEANABLE, 'cleanable', 'isclean'),
  'heat': ('microwave', catalog.HEATABLE, 'heatable', 'ishot'),
  'cool': ('fridge', catalog.COOLABLE, 'coolable', 'iscool'),
}

# Type ids that the official domain names; every problem declares them.
_DOMAIN_OBJECT_TYPES = ('sinktype', 'knifetype', 'butterknifetype')
_DOMAIN_RECEPTACLE_TYPES = ('sinkbasintype', 'microwavetype', 'fridgetype')


class _Size(NamedTuple):
  receptacles: tuple[int, int]
  objects: tuple[int, int]
  rooms: tuple[catalog.Room, ...]


SIZES = {
  'small': _Size((4, 4), (3, 3), catalog.SMALL_ROOMS),
  'medium': _Size((8, 12), (8, 14), catalog.FULL_ROOMS),
  'large': _Size((15, 25), (20, 40), catalog.FULL_ROOMS),
}


class _Job(NamedTuple):
  """What is asked, in kinds; `place` is '' when the object is only held."""

  task_type: str
  thing: str
  place: str


class _Furnished(NamedTuple):
  """Receptacle kinds, and object kinds with the index of their receptacle."""

  receptacles: list[str]
  objects: list[tuple[str, int]]


def generate_games(
  *,
  num_games: int,
  seed: int,
  size: str = 'small',
  task_types: Sequence[str] = TASK_TYPES,
) -> list[Game]:
  """Draws games; the same arguments give the same games everywhere.

  Game i depends on seed, size and i alone (and on its task type), so a longer
  list starts with the shorter one.

  Args:
    num_games: how many, > 0.
    seed: of the drawing.
    size: 'small' (4 receptacles, 3 objects of few kinds), 'medium' (8 to 12
      receptacles) or 'large' (15 to 25 receptacles, as official scenes).
    task_types: taken in turn; out of TASK_TYPES, without repeats.

  Returns:
    Games with distinct ids and a walkthrough that has been played to its end.

  Raises:
    ValueError: an argument is out of range.
  """
  if num_games < 1:
    raise ValueError(f'num_games ({num_games}) must be > 0')
  if size not in SIZES:
    raise ValueError(f'size ({size!r}) must be one of {", ".join(SIZES)}')
  kinds = tuple(task_types)
  if (
    not kinds or len(set(kinds)) < len(kinds) or not set(kinds) <= {*TASK_TYPES}
  ):
    raise ValueError(
      f'task_types ({kinds}) must be distinct names out of '
      f'{", ".join(TASK_TYPES)}'
    )
  return [
    _draw_game(seed, size, index, kinds[index % len(kinds)])
    for index in range(num_games)
  ]


def _draw_game(seed: int, size: str, index: int, task_type: str) -> Game:
  # A text seeds the same stream whatever PYTHONHASHSEED is.
  rng = random.Random(f'{seed} {size} {index} {task_type}')
  game_id = f'{size}-{task_type}-{seed}-{index}'
  for _ in range(_MAX_DRAWS):
    room = rng.choice(SIZES[size].rooms)
    jobs = list(_jobs(room, task_type))
    if not jobs:
      continue
    job = rng.choice(jobs)
    furnished = _furnish(rng, SIZES[size], room, job)
    if furnished is None:
      continue
    game = _build(rng, game_id, job, furnished, share_places=size != 'small')
    return dataclasses.replace(game, walkthrough=expert.plan_walkthrough(game))
  raise GameError(f'game {game_id!r}: no scene found in {_MAX_DRAWS} draws')


def _jobs(room: catalog.Room, task_type: str) -> Iterator[_Job]:
  """All jobs that a room offers, in a fixed order."""
  if room.task_types and task_type not in room.task_types:
    return
  for thing in room.objects:
    if thing == _LAMP:
      continue
    if task_type == 'examine_in_light':
      if _LAMP in room.objects:
        yield _Job(task_type, thing, '')
      continue
    appliance = ''
    if task_type in _TREATED:
      appliance, served, _, _ = _TREATED[task_type]
      if appliance not in room.receptacles or thing not in served:
        continue
    for place in catalog.FITS[thing]:
      if place in room.receptacles and place != appliance:
        yield _Job(task_type, thing, place)


def _furnish(
  rng: random.Random, size: _Size, room: catalog.Room, job: _Job
) -> _Furnished | None:
  """Draws receptacles and objects; None when the job's find no place."""
  receptacles = _draw_receptacles(rng, size, room, job)

  def places(thing: str) -> list[int]:
    # What the job is about never starts where it has to go.
    return [
      index
      for index, kind in enumerate(receptacles)
      if kind in catalog.FITS[thing] and (thing, kind) != (job.thing, job.place)
    ]

  things = [job.thing] * (2 if job.task_type == 'put_two' else 1)
  if job.task_type == 'examine_in_light':
    things.append(_LAMP)
  if not all(places(thing) for thing in things):
    return None
  fillers = [kind for kind in room.objects if kind != _LAMP and places(kind)]
  num_fillers = rng.randint(*size.objects) - len(things)
  things.extend(rng.choice(fillers) for _ in range(num_fillers))
  rng.shuffle(things)
  return _Furnished(
    receptacles, [(thing, rng.choice(places(thing))) for thing in things]
  )


def _draw_receptacles(
  rng: random.Random, size: _Size, room: catalog.Room, job: _Job
) -> list[str]:
  """Draws kinds: the job's first, then the room's fewest, then any."""
  kinds = [job.place] if job.place else []
  if job.task_type in _TREATED:
    kinds.append(_TREATED[job.task_type][0])
  more = []
  for kind, (fewest, most) in room.receptacles.items():
    kinds.extend([kind] * (fewest - kinds.count(kind)))
    more.extend([kind] * (most - kinds.count(kind)))
  rng.shuffle(more)
  kinds = (kinds + more)[: rng.randint(*size.receptacles)]
  rng.shuffle(kinds)
  return kinds


def _build(
  rng: random.Random,
  game_id: str,
  job: _Job,
  furnished: _Furnished,
  *,
  share_places: bool,
) -> Game:
  """Writes the scene down as entities and facts."""
  entities = [('agent1', 'agent'), ('loc_bar_000', 'location')]
  facts: list[Atom] = [('atlocation', 'agent1', 'loc_bar_000')]
  spots: list[tuple[str, str]] = []
  for index, kind in enumerate(furnished.receptacles):
    receptacle = _entity_id(kind, index)
    # A few places hold two receptacles, as in the official scenes.
    if share_places and spots and rng.random() < 0.15:
      location = spots[-1][1]
    else:
      location = f'loc_bar_{index + 1:03d}'
      entities.append((location, 'location'))
    spots.append((receptacle, location))
    entities.append((receptacle, 'receptacle'))
    facts.append(('receptacletype', receptacle, f'{kind}type'))
    facts.append(('receptacleatlocation', receptacle, location))
    if kind in catalog.OPENABLE:
      facts.append(('openable', receptacle))
  for index, (kind, place) in enumerate(furnished.objects):
    thing = _entity_id(kind, index)
    receptacle, location = spots[place]
    entities.append((thing, 'object'))
    facts.append(('inreceptacle', thing, receptacle))
    facts.append(('objectatlocation', thing, location))
    facts.extend(_properties(thing, kind))
  object_kinds = {kind for kind, _ in furnished.objects}
  receptacle_kinds = set(furnished.receptacles)
  facts.extend(
    ('cancontain', f'{place}type', f'{thing}type')
    for thing in object_kinds
    for place in receptacle_kinds.intersection(catalog.FITS[thing])
  )
  object_types = {f'{kind}type' for kind in object_kinds}
  receptacle_types = {f'{kind}type' for kind in receptacle_kinds}
  entities.extend(
    (name, 'otype') for name in sorted(object_types.union(_DOMAIN_OBJECT_TYPES))
  )
  entities.extend(
    (name, 'rtype')
    for name in sorted(receptacle_types.union(_DOMAIN_RECEPTACLE_TYPES))
  )
  text = rng.choice(_TASK_TEXTS[job.task_type])
  return Game(
    id=game_id,
    task_type=job.task_type,
    task=text.format(thing=job.thing, place=job.place, lamp=_LAMP),
    walkthrough=(),
    entities=tuple(entities),
    facts=tuple(sorted(set(facts))),
    goal=_goal(job),
  )


def _entity_id(kind: str, index: int) -> str:
  """An id that the official engine shows as its kind and a number."""
  if kind.endswith('basin'):
    return f'{kind.removesuffix("basin")}_bar_{index:03d}_bar_{kind}'
  return f'{kind}_bar_{index:03d}'


def _properties(thing: str, kind: str) -> Iterator[Atom]:
  yield ('objecttype', thing, f'{kind}type')
  if kind in catalog.LAMPS:
    yield ('toggleable', thing)
    return
  yield ('pickupable', thing)
  for predicate, kinds in (
    ('isreceptacleobject', catalog.VESSELS),
    ('sliceable', catalog.SLICEABLE),
    ('heatable', catalog.HEATABLE),
    ('coolable', catalog.COOLABLE),
    ('cleanable', catalog.CLEANABLE),
  ):
    if kind in kinds:
      yield (predicate, thing)


def _goal(job: _Job) -> pddl.Node:
  """The goal formula, shaped as the official one of the same task type."""
  thing, place = f'{job.thing}type', f'{job.place}type'
  if job.task_type == 'examine_in_light':
    return pddl.parse(f"""
      (and
        (exists (?ot - object ?r - receptacle ?a - agent ?l - location)
          (and (objectType ?ot {_LAMP}type) (toggleable ?ot) (isToggled ?ot)
            (receptacleAtLocation ?r ?l) (atLocation ?a ?l)
            (inReceptacle ?ot ?r)))
        (exists (?o - object ?a - agent)
          (and (objectType ?o {thing}) (holds ?a ?o))))""")
  if job.task_type == 'put_two':
    return pddl.parse(f"""
      (and (exists (?r - receptacle) (exists (?o1 - object)
        (and (objectType ?o1 {thing}) (receptacleType ?r {place})
          (inReceptacle ?o1 ?r)
          (exists (?o2 - object)
            (and (not (= ?o1 ?o2)) (objectType ?o2 {thing})
              (receptacleType ?r {place}) (inReceptacle ?o2 ?r)))))))""")
  treated = ''
  if job.task_type in _TREATED:
    _, _, needed, gained = _TREATED[job.task_type]
    treated = f'({needed} ?o) ({gained} ?o)'
  return pddl.parse(f"""
    (and (exists (?r - receptacle) (exists (?o - object)
      (and {treated} (inReceptacle ?o ?r) (objectType ?o {thing})
        (receptacleType ?r {place})))))""")
