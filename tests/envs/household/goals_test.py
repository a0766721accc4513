import itertools

import pytest

from spopp_jax.envs.household import goals, pddl

_ENTITIES = (
  ('agent1', 'agent'),
  ('mug_bar_1', 'object'),
  ('mug_bar_2', 'object'),
  ('pen_bar_1', 'object'),
  ('desk_bar_1', 'receptacle'),
  ('desk_bar_2', 'receptacle'),
  ('mugtype', 'otype'),
  ('pentype', 'otype'),
  ('desktype', 'rtype'),
)
_STATIC = frozenset(
  {
    ('objecttype', 'mug_bar_1', 'mugtype'),
    ('objecttype', 'mug_bar_2', 'mugtype'),
    ('objecttype', 'pen_bar_1', 'pentype'),
    ('receptacletype', 'desk_bar_1', 'desktype'),
    ('receptacletype', 'desk_bar_2', 'desktype'),
  }
)


def _holds(text, *facts):
  goal = goals.compile_goal(pddl.parse(text), _ENTITIES, _STATIC)
  return goal.holds(_STATIC | set(facts))


_TWO = """
(and (exists (?r - receptacle) (exists (?o1 - object)
  (and (objectType ?o1 MugType) (receptacleType ?r DeskType)
    (inReceptacle ?o1 ?r)
    (exists (?o2 - object) (and (not (= ?o1 ?o2)) (objectType ?o2 MugType)
      (receptacleType ?r DeskType) (inReceptacle ?o2 ?r)))))))
"""


def test_two_of_a_kind_must_share_one_receptacle():
  mugs = [('inreceptacle', f'mug_bar_{i}', 'desk_bar_1') for i in (1, 2)]
  elsewhere = ('inreceptacle', 'mug_bar_2', 'desk_bar_2')
  pen = ('inreceptacle', 'pen_bar_1', 'desk_bar_1')
  assert _holds(_TWO, *mugs)
  assert not _holds(_TWO, mugs[0], elsewhere)
  assert not _holds(_TWO, mugs[0], pen)
  assert not _holds(_TWO, mugs[0])


@pytest.mark.parametrize(
  'text, expected',
  [
    ('(exists (?o - object) (isClean ?o))', True),
    ('(forall (?o - object) (isClean ?o))', False),
    ('(forall (?r - receptacle) (not (isClean ?r)))', True),
    ('(or (isClean pen_bar_1) (isClean mug_bar_1))', True),
    ('(and (isClean pen_bar_1) (isClean mug_bar_1))', False),
    ('(not (isClean pen_bar_1))', True),
    (
      '(exists (?o - object) (and (objectType ?o PenType) (isClean ?o)))',
      False,
    ),
    ('(exists (?l - location) (examined ?l))', False),
    ('(and)', True),
    ('(or)', False),
    ('(= mug_bar_1 mug_bar_1)', True),
    ('(exists (?o - object, ?r - receptacle) (inReceptacle ?o ?r))', False),
    (
      '(exists (?o ?p - object) (and (isClean ?p) (not (= ?o ?p))'
      ' (objectType ?o MugType)))',
      True,
    ),
  ],
)
def test_formulas(text, expected):
  assert _holds(text, ('isclean', 'mug_bar_1')) is expected


def test_agrees_with_enumeration():
  text = """(exists (?o - object ?r - receptacle)
    (and (inReceptacle ?o ?r) (objectType ?o MugType)
      (or (isHot ?o) (not (opened ?r)))))"""
  atoms = [
    ('inreceptacle', 'mug_bar_1', 'desk_bar_1'),
    ('inreceptacle', 'pen_bar_1', 'desk_bar_2'),
    ('ishot', 'mug_bar_1'),
    ('opened', 'desk_bar_1'),
  ]
  for chosen in itertools.product((False, True), repeat=len(atoms)):
    facts = {atom for atom, keep in zip(atoms, chosen, strict=True) if keep}
    expected = atoms[0] in facts and (
      atoms[2] in facts or atoms[3] not in facts
    )
    assert _holds(text, *facts) is expected


@pytest.mark.parametrize(
  'text, reason',
  [
    ('(when (isClean mug_bar_1) (isHot mug_bar_1))', 'unknown connective'),
    ('(isClean ?o)', 'variable .o is not bound'),
    ('(isClean cup_bar_1)', 'unknown entity'),
    ('(isBroken mug_bar_1)', 'unknown predicate'),
    ('(isClean)', 'takes 1 arguments'),
    ('(exists (?o - thing) (isClean ?o))', "unknown type 'thing'"),
    ('(exists () (isClean mug_bar_1))', 'binds no variable'),
    ('(exists ?o (isClean mug_bar_1))', 'needs a list'),
    ('(exists (?o ?o - object) (isClean ?o))', 'bound twice'),
    ('(not (isClean mug_bar_1) (isHot mug_bar_1))', 'takes 1 arguments'),
    ('()', 'expected a formula'),
  ],
)
def test_rejects(text, reason):
  with pytest.raises(ValueError, match=reason):
    _holds(text)
