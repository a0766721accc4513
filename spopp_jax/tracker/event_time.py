"""Event-time prompt memory (SPO++ Eq. 3): the order of arrival is immaterial.

An outcome counts by the policy event that generated it, whenever it arrives.
Each prompt keeps its evidence as seen at the latest event it has an outcome
of: a newer outcome discounts what is there, an older one enters discounted.
Both give the sum of Eq. 3 up to a common factor, which cancels in v-hat.

A reward R in [0, 1] adds R to success and 1 - R to failure, fractions too.
"""

import collections
import operator
import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

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
    directory: str | os.PathLike | None = None,
  ):
    """Starts from offline evidence that was generated at `event`.

    Args:
      task_ids: P unique keys.
      success: [P] float64 >= 0; alpha_0.
      failure: [P] float64 >= 0; beta_0; success + failure > 0.
      retention: (0, 1]; weight kept from one policy event to the next.
      event: policy event of the offline evidence.
      directory: None to hold three arrays [P] in memory; else where they lie
        as memory-mapped files, which are overwritten.

    Raises:
      ValueError: naming the argument that is out of range.
    """
    if not 0 < retention <= 1:
      raise ValueError(f'retention ({retention}) must lie in (0, 1]')
    self._retention = float(retention)
    self._table = prompt_table.PromptTable(
      task_ids, success, failure, directory=directory
    )
    self._events = prompt_table.stored(
      np.broadcast_to(np.int64(operator.index(event)), len(self.task_ids)),
      'events',
      directory,
    )

  @property
  def task_ids(self) -> tuple[str, ...]:
    """P keys in the order of the rows."""
    return self._table.task_ids

  def read(
    self, rows: npt.ArrayLike, policy_event: int | None = None
  ) -> np.ndarray:
    """Returns v-hat [n] float64 of rows [n] int.

    Time without outcomes scales success and failure alike, so the clock is
    only checked, never used: no weight can underflow on a read. With None it
    is not even checked.

    Raises:
      ValueError: a row outside [0, P), or an event before an outcome's own.
    """
    rows = self._table.checked_rows(rows)
    if policy_event is not None:
      self._lags(rows, policy_event)
    return self._table.read(rows)

  def file(
    self, rows: npt.ArrayLike, events: npt.ArrayLike, rewards: npt.ArrayLike
  ) -> None:
    """Files n outcomes under the events that generated them.

    Several outcomes of one row all count. Their order in the call changes no
    bit of the evidence; in what order and how many at a time they are filed
    changes it by rounding alone. The work is O(n log n) whatever P is.

    Args:
      rows: [n] int, in [0, P).
      events: [n] int; policy events.
      rewards: [n] float, in [0, 1]; R adds R to success, 1 - R to failure.

    Raises:
      ValueError: a row that does not exist, a reward outside [0, 1], events
        that are not whole, or lengths that differ; nothing is filed then.
    """
    rows = self._table.checked_rows(rows)
    rewards = self._table.checked_rewards(rows, rewards)
    events = np.asarray(events)
    if not rows.shape == events.shape == rewards.shape == (rows.size,):
      raise ValueError(
        f'rows {rows.shape}, events {events.shape} and rewards '
        f'{rewards.shape} must have one and the same length'
      )
    if not rows.size:
      return
    if not np.issubdtype(events.dtype, np.integer):
      raise ValueError(f'events have dtype {events.dtype}; use integers')
    # In one order whatever the order of arrival: float sums depend on it.
    order = np.lexsort((rewards, events, rows))
    rows, events, rewards = rows[order], events[order], rewards[order]
    starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
    ends = np.append(starts[1:], len(rows))
    touched = rows[starts]
    before = self._events[touched]
    latest = np.maximum(before, events[ends - 1])
    discount = self._power(latest - before)
    weights = self._power(np.repeat(latest, ends - starts) - events)
    for evidence, shares in (
      (self._table.success, rewards),
      (self._table.failure, 1 - rewards),
    ):
      evidence[touched] = discount * evidence[touched] + np.add.reduceat(
        weights * shares, starts
      )
    self._events[touched] = latest
    self._table.mark_changed(touched)

  def changed_since(self, version: int) -> tuple[np.ndarray, int]:
    """Returns the rows changed since a version, and the present version."""
    return self._table.changed_since(version)

  def values(self, task_ids: Sequence[str], policy_event: int) -> np.ndarray:
    """Returns v-hat [n] float64 as visible at a dispatch under the event.

    Raises:
      ValueError: an unknown task, or an event before an outcome's own.
    """
    return self.read(self._table.rows(task_ids), policy_event)

  def counts(
    self, task_ids: Sequence[str], policy_event: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns alpha_q [n] and beta_q [n] of Eq. 3, discounted to the event.

    Raises:
      ValueError: an unknown task, or an event before an outcome's own.
    """
    rows = self._table.rows(task_ids)
    weights = self._power(self._lags(rows, policy_event))
    return (
      weights * self._table.success[rows],
      weights * self._table.failure[rows],
    )

  def receive(self, outcomes: Sequence[base.Outcome]) -> None:
    """Files outcomes under the events that generated them; see `file`.

    Raises:
      ValueError: an unknown task, a reward outside [0, 1], or a request id
        that stands twice among the outcomes; nothing is filed then.
    """
    requests = [outcome.request_id for outcome in outcomes]
    if len(set(requests)) != len(requests):
      repeated = collections.Counter(requests).most_common(1)[0][0]
      raise ValueError(
        f'request {repeated!r} stands twice among the outcomes; file each '
        'request once'
      )
    self.file(
      self._table.rows([outcome.task_id for outcome in outcomes]),
      np.array([operator.index(o.policy_event) for o in outcomes], np.int64),
      np.array([outcome.reward for outcome in outcomes], np.float64),
    )

  def consume(
    self, trajectories: Sequence[types.Trajectory], score: base.ScoreFn
  ) -> None:
    """Does nothing: an outcome was filed when it was received."""
    del trajectories, score

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns the evidence and the events it is discounted to, as arrays."""
    return {**self._table.state_dict(), 'events': np.array(self._events)}

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores what `state_dict` returned; ValueError for other tasks."""
    self._table.load_state_dict(state)
    self._events[:] = state['events']

  def _power(self, lags: np.ndarray) -> np.ndarray:
    return self._retention ** lags.astype(np.float64)

  def _lags(self, rows: np.ndarray, policy_event: int) -> np.ndarray:
    """Events [n] int64 since the latest outcome of each row."""
    lags = operator.index(policy_event) - self._events[rows]
    early = np.flatnonzero(lags < 0)
    if early.size:
      row = rows[early[0]]
      raise ValueError(
        f'policy event {policy_event} lies before event {self._events[row]}, '
        f'which generated an outcome of task {self.task_ids[row]!r}; the '
        'policy clock must not go back'
      )
    return lags
