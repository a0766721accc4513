"""An expert that searches: demonstrations that an agent could have acted.

It knows the task, the receptacles that the first observation lists, and what it
has been shown since. It looks through receptacles in random order until it sees
what it needs, then carries out the errand.
"""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spopp_jax.envs.household import pddl
from spopp_jax.envs.household.domain import TREATMENTS
from spopp_jax.envs.household.game import Game
from spopp_jax.envs.household.interpreter import HouseholdEnvironment
from spopp_jax.envs.household.state import State

_HARMLESS = ('close ', 'examine ', 'go to ', 'inventory', 'look', 'open ')
_MAX_ACTIONS = 1000


class Errand(NamedTuple):
  """What a goal asks for, with type ids such as 'mugtype'.

  Attributes:
    object_type: type of what is carried.
    target_type: type of the receptacle it goes to; None to only hold it.
    treatment: 'heat', 'cool', 'clean' or None.
    lamp_type: type of the object to switch on, or None.
  """

  object_type: str
  target_type: str | None
  treatment: str | None
  lamp_type: str | None


def read_errand(goal: pddl.Node) -> Errand:
  """Reads the errand out of the goal of one of the six task types.

  Raises:
    ValueError: the goal names no object type or neither target nor lamp.
  """
  atoms = list(_atoms(goal))
  heads = {atom[0] for atom in atoms}
  lamps = {atom[1] for atom in atoms if atom[0] == 'istoggled'}
  types = [atom for atom in atoms if atom[0] == 'objecttype']
  carried = [kind for _, name, kind in types if name not in lamps]
  lit = [kind for _, name, kind in types if name in lamps]
  targets = [atom[2] for atom in atoms if atom[0] == 'receptacletype']
  if not carried or not (targets or lit):
    raise ValueError(f'no errand can be read from goal {pddl.write(goal)}')
  treatments = [v for v, rule in TREATMENTS.items() if rule.gained in heads]
  return Errand(
    object_type=carried[0],
    target_type=targets[0] if targets else None,
    treatment=treatments[0] if treatments else None,
    lamp_type=lit[0] if lit else None,
  )


def _atoms(node: pddl.Node) -> Iterator[tuple[str, ...]]:
  if isinstance(node, str):
    return
  words = tuple(part for part in node if isinstance(part, str))
  if len(words) == len(node):
    yield words
  for part in node:
    yield from _atoms(part)


def expert_episode(
  game: Game, *, rng: random.Random, dither: float, max_turns: int
) -> list[tuple[str, str]]:
  """Plays a game to its end the way a searching agent would.

  Before each useful action, with probability `dither`, one harmless admissible
  action is taken (look, inventory, examine, open, close, go elsewhere); the
  expert then goes on from wherever that left it.

  Args:
    game: the game.
    rng: draws the order of the search and the dithering.
    dither: probability in [0, 1].
    max_turns: length limit, in actions.

  Returns:
    (action, observation after it) up to and including success. When the
    dithered episode exceeds max_turns: the same search without dithering; when
    that does too: the errand without search.

  Raises:
    ValueError: not even the errand without search fits, or bad arguments.
  """
  if not 0 <= dither <= 1:
    raise ValueError(f'dither ({dither}) must lie in [0, 1]')
  order = list(game.world.receptacles)
  rng.shuffle(order)
  attempts = (
    lambda: _play(game, order, (), rng, dither, max_turns),
    lambda: _play(game, order, (), rng, 0.0, max_turns),
    lambda: _play(game, order, order, rng, 0.0, max_turns),
  )
  for attempt in attempts:
    episode = attempt()
    if episode is not None:
      return episode
  raise ValueError(
    f'game {game.id!r}: no expert episode within max_turns ({max_turns}); '
    'raise max_turns'
  )


def plan_walkthrough(game: Game) -> tuple[str, ...]:
  """Commands that win the game for someone who knows where everything is.

  Raises:
    ValueError: the errand cannot be carried out.
  """
  everything = game.world.receptacles
  episode = _play(
    game, everything, everything, random.Random(0), 0.0, _MAX_ACTIONS
  )
  if episode is None:
    raise ValueError(f'game {game.id!r} cannot be won')
  return tuple(action for action, _ in episode)


