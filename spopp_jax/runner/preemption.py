"""A polite end: asked to stop, the run saves itself and says how to go on."""

import signal
from types import FrameType
from typing import Any


class Stopped(Exception):  # noqa: N818: no error, the run was asked to.
  """The run was asked to stop and has; the text says how to continue."""


class StopRequest:
  """Whether a signal has asked the run to stop.

  Attributes:
    requested: the signal's name; '' as long as none has come.
  """

  def __init__(self) -> None:
    self.requested = ''

  def listen(self, *signals: signal.Signals) -> None:
    """Notes the first signal; a second one ends the process as usual."""
    for number in signals:
      before = signal.getsignal(number)

      def note(
        number: int, frame: FrameType | None, before: Any = before
      ) -> None:
        del frame
        self.requested = signal.Signals(number).name
        signal.signal(number, before)

      signal.signal(number, note)

  def check(self) -> None:
    """Raises Stopped once a signal has come."""
    if self.requested:
      raise Stopped(f'stopped by {self.requested}')
