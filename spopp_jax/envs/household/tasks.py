"""Household games as a suite of repeatable tasks."""

import pathlib
from collections.abc import Iterable, Sequence

from spopp_jax.envs import base
from spopp_jax.envs.household.game import TASK_TYPES, Game, GameError
from spopp_jax.envs.household.interpreter import HouseholdEnvironment
from spopp_jax.envs.household.official import load_games
from spopp_jax.envs.household.scenes import generate_games


class HouseholdTasks(base.TaskSuite):
  """A fixed set of games, keyed by their ids, in the order given."""

  def __init__(self, games: Iterable[Game]):
    """Raises GameError when there are none or two share an id."""
    self._games: dict[str, Game] = {}
    for game in games:
      if game.id in self._games:
        raise GameError(f'id {game.id!r} occurs twice')
      self._games[game.id] = game
    if not self._games:
      raise GameError('a suite needs at least one game')
    self._task_ids = tuple(self._games)

  @property
  def task_ids(self) -> Sequence[str]:
    """Keys of all games, in the order given."""
    return self._task_ids

  def game(self, task_id: str) -> Game:
    """Returns a game; KeyError when unknown."""
    return self._games[task_id]

  def make(self, task_id: str) -> HouseholdEnvironment:
    """Returns a fresh environment of the game; KeyError when unknown."""
    return HouseholdEnvironment(self._games[task_id])


def load_tasks(
  source: str | pathlib.Path = '',
  *,
  num_tasks: int = 0,
  seed: int = 0,
  size: str = 'small',
  task_types: Sequence[str] = TASK_TYPES,
) -> HouseholdTasks:
  """Builds a suite of own scenes or of official games.

  Args:
    source: file or directory that load_games reads; '' draws own scenes.
    num_tasks: how many; with a source, its first ones of the task types, and
      0 means all of them.
    seed: of the drawing; unused with a source.
    size: of own scenes; unused with a source.
    task_types: which types are drawn or kept.

  Returns:
    The suite.

  Raises:
    GameError: no games, fewer than num_tasks, or a malformed one.
    ValueError: an argument is out of range.
  """
  if not str(source):
    games = generate_games(
      num_games=num_tasks, seed=seed, size=size, task_types=task_types
    )
    return HouseholdTasks(games)
  games = [
    game for game in load_games(source) if game.task_type in set(task_types)
  ]
  if len(games) < num_tasks:
    raise GameError(
      f'{source}: num_tasks ({num_tasks}) exceeds the {len(games)} games of '
      f'types {", ".join(task_types)}'
    )
  return HouseholdTasks(games[:num_tasks] if num_tasks else games)
