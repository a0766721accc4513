import json
import pathlib

import pytest


@pytest.fixture(scope='session')
def group_cases():
  """Groups that trainers got wrong, with the right results, by id."""
  path = pathlib.Path(__file__).parents[1] / 'golden' / 'groups.json'
  return json.loads(path.read_text('utf-8'))
