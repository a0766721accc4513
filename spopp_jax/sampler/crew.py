"""The services of a pool: who is there, who is lost, who has which snapshot.

What takes long, connecting and installing, runs beside and tells of its end by
an event, as replies and losses do. Events are handled one at a time.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from spopp_jax import types
from spopp_jax.sampler import (
  base,
  errors,
  member,
  placement,
  publication,
  weights,
)

_LOG = logging.getLogger(__name__)
# A sampler that dies of what it is asked would be restored for ever.
_MAX_LOSSES_IN_A_ROW = 3
# Before what failed is tried again.
_PAUSE_S = 2.0
_SHOWN = 5


class Crew:
  """Keeps the members of a pool at work; for one thread at a time.

  Attributes:
    members: by address.
    last_problem: what went wrong last.
    submitted: lists of requests taken in.
  """

  def __init__(
    self,
    names: Callable[[], Iterable[str]],
    make_connect: Callable[[str], member.Connect],
    requests: placement.Placement,
    deliver: Callable[[types.Trajectory], None],
    *,
    request_timeout_s: float,
    recovery_timeout_s: float,
    clock: Callable[[], float],
    run_beside: Callable[[Callable[[], None]], None],
    events: member.Events,
    store: publication.Store | None,
  ):
    """Begins to connect to every service; arguments as of `pool.Pool`.

    Args:
      names: returns the addresses that belong to the pool.
      make_connect: returns what connects to an address.
      requests: what is asked of the members.
      deliver: takes every answer.
      request_timeout_s: longest wait for an answer from one member.
      recovery_timeout_s: longest time without any connected member.
      clock: seconds, monotonic.
      run_beside: runs what takes long.
      events: where the ends of that, and arrivals, are put.
      store: where snapshots are written, if they are.
    """
    self._names = names
    self._make_connect = make_connect
    self._placement = requests
    self._deliver = deliver
    self._request_timeout_s = request_timeout_s
    self._recovery_timeout_s = recovery_timeout_s
    self._clock = clock
    self._run_beside = run_beside
    self._events = events
    self._store = store
    self._snapshot: weights.Snapshot | None = None
    self._interrupt = False
    self._alone_since_s = clock()
    self._later: list[tuple[float, Callable[[], None]]] = []
    # Members that were taken out and stay so, however often they are named.
    self._refused: set[str] = set()
    self.members: dict[str, member.Member] = {}
    self.submitted = 0
    self.last_problem: errors.SamplerError | None = None
    self._follow_names()

  def was_connected(self) -> None:
    """Begins to count anew how long no member is connected."""
    self._alone_since_s = self._clock()

  def publish(self, snapshot: weights.Snapshot, *, interrupt: bool) -> None:
    """Has every member install a snapshot once it may; see `pool.Pool`."""
    self._snapshot, self._interrupt = snapshot, interrupt
    self._placement.require(snapshot.version)
    for one in list(self.members.values()):
      self._doubt(one)
      self._advance(one)

  def handle(self, event: member.Event) -> None:
    """Deals with what happened to a member; `place` comes next."""
    getattr(self, f'_on_{event.kind}')(event.member, event.content)

  def place(self) -> None:
    """Sends what waits to whoever has room."""
    for one in self._placement.place(self.members.values()):
      self._lose(one)
    while self._placement.hopeless:
      request = self._placement.hopeless.pop()
      detail = 'samplers were lost or silent, and no other can be asked'
      status = types.Status.SAMPLER_ERROR
      self._deliver(base.unanswered(request, status, detail))

  def close(self) -> None:
    """Closes every connection."""
    for one in self.members.values():
      if one.source is not None:
        one.source.close()
    self.members.clear()

  def report(self) -> str:
    """Says which requests wait, where and since when, and on whom."""
    members = list(self.members.values())
    states = [
      f'{one.name} '
      + (f'version {one.version}' if one.connected else 'not connected')
      for one in members[:_SHOWN]
    ]
    return (
      f'{self._placement.report(members)}; {len(members)} samplers: '
      f'{", ".join(states) or "none"}'
    )

  def _add(self, name: str, connect: member.Connect) -> None:
    one = self.members[name] = member.Member(name, connect)
    one.missing_since_s = self._clock()
    self._run_beside(lambda: self._connect(one))

  def _connect(self, one: member.Member) -> None:
    deliver = lambda arrival: self._events.put(
      member.Event(one, 'arrival', arrival)
    )
    try:
      source = one.connect(deliver)
    except errors.SamplerError as error:
      self._events.put(member.Event(one, 'failed', error))
    else:
      self._events.put(member.Event(one, 'joined', source))

  def _reconnect(self, one: member.Member, *, new_session: bool) -> None:
    assert one.source is not None
    try:
      one.source.reconnect(self._recovery_timeout_s, new_session=new_session)
    except errors.SamplerError as error:
      self._events.put(member.Event(one, 'failed', error))
    else:
      self._events.put(member.Event(one, 'joined', one.source))

  def _install(
    self, one: member.Member, snapshot: weights.Snapshot, connection: int
  ) -> None:
    assert one.source is not None
    result: int | errors.SamplerError = snapshot.version
    try:
      one.source.install(snapshot, interrupt=self._interrupt)
    except errors.SamplerError as error:
      result = error
    self._events.put(member.Event(one, 'installed', (connection, result)))

  def _on_submitted(self, one: None, requests: list[base.Request]) -> None:
    del one
    self.submitted += 1
    self._placement.add(requests)

  def _on_joined(self, one: member.Member, source: member.Source) -> None:
    if self.members.get(one.name) is not one:  # taken out meanwhile
      self._run_beside(source.close)
      return
    if one.source is None:
      one.losses_in_a_row = 0
    before, one.source = one.version, source
    one.connections += 1
    one.installing = False
    one.connected, one.version = True, source.service.active_policy_version
    self._doubt(one)
    level = logging.WARNING if one.was_noticed else logging.INFO
    _LOG.log(level, '%s has joined with version %d', one.name, one.version)
    if one.owes and one.version == before:
      if not self._placement.resend(one):
        self._lose(one)
        return
    else:
      # A service that was restarted knows of nothing.
      self._placement.take_away(one, list(one.owes), silent=False)
    self._placement.offer(one)
    self._advance(one)
    # Those that were lost with nobody there to take what they owe.
    for other in self.members.values():
      if not other.connected and other.owes:
        self._placement.take_away(other, list(other.owes), silent=False)

  def _on_installed(
    self,
    one: member.Member,
    outcome: tuple[int, int | errors.SamplerError],
  ) -> None:
    connection, result = outcome
    if connection != one.connections or not one.connected:
      return  # of a connection that was lost: its successor installs anew
    one.installing = False
    if isinstance(result, errors.SamplerError):
      self.last_problem = result
      self._lose(one)
      return
    one.version = result
    self._placement.offer(one)
    self._advance(one)

  def _on_arrival(self, one: member.Member, arrival: Any) -> None:
    if one.source is None:  # it arrived before the news of the connection
      if self.members.get(one.name) is one:
        self._events.put(member.Event(one, 'arrival', arrival))
      return
    try:
      trajectory = one.source.receive(arrival)
    except errors.InvalidMessage as error:
      # Whose answer it was shows when that does not come.
      _LOG.warning('%s sent what is no answer: %s', one.name, error)
      return
    if trajectory is not None:
      one.losses_in_a_row = 0
      self._placement.answered(one, trajectory.request_id)
      self._deliver(trajectory)
      self._advance(one)
      if one.leaving and not one.owes:
        self._drop(one, 'it owes nothing any more')
    elif one.source.lost is not None and one.connected:
      self._lose(one)

  def _on_failed(self, one: member.Member, error: errors.SamplerError) -> None:
    self.last_problem = error
    if self.members.get(one.name) is not one:
      return
    fits = not isinstance(error, errors.HandshakeRefused)
    if one.source is None and not fits:
      self._drop(one, str(error))
    elif one.source is None:
      one.losses_in_a_row += 1
      self._try_later(one, lambda: self._connect(one))
    else:
      new_session = any(m.connected for m in self.members.values())
      self._try_later(
        one, lambda: self._reconnect(one, new_session=new_session)
      )

  def _try_later(self, one: member.Member, work: Callable[[], None]) -> None:
    """Tries again what failed at once, after a pause."""
    _LOG.warning(
      '%s: %s; tried again in %g s', one.name, self.last_problem, _PAUSE_S
    )
    self._later.append((self._clock() + _PAUSE_S, work))

  def _lose(self, one: member.Member) -> None:
    """Restores a connection beside, while others do its work."""
    assert one.source is not None
    reason = one.source.lost or self.last_problem
    one.losses_in_a_row += one.connected
    if one.connected:
      one.missing_since_s = self._clock()
    one.connected = False
    if one.losses_in_a_row > _MAX_LOSSES_IN_A_ROW:
      self._drop(
        one,
        f'it was lost {one.losses_in_a_row} times without an answer in '
        f'between, the last time so: {reason}',
      )
      return
    others = any(m.connected for m in self.members.values())
    _LOG.warning(
      'lost %s with %d requests, %s: %s',
      one.name,
      len(one.owes),
      'others take them' if others else 'they wait for its return',
      reason,
    )
    if others:
      self._placement.take_away(one, list(one.owes), silent=False)
    self._run_beside(lambda: self._reconnect(one, new_session=others))

  def _drop(self, one: member.Member, reason: str) -> None:
    """Takes a member out for good."""
    if self.members.get(one.name) is not one:  # a late answer of one dropped
      return
    _LOG.warning('%s leaves the pool: %s', one.name, reason)
    del self.members[one.name]
    if not one.leaving:
      self._refused.add(one.name)
    one.connected = False
    if self._store is not None:
      self._store.hold_only(one.name)
    self._placement.take_away(one, list(one.owes), silent=False)
    if one.source is not None:
      self._run_beside(one.source.close)
    if not self.members and not one.leaving:
      raise self.last_problem or errors.SamplerLost(
        f'no sampler is left; the last, {one.name}: {reason}'
      )

  def _doubt(self, one: member.Member) -> None:
    """Forgets a version that is our newest by its number alone."""
    ours, source = self._snapshot, one.source
    if (
      ours is not None
      and source is not None
      and one.version == ours.version == source.service.active_policy_version
      and source.service.active_weights_checksum != ours.checksum
    ):
      one.version = -1

  def _advance(self, one: member.Member) -> None:
    """Installs the newest snapshot in a member that may change to it."""
    snapshot = self._snapshot
    if (
      snapshot is None
      or not one.connected
      or one.installing
      or one.version == snapshot.version
      or (one.owes and not self._interrupt)
    ):
      return
    one.installing = True
    if self._store is not None:
      self._store.hold_only(one.name, snapshot.version)
    connection = one.connections
    self._run_beside(lambda: self._install(one, snapshot, connection))

  def tick(self, now: float) -> None:
    """Looks at what no event tells of: silence, names, loneliness.

    Raises:
      SamplerLost: no member could be restored in time.
      SamplerSilent: the only member leaves requests unanswered.
    """
    self._follow_names()
    due = [work for at_s, work in self._later if at_s <= now]
    self._later = [entry for entry in self._later if entry[0] > now]
    for work in due:
      self._run_beside(work)
    for one in self.members.values():
      one.notice_absence(now)
    if any(one.connected for one in self.members.values()):
      self.was_connected()
    elif now - self._alone_since_s > self._recovery_timeout_s:
      raise errors.SamplerLost(
        f'no sampler was connected for {self._recovery_timeout_s} s; '
        + (f'the last problem: {self.last_problem}; ' * bool(self.last_problem))
        + self.report()
      )
    for one in list(self.members.values()):
      self._take_overdue(one, now)

  def _take_overdue(self, one: member.Member, now: float) -> None:
    overdue = []
    for request_id, (_, sent_at_s) in one.owes.items():
      if now - sent_at_s <= self._request_timeout_s:
        break  # the oldest come first
      overdue.append(request_id)
    if not overdue or not one.connected:
      return
    if not any(
      other.connected and other is not one for other in self.members.values()
    ):
      raise errors.SamplerSilent(
        f'{one.name} has not answered {", ".join(overdue[:_SHOWN])} within '
        f'{self._request_timeout_s} s and there is no other sampler to ask; '
        f'{self.report()}'
      )
    _LOG.warning(
      '%s has not answered %s within %g s; others are asked',
      one.name,
      ', '.join(overdue[:_SHOWN]),
      self._request_timeout_s,
    )
    self._placement.take_away(one, overdue, silent=True)

  def _follow_names(self) -> None:
    names = list(self._names())
    for name in names:
      if name not in self.members and name not in self._refused:
        self._add(name, self._make_connect(name))
    for name in sorted(self.members.keys() - names):
      one = self.members[name]
      one.leaving = True
      if not one.owes or not one.connected:
        self._drop(one, 'its address was taken out')
