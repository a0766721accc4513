"""Which request goes to which member of a pool."""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence

from spopp_jax.sampler import base, errors, member, retries

_SHOWN = 5


class Placement:
  """Holds every unanswered request: it waits here or a member owes it.

  Attributes:
    redispatched: requests that were taken from a member, so far.
    hopeless: requests that are not held any more and nobody answers: their
      tries are used up, or every member was asked in vain.
  """

  def __init__(
    self, budget: retries.RetryBudget, clock: Callable[[], float]
  ) -> None:
    """Starts empty.

    Args:
      budget: tries a rollout has left; a request taken away spends one.
      clock: seconds, monotonic.
    """
    self._budget = budget
    self._clock = clock
    self._open: dict[str, base.Request] = {}
    self._waiting: collections.deque[base.Request] = collections.deque()
    # Members that were asked in vain, by request id.
    self._asked: dict[str, set[member.Member]] = {}
    # Largest room first; entries that are no longer true are skipped.
    self._by_room: list[tuple[int, int, member.Member]] = []
    self._serial = itertools.count()
    self._version: int | None = None
    self.redispatched = 0
    self.hopeless: list[base.Request] = []

  @property
  def is_empty(self) -> bool:
    """Whether every request has been answered."""
    return not self._open

  def add(self, requests: Iterable[base.Request]) -> None:
    """Queues requests; one that is unanswered is not queued again."""
    for request in requests:
      if request.request_id not in self._open:
        self._open[request.request_id] = request
        self._waiting.append(request)

  def answered(self, one: member.Member, request_id: str) -> None:
    """Forgets a request, whoever answered it."""
    self._drop(request_id)
    if one.owes.pop(request_id, None) is not None:
      self.offer(one)

  def require(self, version: int) -> None:
    """Has all requests that were not sent yet generated with a version."""
    self._version = version

  def offer(self, one: member.Member) -> None:
    """Lets a member be chosen, as often as it has room."""
    if one.room > 0:
      entry = (-one.room, next(self._serial), one)
      heapq.heappush(self._by_room, entry)

  def place(self, members: Iterable[member.Member]) -> list[member.Member]:
    """Sends what waits while there is room.

    Args:
      members: all of them.

    Returns:
      Those that turned out to be lost.
    """
    members = list(members)
    lost = []
    while self._waiting:
      request = self._waiting[0]
      if request.request_id not in self._open:
        self._waiting.popleft()
        continue
      one = self._choose(request)
      if one is None and self._was_asked_of(request, members):
        self._waiting.popleft()
        self._drop(request.request_id)
        self.hopeless.append(request)
        continue
      if one is None:
        break
      self._waiting.popleft()
      if self._version is not None and request.policy_version < self._version:
        request = dataclasses.replace(request, policy_version=self._version)
      if not self._send(one, request):
        lost.append(one)
    # Skipped entries gather below those that are used.
    if len(self._by_room) > 64 + 4 * len(members):
      self._by_room.clear()
      for one in members:
        self.offer(one)
    return lost

  def take_away(
    self, one: member.Member, request_ids: Sequence[str], *, silent: bool
  ) -> None:
    """Has requests that a member owes sent to others, before all that wait.

    Args:
      one: the member.
      request_ids: of what it owes.
      silent: it may still answer, so it is not asked again for these.
    """
    for request_id in reversed(request_ids):
      request, _ = one.owes.pop(request_id)
      if request_id not in self._open:
        continue
      if not self._budget.spend(request_id):
        self._drop(request_id)
        self.hopeless.append(request)
        continue
      if silent:
        self._asked.setdefault(request_id, set()).add(one)
      self._waiting.appendleft(request)
      self.redispatched += 1
    self.offer(one)

  def resend(self, one: member.Member) -> bool:
    """Asks a member again for all it owes; says whether it could be asked."""
    owed = list(one.owes.values())
    one.owes.clear()
    reached = True
    for request, _ in owed:
      reached &= self._send(one, request)
    return reached

  def report(self, members: Iterable[member.Member]) -> str:
    """Says which requests wait, where and since when, oldest first."""
    now = self._clock()
    sent = {
      request_id: f'sent to {one.name} {now - at_s:.0f} s ago'
      for one in members
      for request_id, (_, at_s) in one.owes.items()
    }
    shown = [
      f'{request_id} ({sent.get(request_id, "not sent")})'
      for request_id in itertools.islice(self._open, _SHOWN)
    ]
    if not shown:
      return 'no requests wait'
    return f'{len(self._open)} requests wait: {", ".join(shown)}'

  def _choose(self, request: base.Request) -> member.Member | None:
    """Returns the member with the most room that was not asked in vain."""
    avoided = self._asked.get(request.request_id, ())
    passed: list[tuple[int, int, member.Member]] = []
    chosen = None
    while self._by_room and chosen is None:
      entry = heapq.heappop(self._by_room)
      one = entry[2]
      if entry[0] != -one.room or not self._serves(one):
        continue
      if one in avoided:
        passed.append(entry)
      else:
        chosen = one
    for entry in passed:
      heapq.heappush(self._by_room, entry)
    return chosen

  def _was_asked_of(
    self, request: base.Request, members: Sequence[member.Member]
  ) -> bool:
    """Whether every member that is there was asked in vain."""
    asked = self._asked.get(request.request_id, set())
    there = [one for one in members if one.connected and not one.leaving]
    return bool(there) and asked.issuperset(there)

  def _drop(self, request_id: str) -> None:
    self._open.pop(request_id, None)
    self._asked.pop(request_id, None)

  def _serves(self, one: member.Member) -> bool:
    return self._version is None or one.version == self._version

  def _send(self, one: member.Member, request: base.Request) -> bool:
    """Sends a request; says whether the member could be reached."""
    assert one.source is not None
    one.owes[request.request_id] = (request, self._clock())
    try:
      one.source.submit([request])
    except errors.SamplerLost:
      return False
    self.offer(one)
    return True
