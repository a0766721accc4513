"""What the rollout asks of an environment: text in, text out."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class StepResult:
  """What one action led to.

  Attributes:
    observation: text shown to the agent.
    done: True when the episode cannot go on.
    success: True when the goal holds; the terminal outcome is its value.
  """

  observation: str
  done: bool
  success: bool


class Environment(Protocol):
  """One episode of one task; used by one thread at a time."""

  def reset(self) -> str:
    """Starts the episode and returns the first observation, goal included."""

  def step(self, action: str) -> StepResult:
    """Carries out one action given as text; never raises on its wording."""


class TaskSuite(Protocol):
  """A fixed set of repeatable tasks."""

  @property
  def task_ids(self) -> Sequence[str]:
    """Keys of all tasks, in a fixed order, without repeats."""

  def make(self, task_id: str) -> Environment:
    """Returns a fresh environment of the task; KeyError when unknown."""
