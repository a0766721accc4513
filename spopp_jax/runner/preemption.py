"""A polite end: asked to stop, the run saves itself and says how to go on."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class Stopped(Exception):  # noqa: N818: no error, the run was asked to.
  """The run was asked to stop and has; the text says how to continue.

  Attributes:
    exit_code: what the process should end with.
  """

  def __init__(self, reason: str, exit_code: int = 0):
    super().__init__(reason)
    self.exit_code = exit_code


class StopRequest:
  """Whether the run is asked to stop, by a signal or otherwise.

  Attributes:
    was_seen: a check has raised.
  """

  def __init__(self) -> None:
    self.was_seen = False
    self._reason: Stopped | None = None

  def ask(self, reason: Stopped) -> None:
    """Has the next check raise; a later reason takes an earlier one's place."""
    self._reason = reason

  def listen(
    self,
    *signals: signal.Signals,
    on_signal: Callable[[str], None] | None = None,
  ) -> None:
    """Notes the first signal; a second one ends the process as usual.

    Args:
      signals: which.
      on_signal: called with a signal's name in place of noting it.
    """
    for number in signals:
      before = signal.getsignal(number)
      if before == signal.SIG_IGN:  # as nohup asks for
        continue

      def note(
        number: int, frame: FrameType | None, before: Any = before
      ) -> None:
        del frame
        name = signal.Signals(number).name
        signal.signal(number, before)
        if on_signal is None:
          self.ask(Stopped(f'stopped by {name}'))
        else:
          on_signal(name)

      signal.signal(number, note)

  def check(self) -> None:
    """Raises Stopped once there is a reason."""
    if self._reason is not None:
      self.was_seen = True
      raise self._reason
