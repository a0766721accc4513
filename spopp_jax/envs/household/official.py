"""Loads official games: game.tw-pddl files and one-row-a-game jsonl."""

import json
import lzma
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from spopp_jax.envs.household import pddl
from spopp_jax.envs.household.game import OFFICIAL_TYPES, Game, GameError

_SHORT_TYPES = {official: short for short, official in OFFICIAL_TYPES.items()}
# Earlier grammars word it "put {o} in/on {r}".
_MOVE = 'move {o} to {r}'
_TASK = re.compile(r'Your task is to: (.*?)"')


def load_games(path: str | pathlib.Path) -> list[Game]:
  """Loads every game of a file or a directory.

  Args:
    path: a `.jsonl` or `.jsonl.xz` file with one game a row (keys id, type,
      task, walkthrough, pddl_problem), a `game.tw-pddl` file, or a directory
      that is searched for `game.tw-pddl` files. Such a file's type stands in
      the `task_type` of a traj_data.json beside it, else in its path. Files
      that say `"solvable": false` are left out.

  Returns:
    The games: rows in order, files sorted by path, with distinct ids.

  Raises:
    GameError: nothing is found or a game is malformed; names the file, the row
      and the reason.
  """
  path = pathlib.Path(path)
  games: dict[str, Game] = {}
  for where, game in _read(path):
    if game.id in games:
      raise GameError(f'{where}: id {game.id!r} occurs twice')
    games[game.id] = game
  if not games:
    raise GameError(f'{path}: holds no games')
  return list(games.values())


def _read(path: pathlib.Path) -> Iterator[tuple[str, Game]]:
  if path.is_dir():
    for file in sorted(path.rglob('game.tw-pddl')):
      game = _read_file(file, file.parent.relative_to(path).as_posix())
      if game is not None:
        yield str(file), game
  elif not path.is_file():
    raise GameError(f'{path}: no such file or directory')
  elif path.name.endswith(('.jsonl', '.jsonl.xz')):
    yield from _read_rows(path)
  elif path.name.endswith('.tw-pddl'):
    game = _read_file(path, path.parent.name)
    if game is not None:
      yield str(path), game
  else:
    raise GameError(
      f'{path}: expected a directory, a .jsonl, .jsonl.xz or .tw-pddl file'
    )


def _read_rows(path: pathlib.Path) -> Iterator[tuple[str, Game]]:
  opener = lzma.open if path.suffix == '.xz' else open
  number = 0
  try:
    with opener(path, 'rt', encoding='utf-8') as lines:
      for number, line in enumerate(lines, start=1):
        if line.strip():
          where = f'{path}, row {number}'
          yield where, game_from_row(_load_json(line, where), where)
  except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
    raise GameError(
      f'{path}: not readable after row {number}, the file looks cut: {error}'
    ) from error


def _read_file(path: pathlib.Path, game_id: str) -> Game | None:
  """Reads one game; None when the file says that it cannot be won."""
  data = _load_json(_bytes(path), str(path))
  if data.get('solvable') is False:
    return None
  grammar = _text(data, 'grammar', str(path))
  task = _TASK.search(grammar)
  if task is None:
    raise GameError(f'{path}: the grammar tells no task')
  if _MOVE not in grammar:
    raise GameError(
      f'{path}: the grammar does not word PutObject as {_MOVE!r}; use game '
      'files of alfworld 0.4.0 or later'
    )
  trajectory = path.with_name('traj_data.json')
  if trajectory.is_file():
    described = _load_json(_bytes(trajectory), str(trajectory))
    kind = _text(described, 'task_type', str(trajectory))
  else:
    kind = _kind_in_path(path)
  row = {**data, 'id': game_id, 'type': kind, 'task': task[1]}
  return game_from_row(row, str(path))


def _bytes(path: pathlib.Path) -> bytes:
  try:
    return path.read_bytes()
  except OSError as error:
    raise GameError(f'{path}: cannot be read: {error}') from error


def _kind_in_path(path: pathlib.Path) -> str:
  for part in reversed(path.parts):
    kind = part.partition('-')[0]
    if kind in _SHORT_TYPES:
      return kind
  raise GameError(
    f'{path}: no task type in the path and no traj_data.json beside it; '
    f'known types are {", ".join(_SHORT_TYPES)}'
  )


def _load_json(text: str | bytes, where: str) -> dict[str, Any]:
  try:
    data = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise GameError(
      f'{where}: not JSON, the text looks cut: {error}'
    ) from error
  if not isinstance(data, dict):
    raise GameError(f'{where}: expected a JSON object')
  return data


def _text(data: dict[str, Any], key: str, where: str) -> str:
  value = data.get(key)
  if not isinstance(value, str) or not value.strip():
    raise GameError(f'{where}: {key!r} is missing or not a text')
  return value


def game_from_row(row: dict[str, Any], where: str) -> Game:
  """Builds a game from one row.

  Args:
    row: id, type (official name), task, walkthrough, pddl_problem.
    where: file and row, for messages.

  Returns:
    The game.

  Raises:
    GameError: names `where` and the reason.
  """
  kind = _text(row, 'type', where)
  if kind not in _SHORT_TYPES:
    raise GameError(
      f'{where}: unknown task type {kind!r}; allowed are '
      f'{", ".join(_SHORT_TYPES)}'
    )
  walkthrough = row.get('walkthrough')
  if not isinstance(walkthrough, list) or not all(
    isinstance(command, str) for command in walkthrough
  ):
    raise GameError(f'{where}: "walkthrough" is missing or not a list of texts')
  try:
    problem = pddl.parse_problem(_text(row, 'pddl_problem', where))
    return Game(
      id=_text(row, 'id', where),
      task_type=_SHORT_TYPES[kind],
      task=_text(row, 'task', where),
      walkthrough=tuple(walkthrough),
      entities=problem.entities,
      facts=problem.facts,
      goal=problem.goal,
    )
  except RecursionError as error:
    raise GameError(f'{where}: the problem is nested too deeply') from error
  except ValueError as error:
    if str(error).startswith(where):
      raise
    raise GameError(f'{where}: {error}') from error


def game_to_row(game: Game) -> dict[str, Any]:
  """Returns the row that game_from_row reads back as the same game."""
  name = re.sub(r'\W+', '_', game.id)
  problem = pddl.Problem(game.entities, game.facts, game.goal)
  return {
    'id': game.id,
    'type': OFFICIAL_TYPES[game.task_type],
    'task': game.task,
    'walkthrough': list(game.walkthrough),
    'pddl_problem': pddl.write_problem(name, problem),
  }
