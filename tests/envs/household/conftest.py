"""Data shared by the household tests."""

import json
import os
import pathlib

import pytest

from spopp_jax.envs import household
from spopp_jax.envs.household import official

GOLDEN = pathlib.Path(__file__).parents[2] / 'golden' / 'household'


@pytest.fixture(scope='session')
def golden_rows():
  """id -> row of the scenes whose official transcripts are kept."""
  with open(GOLDEN / 'scenes.jsonl', encoding='utf-8') as file:
    rows = [json.loads(line) for line in file]
  return {row['id']: row for row in rows}


@pytest.fixture(scope='session')
def golden_games(golden_rows):
  return {
    key: official.game_from_row(row, key) for key, row in golden_rows.items()
  }


@pytest.fixture(scope='session')
def data_dir():
  """Directory with copies of the official games."""
  path = os.environ.get('SPOPP_DATA_DIR')
  if not path:
    pytest.skip('SPOPP_DATA_DIR names no directory with official games')
  return pathlib.Path(path) / 'alfworld'


@pytest.fixture
def compare():
  """Asserts that the interpreter says what the official engine said."""

  def check(game, walk):
    environment = household.HouseholdEnvironment(game)
    admissible = set()
    for number, (command, said, won, gained, lost) in enumerate(walk['steps']):
      where = f'{walk["id"]}, {walk["walk"]} walk, step {number}: {command!r}'
      if command is None:
        assert environment.reset() == said, where
        assert environment.won == won, where
      else:
        result = environment.step(command)
        assert result.observation == said, where
        assert (result.done, result.success) == (won, won), where
      admissible = (admissible - set(lost)) | set(gained)
      assert environment.admissible_commands == sorted(admissible), where

  return check
