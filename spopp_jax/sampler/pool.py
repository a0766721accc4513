"""Many services as one sampler: placement, loss, joining and leaving.

submit --> waiting --place--> the member with the most room --> reply --> next
              ^                    | lost, or silent for too long
              +--------------------+ (under the same request id)

Whatever happens to a member, a reply, a loss, an installed snapshot, is an
event in one queue, and one thread alone (`start`) handles them. Connecting and
installing take long and have threads of their own.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from spopp_jax import types
from spopp_jax.sampler import (
  base,
  crew,
  errors,
  member,
  placement,
  publication,
  retries,
  weights,
)

_Answer = types.Trajectory | errors.SamplerError
_MOST_AT_ONCE = 64
# How often silence, membership and a pool without members are looked at.
_TICK_S = 1.0


def _in_a_thread(work: Callable[[], None]) -> None:
  threading.Thread(target=work, name='sampler-member', daemon=True).start()


class Pool:
  """Implements `sampler.base.Sampler` over any number of services.

  A request goes to the connected member with the most room that has the newest
  snapshot. A lost member's requests go to others; while there are none they
  wait for its return. A request without an answer in `request_timeout_s` is
  asked of another member too, and whose answer is first counts.
  """

  def __init__(
    self,
    names: Callable[[], Iterable[str]],
    make_connect: Callable[[str], member.Connect],
    *,
    budget: retries.RetryBudget,
    request_timeout_s: float,
    recovery_timeout_s: float,
    store: publication.Store | None = None,
    clock: Callable[[], float] = time.monotonic,
    run_beside: Callable[[Callable[[], None]], None] = _in_a_thread,
    events: member.Events | None = None,
  ):
    """Begins to connect to every service.

    Args:
      names: returns the addresses that belong to the pool; asked about once
        a second.
      make_connect: returns what connects to an address.
      budget: tries a rollout has left.
      request_timeout_s: longest wait for an answer from one member.
      recovery_timeout_s: longest time without any connected member.
      store: directory that snapshots are written to once for all members;
        without it they are sent from memory.
      clock: seconds, monotonic.
      run_beside: runs what takes long, by default in a thread.
      events: where events wait.
    """
    self._clock = clock
    self._store = store
    self._events: member.Events = events or queue.SimpleQueue()
    self._lock = threading.RLock()
    # Lists of answers, new ones that are not in a list yet, and a list that
    # is being taken from its end.
    self._answers: queue.SimpleQueue[list[_Answer]] = queue.SimpleQueue()
    self._fresh: list[_Answer] = []
    self._taken: list[_Answer] = []
    self._placement = placement.Placement(budget, clock)
    self._crew = crew.Crew(
      names,
      make_connect,
      self._placement,
      lambda answer: self._fresh.append(answer),
      request_timeout_s=request_timeout_s,
      recovery_timeout_s=recovery_timeout_s,
      clock=clock,
      run_beside=run_beside,
      events=self._events,
      store=store,
    )
    self._submitted = 0  # lists of requests
    self._thread: threading.Thread | None = None
    self._closed = threading.Event()
    self._next_tick_s = clock()

  def start(
    self, deadline_s: float, check_stop: Callable[[], None] = lambda: None
  ) -> None:
    """Handles events in a thread from now on; waits for the first member.

    Args:
      deadline_s: longest wait.
      check_stop: called about once a second of waiting; may raise.

    Raises:
      SamplerError: none has connected in time; of the last one to fail.
    """
    # The members' own deadlines are the same; theirs say more.
    deadline = self._clock() + deadline_s + _TICK_S
    with contextlib.ExitStack() as stack:
      stack.callback(self.close)
      while not any(m.connected for m in self._crew.members.values()):
        check_stop()
        hopeless = all(m.losses_in_a_row for m in self._crew.members.values())
        if hopeless or self._clock() > deadline:
          raise self._crew.last_problem or errors.SamplerLost(
            f'no sampler answers within {deadline_s} s'
          )
        self._crew.was_connected()
        self.handle_event(min(_TICK_S, deadline_s))
      stack.pop_all()
    self._thread = threading.Thread(
      target=self._work, name='sampler-pool', daemon=True
    )
    self._thread.start()

  def submit(self, requests: Sequence[base.Request]) -> None:
    """Queues requests; an unanswered request_id is not asked twice."""
    if self._thread is None:
      with self._lock:
        self._placement.add(requests)
        self._crew.place()
    elif requests:
      # Whoever waits for the lock waits for a whole series of events.
      self._submitted += 1
      self._events.put(member.Event(None, 'submitted', requests))

  @property
  def num_arrived(self) -> int:
    """Answers that `next` returns without waiting."""
    if not self._taken and not self._answers.empty():
      self._taken = self._answers.get()[::-1]
    return len(self._taken)

  @property
  def redispatched(self) -> int:
    """Requests that were taken from a member and asked of another, so far."""
    return self._placement.redispatched

  def next(self, timeout_s: float) -> types.Trajectory:
    """Returns the next answer, in order of arrival, repeats included.

    Raises:
      SamplerLost: no member could be restored in time, or none is left.
      SamplerSilent: the only member leaves requests unanswered.
      SamplerTimeout: nothing is outstanding, or nothing finished in time.
    """
    deadline = self._clock() + timeout_s
    while not self.num_arrived:
      with self._lock:
        self._deliver()
        all_known = self._submitted == self._crew.submitted
        if all_known and self._placement.is_empty and self._answers.empty():
          raise errors.NothingOutstanding(
            'nothing is outstanding; submit first'
          )
      left_s = deadline - self._clock()
      if self._thread is None and left_s > 0:
        self.handle_event(left_s)
        continue
      try:
        self._taken = self._answers.get(timeout=max(0.0, left_s))[::-1]
      except queue.Empty:
        raise errors.SamplerTimeout(
          f'nothing finished within {timeout_s} s: {self.report()}'
        ) from None
    answer = self._taken.pop()
    if isinstance(answer, errors.SamplerError):
      raise answer
    return answer

  def publish(
    self,
    params: Mapping[str, np.ndarray],
    version: int,
    *,
    interrupt: bool = False,
  ) -> str:
    """Makes a snapshot the one that all later requests are generated with.

    It returns before the members have it: each installs it once it has
    answered what it owes, and takes requests again then.

    Args:
      params: name -> array.
      version: above the last one.
      interrupt: install it at once, under the open episodes.

    Returns:
      sha256 of the snapshot's bytes, 64 hex digits.
    """
    if self._store is None:
      snapshot = weights.snapshot(params, version)
    else:
      snapshot = self._store.write(params, version)
    with self._lock:
      self._crew.publish(snapshot, interrupt=interrupt)
    return snapshot.checksum

  def close(self) -> None:
    """Closes every connection; what is outstanding is cancelled."""
    self._closed.set()
    if self._thread is not None:
      self._thread.join(2 * _TICK_S)
    with self._lock:
      self._crew.close()

  def report(self) -> str:
    """Says which requests wait, where and since when, and on whom."""
    with self._lock:
      return self._crew.report()

  def handle_event(self, timeout_s: float) -> None:
    """Waits for one event and deals with it; the work of the thread."""
    now = self._clock()
    if now >= self._next_tick_s:
      with self._lock:
        self._crew.tick(now)
        self._crew.place()
      self._next_tick_s = now + _TICK_S
    try:
      event = self._events.get(timeout=min(timeout_s, _TICK_S))
    except queue.Empty:
      return
    with self._lock:
      self._crew.handle(event)
      # One at a time, each would wake the thread that waits for answers.
      with contextlib.suppress(queue.Empty):
        for _ in range(_MOST_AT_ONCE - 1):
          self._crew.handle(self._events.get(block=False))
      self._crew.place()
      self._deliver()

  def _deliver(self) -> None:
    """Hands the new answers over, all at once."""
    if self._fresh:
      self._answers.put(self._fresh)
      self._fresh = []

  def _work(self) -> None:
    while not self._closed.is_set():
      try:
        self.handle_event(_TICK_S)
      except errors.SamplerError as error:
        self._fresh.append(error)
        self._deliver()
