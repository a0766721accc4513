"""What group methods keep of prompts: nothing."""

from collections.abc import Sequence

import numpy as np

from spopp_jax import types
from spopp_jax.tracker import base


class NoEvidence:
  """Values of 0 for all prompts, so that they are drawn uniformly.

  The baseline of a group method is the group's own mean.
  """

  def __init__(
    self, task_ids: Sequence[str], success: np.ndarray, failure: np.ndarray
  ):
    """Takes what the other evidence takes, and forgets it."""
    del task_ids, success, failure

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
