"""Golden numbers: facts computed by scripts that do not import spopp_jax."""

import json
import os
import pathlib

import hypothesis
import pytest

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile('untimed', deadline=None)
hypothesis.settings.load_profile('untimed')

# Before jax is imported, and for the processes that tests start.
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'

_GOLDEN = pathlib.Path(__file__).parent / 'golden'


@pytest.fixture(scope='session')
def vectors():
  """Inputs and float64 results of formulas, by id."""
  return json.loads((_GOLDEN / 'vectors.json').read_text('utf-8'))


@pytest.fixture(scope='session')
def cases():
  """Small inputs that trainers got wrong, with the right results, by id."""
  return json.loads((_GOLDEN / 'cases.json').read_text('utf-8'))


@pytest.fixture(scope='session')
def compiled_programs(tmp_path_factory):
  """Where programs are kept that one test compiled and others need."""
  path = tmp_path_factory.getbasetemp() / 'compiled-programs'
  path.mkdir()
  return path


@pytest.fixture(scope='session')
def jax_settings():
  """Undoes what tests change of jax's settings, which hold process-wide."""
  import jax

  names = [
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
    'jax_numpy_rank_promotion',
    'jax_disable_most_optimizations',
  ]
  before = {name: jax.config.values[name] for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)
