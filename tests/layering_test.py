"""Imports flow one way; what a violation reads like stands in the cases."""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Package or module of spopp_jax -> those it may import, besides itself.
ALLOWED = {
  'types': set(),
  'kernels': {'types'},
  'objectives': {'kernels', 'types'},
  'tracker': {'types'},
  'envs': {'types'},
  'models': {'types'},
  'evaluation': {'types'},
  'sampler': {'envs', 'models', 'types'},
  'learner': {'kernels', 'models', 'objectives', 'types'},
  'runner': {
    'envs',
    'kernels',
    'learner',
    'models',
    'objectives',
    'sampler',
    'tracker',
    'types',
  },
}
PURE = {'types', 'kernels', 'objectives'}
PURE_FORBIDDEN = {
  *('grpc', 'logging', 'orbax', 'os', 'threading', 'time', 'transformers'),
}
# Package -> all that it may import from other projects.
OTHER_PROJECTS = {
  'tracker': {'numpy'},
  'evaluation': {'matplotlib', 'numpy'},
}
ENVS_FORBIDDEN = {'chex', 'flax', 'jax', 'jaxlib', 'optax', 'orbax'}
# Project -> the only packages or files that may import it.
ONLY_IN = {
  'grpc': ('sampler/',),
  'grpc_health': ('sampler/',),
  'orbax': ('learner/checkpoint.py',),
  'gguf': ('models/gguf_files.py',),
  'transformers': ('models/hf_weights.py', 'models/tokenizer.py'),
  'tensorflow_datasets': ('envs/',),
  'matplotlib': ('evaluation/plots.py',),
  'configs': ('runner/config.py',),
  'experiments': (),
  'tests': (),
  'tensorflow': (),
  'torch': (),
  'clu': (),
}
LAZY = {'matplotlib', 'tensorflow_datasets', 'transformers'}
JIT_IN = {'learner/supervised.py', 'learner/update.py', 'sampler/engine.py'}
JIT = {'jit', 'pjit', 'pmap'}
# tokenizers raises a bare Exception at a file that is none, transformers what
# its packages raise.
BROAD_EXCEPT_IN = {
  'models/tokenizer.py',
  'models/word_tokenizer.py',
  'sampler/service.py',
}
DUMPING_GROUNDS = {'common', 'helper', 'helpers', 'misc', 'util', 'utils'}
MAX_LINES = 400


class Import(NamedTuple):
  """A dotted name that a file imports, and whether at import time."""

  name: str
  line: int
  lazy: bool


