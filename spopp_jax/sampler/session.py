"""For which runner a service works: one session at a time.

A handshake with a new id takes the service over, unless the runner before
still has a stream. The new session begins with an empty ledger and is ready
once the worker has dropped everything of the old one.
"""

import dataclasses
import logging
import queue
import threading

import grpc

from spopp_jax import types
from spopp_jax.sampler import errors, ledger, transfer
from spopp_jax.sampler import worker as worker_lib

_logger = logging.getLogger(__name__)

# A runner that has just ended may be known to have only a moment later.
_FAREWELL_S = 1.0


@dataclasses.dataclass(frozen=True)
class End:
  """Closes a stream: quietly, or with a status."""

  code: grpc.StatusCode | None = None
  text: str = ''


class Stream:
  """What waits to be sent to one caller."""

  def __init__(self) -> None:
    self._outbox: queue.SimpleQueue[types.Trajectory | End] = (
      queue.SimpleQueue()
    )

  def deliver(self, trajectory: types.Trajectory) -> None:
    """Queues a result."""
    self._outbox.put(trajectory)

  def end(self, code: grpc.StatusCode | None = None, text: str = '') -> None:
    """Queues the end."""
    self._outbox.put(End(code, text))

  def take(self) -> tuple[list[types.Trajectory], End | None]:
    """Waits for results; returns all that are there, up to the end if known.

    Every stream ends.
    """
    results: list[types.Trajectory] = []
    item = self._outbox.get()
    while not isinstance(item, End):
      results.append(item)
      try:
        item = self._outbox.get_nowait()
      except queue.Empty:
        return results, None
    return results, item


@dataclasses.dataclass(eq=False)
class Session:
  """The life of one runner at a service.

  Attributes:
    session_id: 32 hex digits; empty before the first runner has come.
    book: what the runner is owed.
    ready: set once the worker works for it.
    streams: its open rollout streams.
    incoming: snapshot that has arrived in part.
    staged: snapshot that waits for its activation.
  """

  session_id: str
  book: ledger.Ledger
  ready: threading.Event
  streams: set[Stream] = dataclasses.field(default_factory=set)
  incoming: transfer.Incoming | None = None
  staged: worker_lib.Snapshot | None = None


class Sessions:
  """Holds the current session; thread-safe."""

  def __init__(
    self,
    worker: worker_lib.Worker,
    book: ledger.Ledger,
    *,
    silence_s: float,
  ):
    """Waits for the first runner, who finds the worker as it is.

    Args:
      worker: works for the current session.
      book: the worker's ledger, empty.
      silence_s: how long a stream can stay open without its runner.
    """
    self._worker = worker
    self._silence_s = silence_s
    ready = threading.Event()
    ready.set()
    self._current = Session('', book, ready)
    self._changed = threading.Condition()

  def enter(self, session_id: str) -> Session:
    """Returns the session of that id, which is the current one from now on.

    Raises:
      HandshakeRefused: another runner's stream is open.
    """
    with self._changed:
      self._changed.wait_for(lambda: self._is_free_for(session_id), _FAREWELL_S)
      if not self._is_free_for(session_id):
        raise errors.HandshakeRefused(
          f'the service works for another runner, session '
          f'{self._current.session_id}, whose rollout stream is open; end that '
          'runner first or start a service of its own for this one (a runner '
          'that vanished without a word is noticed within '
          f'{self._silence_s:g} s)'
        )
      if not self._current.session_id:
        self._current.session_id = session_id
      elif self._current.session_id != session_id:
        _logger.info(
          'session %s follows %s', session_id, self._current.session_id
        )
        book = self._current.book.blank()
        self._current = Session(session_id, book, self._worker.take_over(book))
      return self._current

  def get(self, session_id: str) -> Session:
    """Returns the current session when it has that id.

    Raises:
      SessionEnded: another session is the current one.
    """
    with self._changed:
      is_ready = bool(session_id) and self._current.ready.is_set()
      if not is_ready or session_id != self._current.session_id:
        raise errors.SessionEnded(
          f'session {errors.shown(session_id)!r} is not the one that the '
          f'service works for, {self._current.session_id!r}; shake hands first'
        )
      return self._current

  def join(self, session_id: str, stream: Stream) -> Session:
    """Counts a stream as open; see `get`."""
    with self._changed:
      session = self.get(session_id)
      session.streams.add(stream)
      return session

  def leave(self, session: Session, stream: Stream) -> None:
    """Counts a stream as closed; nothing may be claimed for it any more."""
    with self._changed:
      session.book.abandon(stream.deliver)
      session.streams.discard(stream)
      self._changed.notify_all()

  def _is_free_for(self, session_id: str) -> bool:
    return session_id == self._current.session_id or not self._current.streams
