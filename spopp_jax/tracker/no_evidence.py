"""What group methods keep of prompts: nothing."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from spopp_jax import types
from spopp_jax.tracker import base


class NoEvidence:
  """Values of 0 for all prompts, so that they are drawn uniformly.

  The baseline of a group method is the group's own mean.
  """

  def __init__(
    self, task_ids: Sequence[str], success: np.ndarray, failure: np.ndarray
  ):
    """Takes what the other evidence takes; keeps the names alone."""
    del success, failure
    self._task_ids = tuple(task_ids)

  @property
  def task_ids(self) -> tuple[str, ...]:
    """P keys in the order of the rows."""
    return self._task_ids

  def read(
    self, rows: npt.ArrayLike, policy_event: int | None = None
  ) -> np.ndarray:
    """Returns [n] zeros."""
    del policy_event
    return np.zeros(len(np.asarray(rows)))

  def changed_since(self, version: int) -> tuple[np.ndarray, int]:
    """Returns every row at a first call, none later, and version 0."""
    return np.arange(len(self._task_ids) if version < 0 else 0), 0

  def values(self, task_ids: Sequence[str], policy_event: int) -> np.ndarray:
    """Returns [n] zeros."""
    del policy_event
    return np.zeros(len(task_ids))

  def counts(
    self, task_ids: Sequence[str], policy_event: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns [n] zeros twice."""
    del policy_event
    return np.zeros(len(task_ids)), np.zeros(len(task_ids))

  def receive(self, outcomes: Sequence[base.Outcome]) -> None:
    """Ignores the outcomes."""

  def consume(
    self, trajectories: Sequence[types.Trajectory], score: base.ScoreFn
  ) -> None:
    """Ignores the batch; scores nothing."""

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns nothing: there is no state."""
    return {}

  def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
    """Has nothing to restore."""
