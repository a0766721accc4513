"""One random policy in every library that is compared, and work on it."""

import argparse
import contextlib
import os
import pathlib
import tempfile
import types as python_types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import benchmark_policies as policies
import benchmark_worker
import jax
import numpy as np
import option_types

from spopp_jax.models import dense

HUGGING_FACE = 'Hugging Face'
TUNIX = 'tunix'
SEED = 0
_TUNIX_PROGRAM = pathlib.Path(__file__).with_name('benchmark_tunix.py')


class Version(NamedTuple):
  """Work that is timed, and the arrays that the last of it has left."""

  work: Callable[[], Any]
  result: Callable[[], Sequence[Any]]


class Libraries(NamedTuple):
  """One policy as every library has it.

  Attributes:
    name: of the size.
    config: the size.
    params: by name.
    transformers: the module that measures it, or None.
    model: the policy as transformers has it, or None.
    tunix: the process that measures it, or None.
    versions: what is measured, in words.
  """

  name: str
  config: dense.DecoderConfig
  params: Mapping[str, np.ndarray]
  transformers: python_types.ModuleType | None
  model: Any
  tunix: benchmark_worker.Worker | None
  versions: Sequence[str]

  def words(self) -> str:
    """Returns the sizes of the policy in words."""
    return f'{self.name} ({policies.describe(self.config)})'

  def describe(self, repeats: int) -> str:
    """Returns what was measured how, in words."""
    return (
      f'jax {jax.__version__} on {jax.default_backend()}, {os.cpu_count()} '
      f'cores; {"; ".join(self.versions)}; medians of {repeats} rounds in '
      'which every version ran once; a ratio is the median of the ratios of a '
      'round.'
    )


def add_arguments(
  parser: argparse.ArgumentParser, *, repeats: int, scaled: str
) -> None:
  """Adds the options of a comparison.

  Args:
    parser: takes them.
    repeats: rounds, unless the command line says otherwise.
    scaled: what a scale makes smaller, in words.
  """
  parser.add_argument(
    '--repeats',
    type=option_types.positive_int,
    default=repeats,
    help=f'rounds in which every version runs once (default: {repeats})',
  )
  parser.add_argument(
    '--scale',
    type=option_types.share,
    default=1.0,
    help=f'factor in (0, 1] on {scaled}, to try it out (default: 1)',
  )
  parser.add_argument(
    '--tunix',
    default='',
    metavar='PYTHON',
    help='interpreter of an environment with google-tunix (default: none)',
  )


@contextlib.contextmanager
def loaded(
  name: str, config: dense.DecoderConfig, tunix: str
) -> Iterator[Libraries]:
  """Gives every library a random policy.

  Args:
    name: of the size.
    config: the size.
    tunix: interpreter that has tunix; '' for none.
  """
  params = policies.random_policy(config, SEED)
  module = _transformers()
  model = worker = None
  words = []
  with contextlib.ExitStack() as stack:
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    policies.export(pathlib.Path(directory), config, params)
    if module is None:
      words.append("transformers and torch: pip install -e '.[benchmark]'")
    else:
      model = module.load(pathlib.Path(directory))
      words.append(module.describe())
    if tunix:
      started = benchmark_worker.started(tunix, _TUNIX_PROGRAM)
      worker = stack.enter_context(started)
      words.append(worker.ask('load', directory))
    yield Libraries(name, config, params, module, model, worker, words)


def returning(work: Callable[[], Sequence[Any]]) -> Version:
  """Returns the version of work that returns its result."""
  last: list[Sequence[Any]] = []

  def run():
    last[:] = [work()]

  return Version(run, lambda: last[0])


def _transformers() -> python_types.ModuleType | None:
  try:
    import benchmark_transformers
  except ModuleNotFoundError as error:
    if error.name not in ('torch', 'transformers'):
      raise
    return None
  return benchmark_transformers
