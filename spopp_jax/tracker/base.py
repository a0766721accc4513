"""What the runner asks of prompt evidence, whichever the method."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

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
    reward: R in [0, 1]; adds R to success and 1 - R to failure, fractions too.
      Anything else is refused: outcomes of -1 and 1 would make evidence
      negative, their environment returns (outcome + 1) / 2.
  """

  request_id: str
  task_id: str
  policy_event: int
  reward: float


class Evidence(Protocol):
  """Persistent success and failure evidence, one pair a prompt.

  Each prompt has a row in [0, P), in the order of `task_ids`.
  """

  @property
  def task_ids(self) -> tuple[str, ...]:
    """P unique keys in the order of the rows."""

  def read(
    self, rows: npt.ArrayLike, policy_event: int | None = None
  ) -> np.ndarray:
    """Returns v-hat [n] float64 of rows [n] int; see `values`.

    None leaves out the check that the event is not before the evidence.
    """

  def changed_since(self, version: int) -> tuple[np.ndarray, int]:
    """Returns the rows whose v-hat may have changed since a version.

    Rows [n] int64, each once, and the version to ask with next. Every row if
    version is -1, and after `load_state_dict`.
    """

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
