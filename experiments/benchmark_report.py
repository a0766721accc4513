"""Paired timing of versions of the same work, and the table of it."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

OURS = 'ours'
TORCH = 'torch'
HOST = 'numpy/scipy'
# Of ours from every other version; room for float32 sums of many terms.
TOLERANCE = 1e-4
# Before every measurement: threads that a library leaves spinning go to sleep.
_PAUSE_S = 0.05


class Disagreement(Exception):
  """Two versions of the same work give different results."""


class Comparison(NamedTuple):
  """Work in several versions.

  Attributes:
    what: the work, in words.
    sizes: what it is done on, in words.
    versions: name (OURS, TORCH, HOST) -> does the work and returns a tuple of
      arrays once they are there. OURS must be among them; a version may
      return only the first entries of each array.
    shares: version -> the part of the work that it does; 1 if absent. Its
      time is divided by it.
    targets: version -> how many times longer than OURS it should take.
  """

  what: str
  sizes: str
  versions: Mapping[str, Callable[[], Sequence[Any]]]
  shares: Mapping[str, float]
  targets: Mapping[str, float]


class Timing(NamedTuple):
  """Median milliseconds, and the median of ratios to the first version's."""

  milliseconds: float
  ratio: float


def disagreement(ours: Sequence[Any], other: Sequence[Any]) -> float:
  """Returns the largest difference between results, relative to their size.

    sum |a - b| / sum |b|      of an array: one token that rounding puts on the
                               other side of a clip bound is no other formula
    |a - b| / max(1, |b|)      of a single number: a loss is a mean of terms of
                               order one, however much cancels in it

  Args:
    ours: arrays.
    other: as many arrays, each with the first entries of its partner at least.

  Returns:
    The largest of all arrays; inf if anything is not finite.
  """
  errors = []
  for mine, its in zip(ours, other, strict=True):
    mine, its = np.asarray(mine, np.float64), np.asarray(its, np.float64)
    if its.ndim:
      mine, size = mine[: len(its)], np.abs(its).sum()
    else:
      size = max(1.0, np.abs(its))
    difference = np.abs(mine - its).sum()
    finite = np.isfinite(difference) and size > 0
    errors.append(difference / size if finite else np.inf)
  return float(max(errors))


def timed(
  versions: Mapping[str, Callable[[], Any]],
  repeats: int,
  shares: Mapping[str, float],
) -> dict[str, Timing]:
  """Times versions in turn, so that all of them see the same machine.

  The caller has run each once: compilation is over.

  Args:
    versions: name -> the work; ratios are to the first.
    repeats: >= 1 rounds.
    shares: as in `Comparison`.
  """
  seconds: dict[str, list[float]] = {name: [] for name in versions}
  for _ in range(repeats):
    for name, work in versions.items():
      time.sleep(_PAUSE_S)
      start = time.perf_counter()
      work()
      seconds[name].append(time.perf_counter() - start)
  whole = {
    name: np.array(values) / shares.get(name, 1)
    for name, values in seconds.items()
  }
  first = next(iter(whole.values()))
  return {
    name: Timing(1e3 * float(np.median(v)), float(np.median(v / first)))
    for name, v in whole.items()
  }


def compare(comparison: Comparison, repeats: int) -> list[str]:
  """Returns a table row: checks that versions agree, then times them.

  Raises:
    Disagreement: results differ by more than TOLERANCE.
  """
  say(f'{comparison.what}, {comparison.sizes}')
  results = {
    name: jax.tree.leaves(work()) for name, work in comparison.versions.items()
  }
  ours = results.pop(OURS)
  for name, other in results.items():
    error = disagreement(ours, other)
    if not error <= TOLERANCE:
      raise Disagreement(
        f'{comparison.what}: {name} differs by {error:.1e}, allowed is '
        f'{TOLERANCE:.0e}; no time is worth printing'
      )
  timings = timed(comparison.versions, repeats, comparison.shares)
  columns = [(n, timings.get(n)) for n in (OURS, TORCH, HOST)]
  verdicts = [
    f'{name} >= {target:g}: {_verdict(name, timings, target)}'
    for name, target in comparison.targets.items()
  ]
  return [
    comparison.what,
    comparison.sizes,
    *(f'{t.milliseconds:.2f}' if t else _absent(n) for n, t in columns),
    *(f'{t.ratio:.2f}' if t else '-' for _, t in columns[1:]),
    '; '.join(verdicts),
  ]


HEADER = (
  'what',
  'sizes',
  'ours ms',
  'torch ms',
  'numpy/scipy ms',
  'torch / ours',
  'numpy/scipy / ours',
  'target',
)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns a Markdown table."""
  lines = [header, ['---'] * len(header), *rows]
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def ready(work: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
  """Returns the work on these arguments, done when its arrays are there."""
  return lambda: jax.block_until_ready(work(*arguments))


def passed(holds: bool) -> str:
  """Returns the word for a target that holds or does not."""
  return 'pass' if holds else 'short'


def say(text: str) -> None:
  """Tells on stderr how far the program is."""
  print(text, file=sys.stderr, flush=True)


def _verdict(name, timings, target):
  if name not in timings:
    return 'not measured'
  return passed(timings[name].ratio >= target)


def _absent(name):
  return 'not installed' if name == TORCH else '-'