def _imports(tree: ast.AST, lazy: bool = False) -> Iterator[Import]:
  for node in ast.iter_child_nodes(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield Import(alias.name, node.lineno, lazy)
    elif isinstance(node, ast.ImportFrom):
      module = '.' * node.level + (node.module or '')
      for alias in node.names:
        yield Import(f'{module}.{alias.name}', node.lineno, lazy)
    elif isinstance(node, ast.Call) and 'import' in ast.unparse(node.func):
      for argument in node.args:
        if isinstance(argument, ast.Constant):
          yield Import(str(argument.value), node.lineno, lazy)
    typing_only = isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.unparse(
      node.test
    )
    inside = isinstance(
      node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    )
    yield from _imports(node, lazy or inside or typing_only)


def _import_violations(file: str, item: Import) -> Iterator[str]:
  package = file.split('/')[0].removesuffix('.py')
  if item.name.startswith('.'):
    yield 'relative import: write the full name'
    return
  top, *rest = item.name.split('.')
  if top == 'spopp_jax':
    other = rest[0] if rest else ''
    if other != package and other not in ALLOWED.get(package, set()):
      yield f'{package} must not import {other or "spopp_jax as a whole"}'
    return
  if package in PURE and top in PURE_FORBIDDEN:
    yield f'{package} must not import {top}'
  if package == 'envs' and top in ENVS_FORBIDDEN:
    yield f'envs must not import {top}'
  if (
    package in OTHER_PROJECTS
    and top not in sys.stdlib_module_names
    and top not in OTHER_PROJECTS[package]
  ):
    yield f'{package} may only import {sorted(OTHER_PROJECTS[package])}'
  if top in ONLY_IN and not any(map(file.startswith, ONLY_IN[top])):
    yield f'{top} belongs in {ONLY_IN[top] or "no file here"}'
  if top in LAZY and not item.lazy:
    yield f'{top} is slow: import it inside the function'


def _file_violations(file: str, source: str) -> Iterator[str]:
  tree = ast.parse(source)
  for item in _imports(tree):
    for reason in _import_violations(file, item):
      yield f'{file}:{item.line}: {reason}'
  if pathlib.PurePath(file).stem in DUMPING_GROUNDS:
    yield f'{file}: name it after what it holds'
  if len(source.splitlines()) > MAX_LINES:
    yield f'{file}: above {MAX_LINES} lines it holds two ideas'
  for node in ast.walk(tree):
    name = getattr(node, 'attr', None) or getattr(node, 'id', None)
    if name in JIT and file not in JIT_IN:
      yield f'{file}:{node.lineno}: jit only in {sorted(JIT_IN)}'
    if isinstance(node, ast.ExceptHandler) and file not in BROAD_EXCEPT_IN:
      caught = ast.unparse(node.type) if node.type else 'Exception'
      if re.search(r'\b(Base)?Exception\b', caught):
        yield f'{file}:{node.lineno}: catch what can be handled'


def violations(package: pathlib.Path) -> list[str]:
  """Returns what is wrong in a tree laid out like spopp_jax."""
  found = []
  for path in sorted(package.rglob('*.py')):
    file = path.relative_to(package).as_posix()
    if '_pb2' not in path.stem:  # Generated.
      found += _file_violations(file, path.read_text(encoding='utf-8'))
  return found


def test_imports_flow_one_way():
  assert violations(ROOT / 'spopp_jax') == []


def test_every_package_has_its_arrows():
  package = ROOT / 'spopp_jax'
  there = {path.parent.name for path in package.glob('*/__init__.py')}
  there |= {path.stem for path in package.glob('*.py')} - {'__init__'}
  assert there == ALLOWED.keys()


@pytest.mark.parametrize(
  'file, source, words',
  [
    ('sampler/x.py', 'from spopp_jax.learner import update', 'import learner'),
    ('learner/x.py', 'import spopp_jax.sampler.client', 'import sampler'),
    (
      'learner/x.py',
      'def f():\n  from spopp_jax.sampler import client',
      'x.py:2: learner must not import sampler',
    ),
    ('kernels/x.py', 'from spopp_jax import types, models', 'import models'),
    ('objectives/x.py', 'from spopp_jax.learner import x', 'import learner'),
    ('types.py', 'from spopp_jax import kernels', 'types must not'),
    ('models/x.py', 'from spopp_jax.kernels import x', 'import kernels'),
    ('tracker/x.py', 'from spopp_jax.envs import base', 'import envs'),
    ('evaluation/x.py', 'from spopp_jax.runner import x', 'import runner'),
    ('envs/x.py', 'import spopp_jax', 'as a whole'),
    ('envs/a/x.py', 'from spopp_jax.models import x', 'import models'),
    ('kernels/x.py', 'from . import segments', 'relative import'),
    ('kernels/x.py', 'import os.path', 'must not import os'),
    ('objectives/x.py', 'def f():\n  import time', 'must not import time'),
    ('envs/x.py', 'import jax.numpy as jnp', 'must not import jax'),
    ('tracker/x.py', 'import scipy', "only import ['numpy']"),
    ('tracker/x.py', 'import jax', "only import ['numpy']"),
    ('runner/x.py', 'import grpc', 'grpc belongs in'),
    ('runner/x.py', 'from grpc_health.v1 import health', 'grpc_health'),
    ('learner/x.py', 'import orbax.checkpoint as ocp', 'orbax belongs in'),
    ('models/x.py', 'def f():\n  import transformers', 'belongs in'),
    (
      'models/tokenizer.py',
      'import transformers',
      'slow: import it inside the function',
    ),
    ('envs/x.py', 'import tensorflow_datasets as tfds', 'inside the function'),
    ('runner/x.py', 'import tensorflow as tf', 'no file here'),
    ('learner/x.py', 'from torch import nn', 'no file here'),
    ('runner/x.py', 'import importlib\nimportlib.import_module("torch")', 'x.'),
    ('runner/x.py', 'from experiments import train', 'no file here'),
    ('runner/x.py', 'import jax\nf = jax.jit(g)', 'x.py:2: jit only in'),
    ('learner/x.py', 'from flax import nnx\n@nnx.jit\ndef f(): ...', 'jit'),
    ('kernels/x.py', 'try:\n  f()\nexcept Exception:\n  pass', 'x.py:3'),
    ('kernels/x.py', 'try:\n  f()\nexcept:\n  pass', 'x.py:3'),
    (
      'runner/x.py',
      'try:\n  f()\nexcept (OSError, Exception):\n  pass',
      'x.py:3',
    ),
    ('runner/utils.py', '', 'name it after'),
    ('runner/x.py', 'a = 1\n' * 401, 'above 400 lines'),
  ],
)
def test_a_planted_violation_is_found(tmp_path, file, source, words):
  path = tmp_path / file
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(source)
  found = violations(tmp_path)
  assert len(found) == 1
  assert words in found[0]
  assert found[0].startswith(file)


@pytest.mark.parametrize(
  'file, source',
  [
    ('runner/x.py', 'from spopp_jax.learner import x\nimport time'),
    ('sampler/x.py', 'import grpc\nfrom spopp_jax import envs, models, types'),
    ('learner/checkpoint.py', 'import orbax.checkpoint as ocp'),
    ('learner/update.py', 'import jax\nf = jax.jit(g)'),
    ('models/hf_weights.py', 'def f():\n  import transformers'),
    ('envs/x.py', 'def f():\n  import tensorflow_datasets'),
    (
      'evaluation/plots.py',
      'from typing import TYPE_CHECKING\n'
      'if TYPE_CHECKING:\n  from matplotlib import figure',
    ),
    ('tracker/x.py', 'import math\nimport numpy as np'),
    ('sampler/service.py', 'try:\n  f()\nexcept Exception:\n  pass'),
    ('runner/x.py', 'try:\n  f()\nexcept OSError:\n  pass'),
    ('runner/x.py', 'a = 1\n' * 400),
    ('sampler/x_pb2.py', 'import torch\n' * 500),
  ],
)
def test_what_is_allowed_is_not_found(tmp_path, file, source):
  path = tmp_path / file
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(source)
  assert violations(tmp_path) == []
