"""What a household action needs and what it changes: the domain's rules."""

from spopp_jax.envs.household.domain import BLADES, TREATMENTS
from spopp_jax.envs.household.world import World


class State:
  """Facts of one episode. `may_x` is the precondition of `x`, which trusts it.

  Arguments are entity ids of any type, or '' for a name that nothing bears.

  Attributes:
    location: where the agent stands.
    facts: every atom that holds now.
    parted: (object, receptacle) pairs that a take has parted and no move has
      joined again.
  """

  def __init__(self, world: World):
    self._world = world
    self.location = world.start
    self.facts = set(world.facts)
    self.parted: set[tuple[str, str]] = set()

  @property
  def here(self) -> tuple[str, ...]:
    """Receptacles at the present location, sorted."""
    return self._world.at.get(self.location, ())

  @property
  def held(self) -> list[str]:
    """Held objects, sorted."""
    agent = self._world.agent
    return [
      thing
      for thing in self._world.objects
      if ('holds', agent, thing) in self.facts
    ]

  def contents(self, receptacle: str) -> list[str]:
    """Objects in or on a receptacle, sorted."""
    return [
      thing
      for thing in self._world.objects
      if ('inreceptacle', thing, receptacle) in self.facts
    ]

  def inside(self, vessel: str) -> list[str]:
    """Objects inside another object, sorted."""
    return [
      thing
      for thing in self._world.objects
      if ('inreceptacleobject', thing, vessel) in self.facts
    ]

  def beside(self) -> list[str]:
    """Objects that lie here yet were parted from a receptacle here.

    An object is named once for each such receptacle, as officially.
    """
    return [
      thing
      for thing in self._world.objects
      if ('objectatlocation', thing, self.location) in self.facts
      for receptacle in self.here
      if (thing, receptacle) in self.parted
    ]

  def holds(self, thing: str) -> bool:
    """Whether the agent holds the object."""
    return ('holds', self._world.agent, thing) in self.facts

  def has(self, predicate: str, entity: str) -> bool:
    """Whether a predicate of one argument holds."""
    return (predicate, entity) in self.facts

  def is_accessible(self, receptacle: str) -> bool:
    """Whether things can be put into a receptacle and taken out."""
    facts = self.facts
    return ('openable', receptacle) not in facts or (
      'opened',
      receptacle,
    ) in facts

  def may_go(self, receptacle: str) -> bool:
    """It stands at another location."""
    home = self._world.home.get(receptacle, self.location)
    return home != self.location

  def go(self, receptacle: str) -> None:
    """Moves the agent to the receptacle's location."""
    self.facts.discard(('atlocation', self._world.agent, self.location))
    self.location = self._world.home[receptacle]
    self.facts.add(('atlocation', self._world.agent, self.location))

  def may_open(self, receptacle: str) -> bool:
    """It is here, has a door and is closed."""
    return (
      receptacle in self.here
      and self.has('openable', receptacle)
      and not self.has('opened', receptacle)
    )

  def open(self, receptacle: str) -> None:
    """Opens a receptacle."""
    self.facts.add(('opened', receptacle))
    self.check(receptacle)

  def may_close(self, receptacle: str) -> bool:
    """It is here, has a door and is open."""
    return (
      receptacle in self.here
      and self.has('openable', receptacle)
      and self.has('opened', receptacle)
    )

  def close(self, receptacle: str) -> None:
    """Closes a receptacle."""
    self.facts.discard(('opened', receptacle))

  def may_take(self, thing: str, receptacle: str) -> bool:
    """The hands are free and the object lies in reach."""
    return (
      receptacle in self.here
      and ('inreceptacle', thing, receptacle) in self.facts
      and self.has('pickupable', thing)
      and not self.has('holdsany', self._world.agent)
      and self.is_accessible(receptacle)
    )

  def take(self, thing: str, receptacle: str) -> None:
    """Picks an object up."""
    self.facts.discard(('inreceptacle', thing, receptacle))
    self.facts.discard(('objectatlocation', thing, self.location))
    self.facts.add(('holds', self._world.agent, thing))
    self.facts.add(('holdsany', self._world.agent))
    self.parted.add((thing, receptacle))

  def may_move(self, thing: str, receptacle: str) -> bool:
    """The object is held and fits into the receptacle, which is in reach."""
    world = self._world
    return (
      self.holds(thing)
      and receptacle in self.here
      and self.is_accessible(receptacle)
      and world.object_type.get(thing, '')
      in world.fits.get(world.receptacle_type.get(receptacle, ''), ())
    )

  def move(self, thing: str, receptacle: str) -> None:
    """Puts a held object down."""
    self.facts.add(('inreceptacle', thing, receptacle))
    self.facts.add(('objectatlocation', thing, self.location))
    self.facts.discard(('holds', self._world.agent, thing))
    self.facts.discard(('holdsany', self._world.agent))
    self.parted.discard((thing, receptacle))

  def may_examine(self, entity: str) -> bool:
    """It is a receptacle here or a held object."""
    return entity in self.here or self.holds(entity)

  def check(self, entity: str) -> None:
    """Notes that something was looked at."""
    self.facts.add(('checked', entity))

  def may_use(self, thing: str) -> bool:
    """It has a switch and lies here."""
    return self.has('toggleable', thing) and any(
      ('inreceptacle', thing, receptacle) in self.facts
      for receptacle in self.here
    )

  def use(self, thing: str) -> None:
    """Flips a switch; the object counts as switched on ever after."""
    self.facts ^= {('ison', thing)}
    self.facts.add(('istoggled', thing))

  def may_treat(self, verb: str, thing: str, receptacle: str) -> bool:
    """The held object can be heated, cooled or cleaned with what is here."""
    treatment = TREATMENTS[verb]
    return (
      receptacle in self.here
      and self._world.receptacle_type.get(receptacle) in treatment.appliances
      and self.holds(thing)
      and self.has(treatment.needs, thing)
    )

  def treat(self, verb: str, thing: str) -> None:
    """Heats, cools or cleans a held object."""
    treatment = TREATMENTS[verb]
    self.facts.add((treatment.gained, thing))
    if treatment.lost is not None:
      self.facts.discard((treatment.lost, thing))

  def may_slice(self, thing: str, blade: str) -> bool:
    """The object lies at this location and a knife is held."""
    return (
      self.has('sliceable', thing)
      and self.holds(blade)
      and self._world.object_type.get(blade) in BLADES
      and ('objectatlocation', thing, self.location) in self.facts
    )

  def slice(self, thing: str) -> None:
    """Slices an object."""
    self.facts.add(('issliced', thing))
