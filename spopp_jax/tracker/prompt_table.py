"""One row of success and failure evidence a prompt, keyed by task id."""

import difflib
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np


class PromptTable:
  """Success and failure evidence [P] of a fixed set of tasks.

  Attributes:
    task_ids: P keys in the order of the arrays.
    success: [P] float64; alpha.
    failure: [P] float64; beta.
  """

  def __init__(
    self,
    task_ids: Sequence[str],
    success: np.ndarray,
    failure: np.ndarray,
  ):
    self.task_ids = tuple(task_ids)
    self._rows = {task_id: i for i, task_id in enumerate(self.task_ids)}
    if len(self._rows) != len(self.task_ids):
      repeated = next(t for i, t in enumerate(task_ids) if self._rows[t] != i)
      raise ValueError(f'task id {repeated!r} stands twice; ids must be unique')
    self.success = np.array(success, np.float64)
    self.failure = np.array(failure, np.float64)
    self._check_evidence()

  def rows(self, task_ids: Sequence[str]) -> np.ndarray:
    """Returns the row [n] int64 of each task; ValueError if one is unknown."""
    for task_id in task_ids:
      if task_id not in self._rows:
        nearest = difflib.get_close_matches(task_id, self.task_ids, n=1)
        hint = f'; the nearest known one is {nearest[0]!r}' if nearest else ''
        raise ValueError(
          f'task id {task_id!r} is not among the {len(self.task_ids)} tasks '
          f'with evidence{hint}'
        )
    return np.array([self._rows[t] for t in task_ids], np.int64)

  def values(self, task_ids: Sequence[str]) -> np.ndarray:
    """Returns v-hat [n] float64 = success / (success + failure)."""
    rows = self.rows(task_ids)
    success, failure = self.success[rows], self.failure[rows]
    return success / (success + failure)

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns both arrays and a fingerprint [32] uint8 of the task ids."""
    return {
      'task_fingerprint': self._fingerprint(),
      'success': self.success.copy(),
      'failure': self.failure.copy(),
    }

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores what `state_dict` returned; ValueError for other tasks."""
    if not np.array_equal(state['task_fingerprint'], self._fingerprint()):
      raise ValueError(
        'the saved evidence belongs to other tasks, or to these in another '
        f'order, than the present {len(self.task_ids)}; resume with the '
        'configuration of the saved run'
      )
    self.success = np.array(state['success'], np.float64)
    self.failure = np.array(state['failure'], np.float64)
    self._check_evidence()

  def _fingerprint(self) -> np.ndarray:
    digest = hashlib.sha256(repr(self.task_ids).encode('utf-8')).digest()
    return np.frombuffer(digest, np.uint8).copy()

  def _check_evidence(self) -> None:
    shape = (len(self.task_ids),)
    for name, array in (('success', self.success), ('failure', self.failure)):
      if array.shape != shape:
        raise ValueError(
          f'{name} has shape {array.shape}, {shape[0]} tasks need {shape}'
        )
      wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
      if wrong.size:
        raise ValueError(
          f'{name} of task {self.task_ids[wrong[0]]!r} is {array[wrong[0]]}; '
          'evidence must be finite and at least 0'
        )
    empty = np.flatnonzero(self.success + self.failure <= 0)
    if empty.size:
      raise ValueError(
        f'task {self.task_ids[empty[0]]!r} has no evidence; success + failure '
        'must be positive'
      )


def check_reward(task_id: str, reward: float) -> float:
  """Returns the reward; ValueError naming the task unless it is in [0, 1]."""
  if not 0 <= reward <= 1:
    raise ValueError(
      f'reward {reward} of task {task_id!r} is no outcome: rewards must lie in '
      '[0, 1]'
    )
  return float(reward)
