"""The loop of the one thread that touches the driver and its engine."""

import dataclasses
import logging
import queue
import threading
import time

import numpy as np

from spopp_jax.sampler import base, ledger, rollout

_logger = logging.getLogger(__name__)

# Longest sleep of an idle worker; bounds how late it sees a stop.
POLL_S = 0.2


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """A verified snapshot that waits for its activation.

  Attributes:
    version: number of optimizer updates published.
    checksum: sha256 of its bytes, 64 hex digits.
    params: name -> array.
  """

  version: int
  checksum: str
  params: dict[str, np.ndarray]


@dataclasses.dataclass
class Activation:
  """A command to switch snapshots.

  Attributes:
    snapshot: what to switch to.
    book: whose requests must end first; the switch is theirs alone.
    deadline_s: when to give up, on the monotonic clock.
    interrupt: switch under the open episodes.
    done: set once the fields below are final.
    refusal: why the old snapshot is still active; '' when it is not.
    is_late: True when the old version did not drain in time.
  """

  snapshot: Snapshot
  book: ledger.Ledger
  deadline_s: float
  interrupt: bool = False
  done: threading.Event = dataclasses.field(default_factory=threading.Event)
  refusal: str = ''
  is_late: bool = False


class Worker:
  """Runs commands in their order; everything else waits in the queue.

  Attributes:
    active: version and checksum of the snapshot that generates; replaced as
      one object, so any thread may read it.
  """

  def __init__(self, driver: rollout.RolloutDriver, book: ledger.Ledger):
    self.active = (
      driver.engine.policy_version,
      driver.engine.weights_checksum,
    )
    self._driver = driver
    self._book = book
    self._commands: queue.SimpleQueue[base.Request | Activation | None] = (
      queue.SimpleQueue()
    )
    self._successors: queue.SimpleQueue[
      tuple[ledger.Ledger, threading.Event]
    ] = queue.SimpleQueue()
    self._activation: Activation | None = None
    self._stopping = threading.Event()

  def send(self, command: base.Request | Activation) -> None:
    """Queues a command; called from any thread."""
    self._commands.put(command)

  def take_over(self, book: ledger.Ledger) -> threading.Event:
    """Makes another ledger the one that counts; called from any thread.

    It overtakes every command. What the old ledger owes is dropped, its
    switches are refused and no snapshot is active.

    Args:
      book: what is owed from then on.

    Returns:
      Set once that is so.
    """
    done = threading.Event()
    self._successors.put((book, done))
    self._commands.put(None)
    return done

  def stop(self) -> None:
    """Makes `run` return after the step it is in; called from any thread."""
    self._stopping.set()
    self._commands.put(None)

  def run(self) -> None:
    """Works until `stop`; raises whatever the engine raises."""
    while not self._stopping.is_set():
      self._make_way()
      self._take_commands()
      for trajectory in self._driver.step():
        self._book.finish(trajectory)
      self._try_to_activate()
      for request_id in self._book.expire():
        _logger.warning('cancelled %s: nobody claims it', request_id)
        self._driver.cancel(request_id)

  def _make_way(self) -> None:
    """Forgets one ledger for the next."""
    while not self._successors.empty():
      self._book, done = self._successors.get_nowait()
      self._driver.forget()
      self.active = (-1, '')
      done.set()

  def _take_commands(self) -> None:
    # While a switch is due nothing is taken: later requests come after it.
    wait = self._driver.is_idle
    while self._activation is None:
      try:
        command = self._commands.get(wait, POLL_S)
      except queue.Empty:
        return
      wait = False
      if command is None:
        return
      if isinstance(command, Activation):
        self._activation = command
      elif self._book.owes(command):
        # It may have been cancelled while it waited for this line, and its
        # ledger may have been replaced.
        self._driver.submit(command)

  def _try_to_activate(self) -> None:
    activation = self._activation
    if activation is None:
      return
    activation.is_late = time.monotonic() > activation.deadline_s
    if activation.book is not self._book:
      activation.refusal = 'its session has ended'
    elif activation.is_late:
      activation.refusal = (
        f'version {self.active[0]} did not drain in time: '
        f'{self._driver.num_open} episodes are open'
      )
    elif not (activation.interrupt or self._driver.is_idle):
      return
    else:
      self._load(activation)
    self._activation = None
    activation.done.set()

  def _load(self, activation: Activation) -> None:
    snapshot = activation.snapshot
    if snapshot.version <= self.active[0]:
      activation.refusal = (
        f'version {snapshot.version} must exceed the active version '
        f'{self.active[0]}'
      )
      return
    try:
      self._driver.load(
        snapshot.params, version=snapshot.version, checksum=snapshot.checksum
      )
    except ValueError as error:
      activation.refusal = (
        f'the engine refused version {snapshot.version}: {error}'
      )
      return
    self.active = (snapshot.version, snapshot.checksum)
    _logger.info('version %d is active', snapshot.version)
