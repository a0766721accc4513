"""Plays a household game: commands in, the official engine's sentences out.

Quirks of the official engine that this one shares: `examine` knows held objects
and receptacles only; the present location is not offered in "go to", whichever
of its receptacles is named; `look` before the first move lists nothing; lists
are sorted by entity id; a lamp never turns off; nothing needs to be open to
heat, cool, clean or use; `look` tells of an object beside a receptacle only
after it was taken from one and put on another at the same place.
"""

from collections.abc import Iterable, Iterator

from spopp_jax.envs import base
from spopp_jax.envs.household import texts
from spopp_jax.envs.household.domain import TREATMENTS
from spopp_jax.envs.household.game import Game
from spopp_jax.envs.household.state import State

_LINKS = {'take': ' from ', 'move': ' to '}


class HouseholdEnvironment(base.Environment):
  """One episode of one game; `done` and `success` both mean the goal holds.

  The step limit belongs to the caller. Commands after the goal is reached are
  carried out as before it. Commands are exact: lower case, one space between
  words; blanks around them do not matter. Everything else, and every command
  that the state does not admit, answers "Nothing happens.".
  """

  def __init__(self, game: Game):
    self._game = game
    self._world = game.world
    self._state = State(self._world)

  @property
  def state(self) -> State:
    """The present state; what the agent is not shown included."""
    return self._state

  @property
  def walkthrough(self) -> tuple[str, ...]:
    """Commands that win the game from its start."""
    return self._game.walkthrough

  @property
  def won(self) -> bool:
    """Whether the goal holds now."""
    return self._world.goal.holds(self._state.facts)

  @property
  def admissible_commands(self) -> list[str]:
    """Commands that the present state admits, sorted, without repeats."""
    return sorted(set(self._admissible()))

  def reset(self) -> str:
    """Starts the episode; the first observation ends with the task."""
    self._state = State(self._world)
    if self._state.here:
      view = self._look()
    else:
      view = self._overview(self._world.receptacles)
    return f'{texts.WELCOME}\n\n{view}\n\nYour task is to: {self._game.task}'

  def step(self, action: str) -> base.StepResult:
    """Carries out one command."""
    observation = self._carry_out(action.strip())
    won = self.won
    return base.StepResult(observation, done=won, success=won)

  def _carry_out(self, command: str) -> str:
    verb, _, rest = command.partition(' ')
    if command.startswith('go to '):
      return self._go(rest[3:])
    if verb in ('open', 'close', 'examine', 'use'):
      return self._act_on_one(verb, self._world.ids.get(rest, ''))
    if verb in ('take', 'move', 'heat', 'cool', 'clean', 'slice'):
      first, _, second = rest.partition(_LINKS.get(verb, ' with '))
      ids = self._world.ids
      return self._act_on_two(verb, ids.get(first, ''), ids.get(second, ''))
    state = self._state
    if command == 'look':
      state.check(state.location)
      return self._look()
    if command == 'inventory':
      state.check(self._world.agent)
      if state.has('holdsany', self._world.agent):
        return f'You are carrying: {self._names(state.held)}.'
      return 'You are not carrying anything.'
    if command == 'help':
      state.check(self._world.agent)
      return texts.HELP
    return texts.NOTHING_HAPPENS

  def _go(self, name: str) -> str:
    receptacle = self._world.ids.get(name, '')
    if not self._state.may_go(receptacle):
      return texts.NOTHING_HAPPENS
    self._state.go(receptacle)
    return f'You arrive at {name}. {self._describe_receptacle(receptacle)}'

  def _act_on_one(self, verb: str, entity: str) -> str:
    state = self._state
    name = self._world.names.get(entity)
    if verb == 'open' and state.may_open(entity):
      state.open(entity)
      return f'You open the {name}. {self._describe_receptacle(entity)}'
    if verb == 'close' and state.may_close(entity):
      state.close(entity)
      return f'You close the {name}.'
    if verb == 'use' and state.may_use(entity):
      state.use(entity)
      return f'You turn on the {name}.'
    if verb == 'examine' and state.may_examine(entity):
      state.check(entity)
      if entity in state.here:
        return self._describe_receptacle(entity)
      return self._describe_object(entity)
    return texts.NOTHING_HAPPENS

  def _act_on_two(self, verb: str, one: str, other: str) -> str:
    state = self._state
    name = self._world.names.get(one)
    other_name = self._world.names.get(other)
    if verb == 'take' and state.may_take(one, other):
      state.take(one, other)
      return f'You pick up the {name} from the {other_name}.'
    if verb == 'move' and state.may_move(one, other):
      state.move(one, other)
      return f'You move the {name} to the {other_name}.'
    if verb in TREATMENTS and state.may_treat(verb, one, other):
      state.treat(verb, one)
      return f'You {verb} the {name} using the {other_name}.'
    if verb == 'slice' and state.may_slice(one, other):
      state.slice(one)
      return f'You sliced the {name} with the {other_name}.'
    return texts.NOTHING_HAPPENS

  def _names(self, entities: Iterable[str], article: str = 'a ') -> str:
    names = self._world.names
    return texts.enumerate_names([names[e] for e in entities], article)

  def _overview(self, receptacles: Iterable[str]) -> str:
    return (
      'You are in the middle of a room. Looking quickly around you, you see '
      f'{self._names(receptacles)}.'
    )

  def _look(self) -> str:
    state = self._state
    if not state.here:
      return self._overview(())
    return (
      f'You are facing the {self._names(state.here, article="")}. Next to it, '
      f'you see {self._names(state.beside())}.'
    )

  def _describe_receptacle(self, receptacle: str) -> str:
    state = self._state
    name = self._world.names[receptacle]
    if not state.is_accessible(receptacle):
      return f'The {name} is closed.'
    things = self._names(state.contents(receptacle))
    if state.has('openable', receptacle):
      return f'The {name} is open. In it, you see {things}.'
    return f'On the {name}, you see {things}.'

  def _describe_object(self, thing: str) -> str:
    state = self._state
    contents = None
    if state.has('isreceptacleobject', thing):
      contents = [self._world.names[e] for e in state.inside(thing)]
    return texts.describe_object(
      self._world.names[thing],
      contents=contents,
      clean=state.has('isclean', thing),
      hot=state.has('ishot', thing),
      cool=state.has('iscool', thing),
      sliced=state.has('issliced', thing),
      switched_on=state.has('toggleable', thing)
      and state.has('istoggled', thing),
    )

  def _admissible(self) -> Iterator[str]:
    state, world, names = self._state, self._world, self._world.names
    yield from ('look', 'inventory', 'help')
    for receptacle in world.receptacles:
      if state.may_go(receptacle):
        yield f'go to {names[receptacle]}'
    held = state.held
    for thing in held:
      yield f'examine {names[thing]}'
      for other in world.objects:
        if state.may_slice(other, thing):
          yield f'slice {names[other]} with {names[thing]}'
    for receptacle in state.here:
      place = names[receptacle]
      yield f'examine {place}'
      if state.may_open(receptacle):
        yield f'open {place}'
      if state.may_close(receptacle):
        yield f'close {place}'
      for thing in state.contents(receptacle):
        if state.may_take(thing, receptacle):
          yield f'take {names[thing]} from {place}'
        if state.may_use(thing):
          yield f'use {names[thing]}'
      for thing in held:
        if state.may_move(thing, receptacle):
          yield f'move {names[thing]} to {place}'
        for verb in TREATMENTS:
          if state.may_treat(verb, thing, receptacle):
            yield f'{verb} {names[thing]} with {place}'
