"""Finds the rows of task ids, at 12 bytes a task beside the ids themselves."""

import difflib
import functools
import hashlib
from collections.abc import Sequence

import numpy as np

# An unknown id is compared with all the known ones; that takes .1 s for these.
_MAX_COMPARED = 10_000
_CHUNK = 65_536


class TaskIndex:
  """Rows of a fixed set of tasks: sorted hashes, and an exact comparison.

  Hashes are the interpreter's own and differ between processes; the rows do
  not depend on them.

  Attributes:
    task_ids: P unique keys in the order of their rows.
  """

  def __init__(self, task_ids: Sequence[str]):
    """Sorts the hashes of the ids.

    Raises:
      ValueError: no task, or an id that stands twice.
    """
    self.task_ids = tuple(task_ids)
    if not self.task_ids:
      raise ValueError('there are 0 task ids; at least one is needed')
    hashes = _hashes(self.task_ids)
    order = np.argsort(hashes, kind='stable')
    self._hashes = hashes[order]
    self._rows = order.astype(np.uint32 if len(order) < 2**32 else np.uint64)
    same = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
    seen = set()
    for row in np.union1d(self._rows[same], self._rows[same + 1]).tolist():
      if self.task_ids[row] in seen:
        raise ValueError(
          f'task id {self.task_ids[row]!r} stands twice; ids must be unique'
        )
      seen.add(self.task_ids[row])

  def rows(self, task_ids: Sequence[str]) -> np.ndarray:
    """Returns the row [n] int64 of each task; ValueError if one is unknown."""
    first = np.searchsorted(self._hashes, _hashes(task_ids))
    last = len(self._rows) - 1
    rows = self._rows[np.minimum(first, last)].astype(np.int64)
    found = [self.task_ids[row] for row in rows.tolist()]
    # Equal hashes of different ids are next to none; unknown ids are as rare.
    if found != list(task_ids):
      for i, (one, task_id) in enumerate(zip(found, task_ids, strict=True)):
        if one != task_id:
          rows[i] = self._search(int(first[i]), task_id)
    return rows

  @functools.cached_property
  def fingerprint(self) -> np.ndarray:
    """Digest [32] uint8 of the ids and their order."""
    digest = hashlib.sha256()
    for start in range(0, len(self.task_ids), _CHUNK):
      chunk = self.task_ids[start : start + _CHUNK]
      digest.update(repr(chunk).encode('utf-8'))
    return np.frombuffer(digest.digest(), np.uint8).copy()

  def _search(self, first: int, task_id: str) -> int:
    """Row of a task among those from `first` on that share its hash."""
    for i in range(first, len(self._rows)):
      if self._hashes[i] != hash(task_id):
        break
      if self.task_ids[self._rows[i]] == task_id:
        return int(self._rows[i])
    known = len(self.task_ids)
    nearest = (
      difflib.get_close_matches(task_id, self.task_ids, n=1)
      if known <= _MAX_COMPARED
      else []
    )
    hint = f'; the nearest known one is {nearest[0]!r}' if nearest else ''
    raise ValueError(
      f'task id {task_id!r} is not among the {known} tasks with evidence{hint}'
    )


def _hashes(task_ids: Sequence[str]) -> np.ndarray:
  return np.fromiter(map(hash, task_ids), np.int64, len(task_ids))
