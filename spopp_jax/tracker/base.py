"""What the runner asks of prompt evidence, whichever the method."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from spopp_jax import types

# Log-probabilities [T] float32 of each trajectory's tokens under the learner's
# present parameters, observations included; the first token has none and is 0.
ScoreFn = Callable[[Sequence[types.Trajectory]], Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """A terminal outcome and the policy event that generated it.

  Attributes:
    request_id: the request it answers; filed at most once.
    task_id: the prompt it speaks of.
    policy_event: version of the snapshot that generated it.
    reward: in [0, 1].
  """

  request_id: str
  task_id: str
  policy_event: int
  reward: float


class Evidence(Protocol):
  """Persistent success and failure evidence, one pair a prompt."""

  def values(self, task_ids: Sequence[str], policy_event: int) -> np.ndarray:
    """Returns v-hat [n] float64 as visible at a dispatch under the event."""

  def counts(
    self, task_ids: Sequence[str], policy_event: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns success and failure [n] float64 that `values` is made of."""

  def receive(self, outcomes: Sequence[Outcome]) -> None:
    """Takes outcomes as they return, in any order."""

  def consume(
    self, trajectories: Sequence[types.Trajectory], score: ScoreFn
  ) -> None:
    """Takes a batch in receipt order, right after its update."""

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns everything a resumed run needs, as arrays."""

  def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
    """Restores what `state_dict` returned."""
