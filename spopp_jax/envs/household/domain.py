"""Vocabulary of the household domain: types, predicates, treatments."""

from typing import NamedTuple

Atom = tuple[str, ...]

TYPES = ('agent', 'location', 'object', 'receptacle', 'otype', 'rtype')

# Predicate -> types of its arguments; '*' takes any entity.
PREDICATES: dict[str, Atom] = {
  'atlocation': ('agent', 'location'),
  'receptacleatlocation': ('receptacle', 'location'),
  'objectatlocation': ('object', 'location'),
  'openable': ('receptacle',),
  'opened': ('receptacle',),
  'inreceptacle': ('object', 'receptacle'),
  'isreceptacleobject': ('object',),
  'inreceptacleobject': ('object', 'object'),
  'isreceptacleobjectfull': ('object',),
  'wasinreceptacle': ('object', 'receptacle'),
  'checked': ('*',),
  'examined': ('location',),
  'receptacletype': ('receptacle', 'rtype'),
  'cancontain': ('rtype', 'otype'),
  'objecttype': ('object', 'otype'),
  'holds': ('agent', 'object'),
  'holdsany': ('agent',),
  'holdsanyreceptacleobject': ('agent',),
  'full': ('receptacle',),
  'isclean': ('object',),
  'cleanable': ('object',),
  'ishot': ('object',),
  'heatable': ('object',),
  'iscool': ('object',),
  'coolable': ('object',),
  'pickupable': ('object',),
  'moveable': ('object',),
  'toggleable': ('object',),
  'ison': ('object',),
  'istoggled': ('object',),
  'sliceable': ('object',),
  'issliced': ('object',),
}


# Predicates that actions change; all others are settled at the start.
FLUENTS = frozenset(
  (
    'atlocation',
    'checked',
    'holds',
    'holdsany',
    'inreceptacle',
    'isclean',
    'iscool',
    'ishot',
    'ison',
    'issliced',
    'istoggled',
    'objectatlocation',
    'opened',
  )
)


class Treatment(NamedTuple):
  """How an object is heated, cooled or cleaned.

  Attributes:
    needs: predicate that the object must have.
    appliances: types of receptacle that can do it.
    gained: predicate that the object has afterwards.
    lost: predicate that it no longer has, or None.
  """

  needs: str
  appliances: tuple[str, ...]
  gained: str
  lost: str | None


TREATMENTS = {
  'heat': Treatment('heatable', ('microwavetype',), 'ishot', 'iscool'),
  'cool': Treatment('coolable', ('fridgetype',), 'iscool', 'ishot'),
  'clean': Treatment(
    'cleanable', ('sinktype', 'sinkbasintype'), 'isclean', None
  ),
}
BLADES = ('knifetype', 'butterknifetype')
