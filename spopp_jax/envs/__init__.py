"""Text environments: text in, text out, no jax.

An environment is a package or module here with a factory of task suites;
naming the factory in `load_tasks` is all it takes to select it by config.
"""

from collections.abc import Mapping
from typing import Any

from spopp_jax.envs import household

SUITES = ('household',)


def load_tasks(settings: Mapping[str, Any]) -> household.HouseholdTasks:
  """Builds the suite that a configuration's block `environment` names.

  Args:
    settings: name, path, size, task_types, num_tasks and seed.

  Returns:
    The suite.

  Raises:
    ValueError: an unknown name, or what the suite's factory refuses.
  """
  if settings['name'] not in SUITES:
    raise ValueError(
      f'environment ({settings["name"]!r}) is unknown; there is: '
      + ', '.join(SUITES)
    )
  return household.load_tasks(
    settings['path'],
    num_tasks=settings['num_tasks'],
    seed=settings['seed'],
    size=settings['size'],
    task_types=settings['task_types'],
  )