def _play(
  game: Game,
  order: Sequence[str],
  known: Sequence[str],
  rng: random.Random,
  dither: float,
  max_turns: int,
) -> list[tuple[str, str]] | None:
  """Plays one episode; None when it gets stuck or exceeds max_turns."""
  environment = HouseholdEnvironment(game)
  expert = _Expert(game, environment.state, order, known)
  episode: list[tuple[str, str]] = []
  may_dither = True
  while not environment.won:
    if len(episode) >= max_turns:
      return None
    may_dither = may_dither and rng.random() < dither
    action = (
      rng.choice(_harmless(environment)) if may_dither else expert.next_action()
    )
    if action is None:
      return None
    may_dither = not may_dither
    episode.append((action, environment.step(action).observation))
    expert.notice(action)
  return episode


def _harmless(environment: HouseholdEnvironment) -> list[str]:
  return [
    command
    for command in environment.admissible_commands
    if command.startswith(_HARMLESS)
  ]


class _Expert:
  """Chooses the next useful action from what has been shown so far."""

  def __init__(
    self,
    game: Game,
    state: State,
    order: Sequence[str],
    known: Sequence[str],
  ):
    self._world = game.world
    self._errand = read_errand(game.goal)
    self._state = state
    self._order = order
    self._seen = set(known)

  def notice(self, action: str) -> None:
    """Remembers the receptacle whose contents an action has just shown."""
    for verb in ('go to ', 'open ', 'examine '):
      entity = self._world.ids.get(action.removeprefix(verb), '')
      if entity in self._state.here and self._state.is_accessible(entity):
        self._seen.add(entity)

  def next_action(self) -> str | None:
    """Returns the next useful command; None when there is nothing to do."""
    held = self._state.held
    if not held:
      return self._fetch()
    thing, errand = held[0], self._errand
    if errand.treatment and not self._is_treated(thing):
      return self._treat(thing, errand.treatment)
    if errand.target_type:
      return self._deliver(thing)
    return self._switch_on()

  def _is_treated(self, thing: str) -> bool:
    treatment = self._errand.treatment
    return treatment is None or self._state.has(
      TREATMENTS[treatment].gained, thing
    )

  def _fetch(self) -> str | None:
    target = self._target()
    for receptacle in self._order:
      if receptacle not in self._seen:
        continue
      for thing in self._state.contents(receptacle):
        if self._world.object_type.get(thing) != self._errand.object_type:
          continue
        if receptacle == target and self._is_treated(thing):
          continue
        name = self._world.names[thing]
        place = self._world.names[receptacle]
        return self._reach(receptacle) or f'take {name} from {place}'
    return self._search()

  def _target(self) -> str | None:
    """The receptacle to deliver to: one already begun with, else number 1."""
    kind = self._errand.target_type
    targets = [
      receptacle
      for receptacle in reversed(self._world.receptacles)
      if self._world.receptacle_type.get(receptacle) == kind
    ]
    for receptacle in targets:
      if receptacle in self._seen and any(
        self._world.object_type.get(thing) == self._errand.object_type
        and self._is_treated(thing)
        for thing in self._state.contents(receptacle)
      ):
        return receptacle
    return targets[0] if targets else None

  def _search(self) -> str | None:
    """Looks into the next unseen receptacle, the targets' kind last."""
    unseen = [r for r in self._order if r not in self._seen]
    unseen.sort(
      key=lambda r: (
        self._world.receptacle_type.get(r) == self._errand.target_type
      )
    )
    if not unseen:
      return None
    name = self._world.names[unseen[0]]
    return self._reach(unseen[0]) or f'examine {name}'

  def _reach(self, receptacle: str) -> str | None:
    """Goes there, then opens it; None once its contents are in reach."""
    name = self._world.names[receptacle]
    if receptacle not in self._state.here:
      return f'go to {name}'
    if not self._state.is_accessible(receptacle):
      return f'open {name}'
    return None

  def _treat(self, thing: str, treatment: str) -> str | None:
    for receptacle in reversed(self._world.receptacles):
      kind = self._world.receptacle_type.get(receptacle)
      if kind in TREATMENTS[treatment].appliances:
        place = self._world.names[receptacle]
        if receptacle not in self._state.here:
          return f'go to {place}'
        return f'{treatment} {self._world.names[thing]} with {place}'
    return None

  def _deliver(self, thing: str) -> str | None:
    target = self._target()
    if target is None:
      return None
    name, place = self._world.names[thing], self._world.names[target]
    return self._reach(target) or f'move {name} to {place}'

  def _switch_on(self) -> str | None:
    for receptacle in self._order:
      if receptacle not in self._seen:
        continue
      for thing in self._state.contents(receptacle):
        if self._world.object_type.get(thing) == self._errand.lamp_type:
          if receptacle not in self._state.here:
            return f'go to {self._world.names[receptacle]}'
          return f'use {self._world.names[thing]}'
    return self._search()
