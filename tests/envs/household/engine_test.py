"""Runs the official engine beside the interpreter on fresh games."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from spopp_jax.envs import household
from spopp_jax.envs.household import official

pytestmark = [
  pytest.mark.engine,
  pytest.mark.slow,
  pytest.mark.timeout(600),
  pytest.mark.skipif(
    importlib.util.find_spec('alfworld') is None,
    reason='the alfworld extra is not installed',
  ),
]
_RECORDER = pathlib.Path(__file__).with_name('record_official.py')


def _transcripts(rows, directory, seed):
  games, walks = directory / 'games.jsonl', directory / 'walks.jsonl'
  games.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  command = [sys.executable, _RECORDER, games, walks]
  subprocess.run(
    [*map(str, command), '--steps=20', f'--seed={seed}'],
    check=True,
    timeout=540,
    capture_output=True,
  )
  return [json.loads(line) for line in walks.read_text().splitlines()]


def test_own_scenes(tmp_path, compare):
  games = household.generate_games(num_games=6, seed=11, size='medium')
  rows = [official.game_to_row(game) for game in games]
  walks = _transcripts(rows, tmp_path, seed=1)
  assert len(walks) == 12
  by_id = {game.id: game for game in games}
  for walk in walks:
    compare(by_id[walk['id']], walk)


def test_official_games(tmp_path, compare, data_dir):
  files = sorted((data_dir / 'json_2.1.1').rglob('game.tw-pddl'))[::3]
  games = {str(file): household.load_games(file)[0] for file in files}
  rows = [{**json.loads(file.read_bytes()), 'id': str(file)} for file in files]
  walks = _transcripts(rows, tmp_path, seed=2)
  assert len(walks) == 2 * len(files)
  for walk in walks:
    compare(games[walk['id']], walk)
