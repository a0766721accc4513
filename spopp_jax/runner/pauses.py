"""Why the run waits: said while it lasts, and kept.

Each pause has a reason, a beginning and what would lift it. One that lasts is
logged again and again; all that were logged stand in runs/NAME/pauses.jsonl.
"""

import json
import logging
import os
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

_LOG = logging.getLogger(__name__)


class _Beginning(NamedTuple):
  """When a pause began, by both clocks."""

  clock_s: float
  wall_s: float


class Pauses:
  """Reports the waits of one thread."""

  def __init__(
    self,
    path: pathlib.Path | None = None,
    *,
    report_every_s: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
  ):
    """Prepares reporting.

    Args:
      path: file that gets one JSON line a report, and one at the end of a
        pause that was reported, all with the same `since`; None for none.
      report_every_s: a pause is reported when it has lasted so long, and then
        again each time as long.
      clock: seconds, monotonic.
      wall_clock: seconds since the epoch.
    """
    self._path = path
    self._report_every_s = report_every_s
    self._clock = clock
    self._wall_clock = wall_clock
    self._began: _Beginning | None = None
    self._reported_s = 0.0
    self._told: dict[str, str] = {}

  def waiting(self, reason: Callable[[], str], lifted_by: str) -> None:
    """Says that the wait goes on; called now and then during it.

    Args:
      reason: what is waited for; asked only when it is reported.
      lifted_by: what would end the wait.
    """
    now = self._clock()
    if self._began is None:
      self._began = _Beginning(now, self._wall_clock())
      self._reported_s = now
    if now - self._reported_s < self._report_every_s:
      return
    self._reported_s = now
    lasted_s = now - self._began.clock_s
    self._told = {'reason': reason(), 'lifted_by': lifted_by}
    _LOG.warning(
      'waiting for %.0f s: %s. Lifted by: %s',
      lasted_s,
      self._told['reason'],
      lifted_by,
    )
    self._record(over=False)

  def over(self) -> None:
    """Says that the wait has ended."""
    if self._told:
      self._record(over=True)
    self._began, self._told = None, {}

  def _record(self, *, over: bool) -> None:
    if self._path is None or self._began is None:
      return
    record = {
      'since': self._began.wall_s,
      'seconds': self._clock() - self._began.clock_s,
      'over': over,
      **self._told,
    }
    with self._path.open('ab+') as file:
      # A killed process may have left half a line at the end.
      if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read() != b'\n':
          file.write(b'\n')
      file.write(json.dumps(record).encode() + b'\n')
