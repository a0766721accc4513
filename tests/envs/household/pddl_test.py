import pytest

from spopp_jax.envs.household import pddl

_PROBLEM = """
; a comment with ( in it
(define (problem p) (:domain alfred)
  (:objects agent1 - agent Mug_bar_1 Mug_bar_2 - object)
  (:init (= (total-cost) 0) (pickupable Mug_bar_1) (HOLDSANY agent1)
    (pickupable Mug_bar_1))
  (:goal (and (exists (?o - object) (holds agent1 ?o)))))
"""


def test_parse_nests_and_lowers():
  assert pddl.parse('(And (P ?X) q)') == ('and', ('p', '?x'), 'q')


@pytest.mark.parametrize(
  'text, reason',
  [
    ('(a (b)', '1 parentheses are not closed'),
    ('(a))', 'no opening one'),
    ('(a) (b)', 'expected one expression, found 2'),
    ('', 'found 0'),
  ],
)
def test_parse_rejects(text, reason):
  with pytest.raises(ValueError, match=reason):
    pddl.parse(text)


def test_typed_list_shares_types_and_drops_commas():
  assert pddl.typed_list(['a', 'b', '-', 'x,', 'c', '-', 'y']) == (
    ('a', 'x'),
    ('b', 'x'),
    ('c', 'y'),
  )


@pytest.mark.parametrize(
  'words, reason',
  [
    (['a'], 'have no type'),
    (['a', '-'], 'no type follows'),
    ([('a',)], 'expected a word'),
  ],
)
def test_typed_list_rejects(words, reason):
  with pytest.raises(ValueError, match=reason):
    pddl.typed_list(words)


def test_parse_problem_drops_repeats_and_costs():
  problem = pddl.parse_problem(_PROBLEM)
  assert problem.entities == (
    ('agent1', 'agent'),
    ('mug_bar_1', 'object'),
    ('mug_bar_2', 'object'),
  )
  assert problem.facts == (('holdsany', 'agent1'), ('pickupable', 'mug_bar_1'))
  assert problem.goal == (
    'and',
    ('exists', ('?o', '-', 'object'), ('holds', 'agent1', '?o')),
  )


@pytest.mark.parametrize(
  'old, new, reason',
  [
    ('(define', '(defined', 'starts with'),
    ('(:goal', '(:aim', 'section :goal is missing'),
    ('(:init', '(:start', 'section :init is missing'),
    ('(pickupable Mug_bar_1)', '(pickupable (a))', 'must be flat'),
    ('(pickupable Mug_bar_1)', 'pickupable', 'expected a fact'),
    ('(holds agent1 ?o))))', '(holds agent1 ?o)))', 'not closed'),
  ],
)
def test_parse_problem_rejects(old, new, reason):
  with pytest.raises(ValueError, match=reason):
    pddl.parse_problem(_PROBLEM.replace(old, new))


def test_written_problem_reads_back():
  problem = pddl.parse_problem(_PROBLEM)
  assert pddl.parse_problem(pddl.write_problem('name', problem)) == problem
