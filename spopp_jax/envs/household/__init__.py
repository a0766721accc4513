"""Household text games: interpreter, own scenes, official games, an expert."""

from spopp_jax.envs.household.expert import expert_episode
from spopp_jax.envs.household.game import TASK_TYPES, Game, GameError
from spopp_jax.envs.household.interpreter import HouseholdEnvironment
from spopp_jax.envs.household.official import load_games
from spopp_jax.envs.household.scenes import generate_games
from spopp_jax.envs.household.tasks import HouseholdTasks, load_tasks

__all__ = [
  'TASK_TYPES',
  'Game',
  'GameError',
  'HouseholdEnvironment',
  'HouseholdTasks',
  'expert_episode',
  'generate_games',
  'load_games',
  'load_tasks',
]
