"""Which requests a service owes an answer, and to whom."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable

from spopp_jax import types
from spopp_jax.sampler import base, errors

Deliver = Callable[[types.Trajectory], None]


@dataclasses.dataclass
class _Entry:
  """A request from its first submission until its acknowledgement."""

  request: base.Request
  owner: Deliver | None
  orphaned_at_s: float = 0.0
  result: types.Trajectory | None = None


class Ledger:
  """Accounts for every request that is not acknowledged; thread-safe.

  An owner is the function that delivers to one caller's stream. A request
  without an owner is an orphan: it goes on, and its result is kept, until a
  caller claims it again or `orphan_grace_s` has passed.
  """

  def __init__(
    self,
    *,
    max_pending: int,
    orphan_grace_s: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    self.max_pending = max_pending
    self._orphan_grace_s = orphan_grace_s
    self._clock = clock
    self._entries: dict[str, _Entry] = {}
    self._lock = threading.Lock()

  def blank(self) -> 'Ledger':
    """Returns a ledger with the same limits and no requests."""
    return Ledger(
      max_pending=self.max_pending,
      orphan_grace_s=self._orphan_grace_s,
      clock=self._clock,
    )

  def claim(self, request: base.Request, owner: Deliver) -> bool:
    """Enters a request, or hands a known one to a new owner.

    A known request that has finished is delivered at once.

    Args:
      request: what the caller asks for.
      owner: whom the answer goes to.

    Returns:
      True when the request is new and must be run.

    Raises:
      QueueFull: `max_pending` requests are unacknowledged.
      InvalidMessage: the id belongs to a request with other content.
    """
    with self._lock:
      entry = self._entries.get(request.request_id)
      if entry is None:
        if len(self._entries) >= self.max_pending:
          raise errors.QueueFull(
            f'{len(self._entries)} requests are unacknowledged and '
            f'max_pending is {self.max_pending}; submit fewer at a time or '
            'raise max_pending of the service'
          )
        self._entries[request.request_id] = _Entry(request, owner)
        return True
      if entry.request != request:
        raise errors.InvalidMessage(
          'request_id',
          f'in use for {entry.request}',
          'an id of its own for every request',
          request_id=request.request_id,
        )
      entry.owner = owner
      if entry.result is not None:
        owner(entry.result)
      return False

  def owes(self, request: base.Request) -> bool:
    """Says whether this very submission, not another of its id, stands."""
    with self._lock:
      entry = self._entries.get(request.request_id)
      return entry is not None and entry.request is request

  def finish(self, result: types.Trajectory) -> None:
    """Keeps a result and delivers it to the owner, if there is one."""
    with self._lock:
      entry = self._entries.get(result.request_id)
      if entry is None:
        return
      entry.result = result
      if entry.owner is not None:
        entry.owner(result)

  def acknowledge(self, request_ids: Iterable[str], owner: Deliver) -> None:
    """Forgets finished requests that are the owner's, or nobody's."""
    with self._lock:
      for request_id in request_ids:
        entry = self._entries.get(request_id)
        if (
          entry is not None
          and entry.result is not None
          and entry.owner in (owner, None)
        ):
          del self._entries[request_id]

  def abandon(self, owner: Deliver) -> None:
    """Makes orphans of everything an owner has left."""
    with self._lock:
      for entry in self._entries.values():
        if entry.owner == owner:
          entry.owner = None
          entry.orphaned_at_s = self._clock()

  def expire(self) -> list[str]:
    """Forgets orphans past their grace; returns those still to cancel."""
    with self._lock:
      now = self._clock()
      expired = [
        (request_id, entry)
        for request_id, entry in self._entries.items()
        if entry.owner is None
        and now - entry.orphaned_at_s > self._orphan_grace_s
      ]
      for request_id, _ in expired:
        del self._entries[request_id]
    return [request_id for request_id, entry in expired if entry.result is None]
