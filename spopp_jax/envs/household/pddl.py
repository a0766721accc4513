"""Reads and writes the part of PDDL that household games are written in."""

import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

Node = str | tuple['Node', ...]

_COMMENT = re.compile(r';[^\n]*')
_TOKEN = re.compile(r'[()]|[^\s()]+')


class Problem(NamedTuple):
  """Sections of a problem; everything is lower case.

  Attributes:
    entities: (id, type) in the order of declaration.
    facts: atoms of the initial state, sorted, without repeats.
    goal: the goal formula as nested tuples.
  """

  entities: tuple[tuple[str, str], ...]
  facts: tuple[tuple[str, ...], ...]
  goal: Node


def parse(text: str) -> Node:
  """Reads one expression.

  Args:
    text: PDDL; `;` starts a comment that runs to the end of the line.

  Returns:
    Lower-case words and tuples nested as the parentheses are.

  Raises:
    ValueError: parentheses do not match or something follows the expression.
  """
  stack: list[list[Node]] = [[]]
  for token in _TOKEN.findall(_COMMENT.sub('', text.lower())):
    if token == '(':
      stack.append([])
    elif token == ')':
      if len(stack) == 1:
        raise ValueError('a closing parenthesis has no opening one')
      closed = tuple(stack.pop())
      stack[-1].append(closed)
    else:
      stack[-1].append(sys.intern(token))
  if len(stack) > 1:
    raise ValueError(
      f'{len(stack) - 1} parentheses are not closed; the text looks cut'
    )
  if len(stack[0]) != 1:
    raise ValueError(f'expected one expression, found {len(stack[0])}')
  return stack[0][0]


def typed_list(words: Iterable[Node]) -> tuple[tuple[str, str], ...]:
  """Reads `a b - type c - other` into ((a, type), (b, type), (c, other)).

  A comma after a type is dropped, as the official domain has them.

  Raises:
    ValueError: a word without a type or a dash without a type.
  """
  pairs: list[tuple[str, str]] = []
  pending: list[str] = []
  rest = iter(words)
  for word in rest:
    if not isinstance(word, str):
      raise ValueError(f'expected a word in a typed list, found {word}')
    if word != '-':
      pending.append(word)
      continue
    kind = next(rest, None)
    if not isinstance(kind, str):
      raise ValueError(f'no type follows "-" after {pending}')
    pairs.extend((name, kind.rstrip(',')) for name in pending)
    pending = []
  if pending:
    raise ValueError(f'{pending} have no type')
  return tuple(pairs)


def parse_problem(text: str) -> Problem:
  """Reads a problem.

  Args:
    text: `(define (problem ...) (:objects ...) (:init ...) (:goal ...))`.

  Returns:
    Its objects, initial facts and goal; numeric assignments are left out.

  Raises:
    ValueError: malformed text, or a section is missing or empty.
  """
  tree = parse(text)
  if isinstance(tree, str) or tree[:1] != ('define',):
    raise ValueError('a problem starts with "(define"')
  sections = {
    section[0]: section[1:]
    for section in tree[1:]
    if isinstance(section, tuple) and section
  }
  for name in (':objects', ':init', ':goal'):
    if not sections.get(name):
      raise ValueError(f'section {name} is missing or empty')
  # Official problems repeat facts many times over: drop repeats first.
  facts = {_flat(atom) for atom in set(sections[':init']) if atom[:1] != ('=',)}
  if len(sections[':goal']) != 1:
    raise ValueError('section :goal must hold one formula')
  return Problem(
    entities=typed_list(sections[':objects']),
    facts=tuple(sorted(facts)),
    goal=sections[':goal'][0],
  )


def _flat(atom: Node) -> tuple[str, ...]:
  if isinstance(atom, str) or not atom:
    raise ValueError(f'expected a fact, found {atom!r}')
  words = tuple(word for word in atom if isinstance(word, str))
  if len(words) != len(atom):
    raise ValueError(f'a fact must be flat, found {atom}')
  return words


def write(node: Node) -> str:
  """Writes an expression on one line, so that parse(write(n)) == n."""
  if isinstance(node, str):
    return node
  return f'({" ".join(write(part) for part in node)})'


def write_problem(name: str, problem: Problem) -> str:
  """Writes a problem that parse_problem and the official engine read."""
  objects = '\n'.join(f'{entity} - {kind}' for entity, kind in problem.entities)
  facts = '\n'.join(write(fact) for fact in problem.facts)
  return (
    f'(define (problem {name})\n(:domain alfred)\n'
    f'(:objects\n{objects}\n)\n(:init\n{facts}\n)\n'
    f'(:goal {write(problem.goal)})\n)\n'
  )
