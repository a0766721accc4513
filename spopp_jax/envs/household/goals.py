"""Compiles goal formulas into tests that are cheap enough for every step.

Formulas: atoms, `=`, and, or, not, exists, forall, typed variables.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from spopp_jax.envs.household import pddl
from spopp_jax.envs.household.domain import FLUENTS, PREDICATES, TYPES

Facts = AbstractSet[tuple[str, ...]]
Binding = dict[str, str]


class Test(Protocol):
  """A compiled formula."""

  def __call__(self, facts: Facts, binding: Binding) -> bool:
    """Returns whether the formula holds under the variables bound so far."""


def compile_goal(
  goal: pddl.Node,
  entities: Iterable[tuple[str, str]],
  facts: Facts,
) -> 'Goal':
  """Compiles a goal.

  Args:
    goal: the formula as nested tuples, without free variables.
    entities: (id, type) of everything that variables can stand for.
    facts: what holds at the start; settles what no action changes.

  Returns:
    The test; calling it with the facts of a state says whether the goal holds.

  Raises:
    ValueError: an unknown connective, type, entity or variable.
  """
  by_type: dict[str, list[str]] = {}
  known = set()
  for entity, kind in entities:
    by_type.setdefault(kind, []).append(entity)
    known.add(entity)
  return Goal(_Compiler(by_type, known, facts).formula(goal, frozenset()))


@dataclasses.dataclass(frozen=True)
class Goal:
  """Test of a whole goal."""

  test: Test

  def holds(self, facts: Facts) -> bool:
    """Returns whether the goal holds among these facts."""
    return self.test(facts, {})


@dataclasses.dataclass(frozen=True)
class _Atom:
  words: tuple[str, ...]

  def __call__(self, facts: Facts, binding: Binding) -> bool:
    return tuple(binding.get(word, word) for word in self.words) in facts


@dataclasses.dataclass(frozen=True)
class _Equal:
  left: str
  right: str

  def __call__(self, facts: Facts, binding: Binding) -> bool:
    del facts
    return binding.get(self.left, self.left) == binding.get(
      self.right, self.right
    )


@dataclasses.dataclass(frozen=True)
class _Not:
  part: Test

  def __call__(self, facts: Facts, binding: Binding) -> bool:
    return not self.part(facts, binding)


@dataclasses.dataclass(frozen=True)
class _All:
  parts: tuple[Test, ...]

  def __call__(self, facts: Facts, binding: Binding) -> bool:
    return all(part(facts, binding) for part in self.parts)


@dataclasses.dataclass(frozen=True)
class _Any:
  parts: tuple[Test, ...]

  def __call__(self, facts: Facts, binding: Binding) -> bool:
    return any(part(facts, binding) for part in self.parts)


@dataclasses.dataclass(frozen=True)
class _Exists:
  """Binds variables one by one; a part is tested once its variables stand."""

  variables: tuple[str, ...]
  candidates: tuple[tuple[str, ...], ...]
  parts: tuple[tuple[Test, ...], ...]

  def __call__(self, facts: Facts, binding: Binding) -> bool:
    return self._bind(0, facts, dict(binding))

  def _bind(self, depth: int, facts: Facts, binding: Binding) -> bool:
    if depth == len(self.variables):
      return True
    for entity in self.candidates[depth]:
      binding[self.variables[depth]] = entity
      if all(part(facts, binding) for part in self.parts[depth]) and self._bind(
        depth + 1, facts, binding
      ):
        return True
    return False


class _Compiler:
  def __init__(
    self, by_type: Mapping[str, list[str]], known: set[str], facts: Facts
  ):
    self._by_type = by_type
    self._known = known
    self._facts = facts

  def formula(self, node: pddl.Node, bound: frozenset[str]) -> Test:
    if isinstance(node, str) or not node or not isinstance(node[0], str):
      raise ValueError(f'goal: expected a formula, found {node!r}')
    head, parts = node[0], node[1:]
    if head in ('and', 'or'):
      tests = tuple(self.formula(part, bound) for part in parts)
      return _All(tests) if head == 'and' else _Any(tests)
    if head == 'not':
      (part,) = self._arguments(node, 1)
      return _Not(self.formula(part, bound))
    if head == 'exists':
      return self._exists(node, bound)
    if head == 'forall':
      variables, body = self._arguments(node, 2)
      return _Not(self._exists(('exists', variables, ('not', body)), bound))
    return self._atom(node, bound)

  def _arguments(
    self, node: tuple[pddl.Node, ...], count: int
  ) -> tuple[pddl.Node, ...]:
    if len(node) != count + 1:
      raise ValueError(f'goal: {node[0]} takes {count} arguments: {node}')
    return node[1:]

  def _atom(self, node: tuple[pddl.Node, ...], bound: frozenset[str]) -> Test:
    words = tuple(word for word in node if isinstance(word, str))
    if len(words) != len(node):
      raise ValueError(f'goal: unknown connective {node[0]!r}')
    for word in words[1:]:
      if word.startswith('?') and word not in bound:
        raise ValueError(f'goal: variable {word} is not bound in {words}')
      if not word.startswith('?') and word not in self._known:
        raise ValueError(f'goal: unknown entity {word!r} in {words}')
    if words[0] == '=':
      self._arguments(node, 2)
      return _Equal(words[1], words[2])
    if words[0] not in PREDICATES:
      raise ValueError(f'goal: unknown predicate or connective {words[0]!r}')
    self._arguments(node, len(PREDICATES[words[0]]))
    return _Atom(words)

  def _exists(self, node: tuple[pddl.Node, ...], bound: frozenset[str]) -> Test:
    variables: list[tuple[str, str]] = []
    body: pddl.Node = node
    while isinstance(body, tuple) and body[:1] == ('exists',):
      declared, body = self._arguments(body, 2)
      if isinstance(declared, str):
        raise ValueError(f'goal: exists needs a list of variables: {declared}')
      variables.extend(pddl.typed_list(declared))
    names = tuple(name for name, _ in variables)
    if not names:
      raise ValueError(f'goal: {node} binds no variable')
    if len(set(names)) != len(names) or bound & set(names):
      raise ValueError(f'goal: variables {names} are bound twice')
    conjuncts = (
      body[1:] if isinstance(body, tuple) and body[:1] == ('and',) else (body,)
    )
    candidates = [self._entities(kind) for _, kind in variables]
    parts: list[list[Test]] = [[] for _ in variables]
    for conjunct in conjuncts:
      test = self.formula(conjunct, bound | set(names))
      mine = [i for i, name in enumerate(names) if _mentions(conjunct, name)]
      depth = max(mine, default=0)
      if len(mine) == 1 and self._is_settled(conjunct, names[depth]):
        candidates[depth] = tuple(
          entity
          for entity in candidates[depth]
          if test(self._facts, {names[depth]: entity})
        )
      else:
        parts[depth].append(test)
    return _Exists(names, tuple(candidates), tuple(map(tuple, parts)))

  def _entities(self, kind: str) -> tuple[str, ...]:
    if kind not in TYPES:
      raise ValueError(f'goal: unknown type {kind!r}')
    return tuple(self._by_type.get(kind, ()))

  def _is_settled(self, node: pddl.Node, variable: str) -> bool:
    """Whether `node` is an atom about one variable that no action changes."""
    return (
      isinstance(node, tuple)
      and all(isinstance(word, str) for word in node)
      and node[0] not in FLUENTS
      and all(
        word == variable or not word.startswith('?')
        for word in node[1:]
        if isinstance(word, str)
      )
    )


def _mentions(node: pddl.Node, variable: str) -> bool:
  if isinstance(node, str):
    return node == variable
  return any(_mentions(part, variable) for part in node)
