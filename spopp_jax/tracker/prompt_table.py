"""One row of success and failure evidence a prompt, keyed by task id."""

import collections
import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from spopp_jax.tracker import task_index

_FEW = 500


class PromptTable:
  """Success and failure evidence [P] of a fixed set of tasks.

  It remembers which rows changed, for readers that keep something derived from
  them. Whoever writes to `success` and `failure` says so with `mark_changed`.

  Attributes:
    task_ids: P keys in the order of the arrays.
    success: [P] float64; alpha.
    failure: [P] float64; beta.
  """

  def __init__(
    self,
    task_ids: Sequence[str],
    success: npt.ArrayLike,
    failure: npt.ArrayLike,
    *,
    directory: str | os.PathLike | None = None,
  ):
    """Copies the evidence.

    Args:
      task_ids: P unique keys.
      success: [P] float64 >= 0.
      failure: [P] float64 >= 0; success + failure > 0.
      directory: as in `stored`.

    Raises:
      ValueError: repeated ids or unsound evidence, naming the task.
    """
    self._index = task_index.TaskIndex(task_ids)
    self.task_ids = self._index.task_ids
    success, failure = self._sound(success, failure)
    self.success = stored(success, 'success', directory)
    self.failure = stored(failure, 'failure', directory)
    self._version = 0
    self._changes: collections.deque[np.ndarray] = collections.deque()
    self._num_changes = 0

  def rows(self, task_ids: Sequence[str]) -> np.ndarray:
    """Returns the row [n] int64 of each task; ValueError if one is unknown."""
    return self._index.rows(task_ids)

  def read(self, rows: npt.ArrayLike) -> np.ndarray:
    """Returns v-hat [n] float64 = success / (success + failure).

    Args:
      rows: [n] int, in [0, P); repeats are allowed.

    Raises:
      ValueError: a row that does not exist.
    """
    rows = self.checked_rows(rows)
    success = self.success[rows]
    return success / (success + self.failure[rows])

  def checked_rows(self, rows: npt.ArrayLike) -> np.ndarray:
    """Returns the rows [n] int64; ValueError for one outside [0, P)."""
    rows = np.asarray(rows)
    if rows.size and not np.issubdtype(rows.dtype, np.integer):
      raise ValueError(f'rows have dtype {rows.dtype}; they must be integers')
    if rows.size and not (rows.min() >= 0 and rows.max() < len(self.task_ids)):
      wrong = rows[(rows < 0) | (rows >= len(self.task_ids))][0]
      raise ValueError(
        f'row {wrong} does not exist: rows lie in [0, {len(self.task_ids)})'
      )
    return rows.astype(np.int64, copy=False)

  def checked_rewards(
    self, rows: np.ndarray, rewards: npt.ArrayLike
  ) -> np.ndarray:
    """Returns the rewards [n] float64, unless one lies outside [0, 1].

    Args:
      rows: [n] int64; the row that each reward speaks of.
      rewards: [n] float.

    Raises:
      ValueError: naming the task and the reward.
    """
    rewards = np.asarray(rewards, np.float64)
    wrong = np.flatnonzero(~((rewards >= 0) & (rewards <= 1)))
    if wrong.size:
      raise ValueError(
        f'reward {rewards[wrong[0]]} of task '
        f'{self.task_ids[rows[wrong[0]]]!r} is no outcome: rewards must lie in '
        '[0, 1]; an environment whose outcomes are -1 and 1 returns '
        '(outcome + 1) / 2'
      )
    return rewards

  def mark_changed(self, rows: np.ndarray) -> None:
    """Notes that the evidence of these rows [n] changed."""
    self._version += 1
    self._changes.append(rows)
    self._num_changes += len(rows)
    # More notes than rows are dearer than reading every row.
    while self._num_changes > len(self.task_ids):
      self._num_changes -= len(self._changes.popleft())

  def changed_since(self, version: int) -> tuple[np.ndarray, int]:
    """Returns the rows whose evidence may have changed since a version.

    Args:
      version: what an earlier call returned; -1 for a first call.

    Returns:
      Rows [n] int64, each once, and the present version. Every row at a first
      call, after `load_state_dict`, and if more than P changes lie between.
    """
    behind = self._version - version
    if behind > len(self._changes):
      return np.arange(len(self.task_ids)), self._version
    recent = itertools.islice(reversed(self._changes), behind)
    rows = np.concatenate([np.zeros(0, np.int64), *recent])
    if len(rows) < _FEW:
      # A sort gives the interpreter's lock away, and a dispatch waits for it.
      return np.array(sorted(set(rows.tolist())), np.int64), self._version
    return np.unique(rows), self._version

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns copies of both arrays and a fingerprint of the task ids."""
    return {
      'task_fingerprint': self._index.fingerprint.copy(),
      'success': np.array(self.success),
      'failure': np.array(self.failure),
    }

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores what `state_dict` returned; ValueError for other tasks."""
    if not np.array_equal(state['task_fingerprint'], self._index.fingerprint):
      raise ValueError(
        'the saved evidence belongs to other tasks, or to these in another '
        f'order, than the present {len(self.task_ids)}; resume with the '
        'configuration of the saved run'
      )
    success, failure = self._sound(state['success'], state['failure'])
    self.success[:] = success
    self.failure[:] = failure
    self._version += 1
    self._changes.clear()
    self._num_changes = 0

  def _sound(
    self, success: npt.ArrayLike, failure: npt.ArrayLike
  ) -> tuple[np.ndarray, np.ndarray]:
    success = np.asarray(success, np.float64)
    failure = np.asarray(failure, np.float64)
    shape = (len(self.task_ids),)
    for name, array in (('success', success), ('failure', failure)):
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
    empty = np.flatnonzero(success + failure <= 0)
    if empty.size:
      raise ValueError(
        f'task {self.task_ids[empty[0]]!r} has no evidence; success + failure '
        'must be positive'
      )
    return success, failure


def stored(
  values: np.ndarray, name: str, directory: str | os.PathLike | None
) -> np.ndarray:
  """Returns a copy of the values that the caller owns.

  Args:
    values: [P]; what to copy.
    name: of the file, without its ending.
    directory: None for memory; else where the copy lies as a memory-mapped
      .npy file, which is overwritten. The files are working memory of one
      process: what a resumed run needs is in `state_dict`.

  Returns:
    [P] of the same dtype, writable.
  """
  if directory is None:
    return np.array(values)
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  array = np.lib.format.open_memmap(
    path / f'{name}.npy', mode='w+', dtype=values.dtype, shape=values.shape
  )
  array[:] = values
  return array
