"""Event-time prompt memory (SPO++ Eq. 3): the order of arrival is immaterial.

An outcome counts by the policy event that generated it, whenever it arrives.
Each prompt keeps its evidence as seen at the latest event it has an outcome
of: a newer outcome discounts what is there, an older one enters discounted.
Both give the sum of Eq. 3 up to a common factor, which cancels in v-hat.
"""

import operator
from collections.abc import Mapping, Sequence

import numpy as np

from spopp_jax import types
from spopp_jax.tracker import base, prompt_table


class EventTimeEvidence:
  """Evidence in which an outcome k events old weighs retention**k."""

  def __init__(
    self,
    task_ids: Sequence[str],
    success: np.ndarray,
    failure: np.ndarray,
    *,
    retention: float = 0.875,
    event: int = 0,
  ):
    """Starts from offline evidence that was generated at `event`.

    Args:
      task_ids: P unique keys.
      success: [P] float64 >= 0; alpha_0.
      failure: [P] float64 >= 0; beta_0; success + failure > 0.
      retention: (0, 1]; weight kept from one policy event to the next.
      event: policy event of the offline evidence.

    Raises:
      ValueError: naming the argument that is out of range.
    """
    if not 0 < retention <= 1:
      raise ValueError(f'retention ({retention}) must lie in (0, 1]')
    self._retention = float(retention)
    self._table = prompt_table.PromptTable(task_ids, success, failure)
    self._events = np.full(len(task_ids), operator.index(event), np.int64)

  def values(self, task_ids: Sequence[str], policy_event: int) -> np.ndarray:
    """Returns v-hat [n] float64 as visible at a dispatch under the event.

    Time without outcomes scales success and failure alike, so the clock is
    only checked, never used: no weight can underflow on a read.

    Raises:
      ValueError: an unknown task, or an event before an outcome's own.
    """
    self._lags(task_ids, policy_event)
    return self._table.values(task_ids)

  def counts(
    self, task_ids: Sequence[str], policy_event: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns alpha_q [n] and beta_q [n] of Eq. 3, discounted to the event.

    Raises:
      ValueError: an unknown task, or an event before an outcome's own.
    """
    rows = self._table.rows(task_ids)
    weights = self._retention ** self._lags(task_ids, policy_event)
    return (
      weights * self._table.success[rows],
      weights * self._table.failure[rows],
    )

  def receive(self, outcomes: Sequence[base.Outcome]) -> None:
    """Files outcomes under the events that generated them.

    Every outcome counts, also several of one prompt. Nothing is filed if one
    of them is refused.

    Raises:
      ValueError: an unknown task, a reward outside [0, 1], or a request id
        that stands twice among the outcomes.
    """
    rows = self._table.rows([outcome.task_id for outcome in outcomes])
    rewards = np.array(
      [prompt_table.check_reward(o.task_id, o.reward) for o in outcomes],
      np.float64,
    )
    events = np.array(
      [operator.index(o.policy_event) for o in outcomes], np.int64
    )
    requests = [outcome.request_id for outcome in outcomes]
    if len(set(requests)) != len(requests):
      repeated = next(r for r in requests if requests.count(r) > 1)
      raise ValueError(
        f'request {repeated!r} stands twice among the outcomes; file each '
        'request once'
      )
    latest = self._events.copy()
    np.maximum.at(latest, rows, events)
    discount = self._retention ** (latest - self._events).astype(np.float64)
    weights = self._retention ** (latest[rows] - events).astype(np.float64)
    self._table.success *= discount
    self._table.failure *= discount
    np.add.at(self._table.success, rows, weights * rewards)
    np.add.at(self._table.failure, rows, weights * (1 - rewards))
    self._events = latest

  def consume(
    self, trajectories: Sequence[types.Trajectory], score: base.ScoreFn
  ) -> None:
    """Does nothing: an outcome was filed when it was received."""
    del trajectories, score

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns the evidence and the events it is discounted to, as arrays."""
    return {**self._table.state_dict(), 'events': self._events.copy()}

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores what `state_dict` returned; ValueError for other tasks."""
    self._table.load_state_dict(state)
    self._events = np.array(state['events'], np.int64)

  def _lags(self, task_ids: Sequence[str], policy_event: int) -> np.ndarray:
    """Events [n] float64 since the latest outcome of each prompt."""
    rows = self._table.rows(task_ids)
    lags = operator.index(policy_event) - self._events[rows]
    early = np.flatnonzero(lags < 0)
    if early.size:
      i = early[0]
      raise ValueError(
        f'policy event {policy_event} lies before event '
        f'{self._events[rows[i]]}, which generated an outcome of task '
        f'{task_ids[i]!r}; the policy clock must not go back'
      )
    return lags.astype(np.float64)
