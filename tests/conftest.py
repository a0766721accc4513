"""Golden numbers: facts computed by scripts that do not import spopp_jax."""

import json
import os
import pathlib

import pytest

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
