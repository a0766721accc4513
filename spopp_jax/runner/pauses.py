"""Why the run waits: said while it lasts, and kept.

Each pause has a reason, a beginning and what would lift it. One that lasts is
logged again and again; all that were logged stand in runs/NAME/pauses.jsonl.
"""

import json
import logging
import pathlib
import time
from collections.abc import Callable

_LOG = logging.getLogger(__name__)


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
      path: file that gets one JSON line a report; None for none.
      report_every_s: a pause is reported when it has lasted so long, and then
        again each time as long.
      clock: seconds, monotonic.
      wall_clock: seconds since the epoch.
    """
    self._path = path
    self._report_every_s = report_every_s
    self._clock = clock
    self._wall_clock = wall_clock
    self._since_s: float | None = None
    self._reported_s = 0.0

  def waiting(self, reason: Callable[[], str], lifted_by: str) -> None:
    """Says that the wait goes on; called now and then during it.

    Args:
      reason: what is waited for; asked only when it is reported.
      lifted_by: what would end the wait.
    """
    now = self._clock()
    if self._since_s is None:
      self._since_s = self._reported_s = now
    if now - self._reported_s < self._report_every_s:
      return
    self._reported_s = now
    lasted_s = now - self._since_s
    why = reason()
    _LOG.warning(
      'waiting for %.0f s: %s. Lifted by: %s', lasted_s, why, lifted_by
    )
    if self._path is not None:
      record = {
        'since': self._wall_clock() - lasted_s,
        'seconds': lasted_s,
        'reason': why,
        'lifted_by': lifted_by,
      }
      with self._path.open('a', encoding='utf-8') as file:
        file.write(json.dumps(record) + '\n')

  def over(self) -> None:
    """Says that the wait has ended."""
    self._since_s = None
