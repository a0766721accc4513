"""Between the loop and a sampler: submit, collect first finished, drain.

What is collected are whole groups: one rollout, or the rollouts that a group
method compares, once the last of them has ended.

It holds the requests in flight, so it alone decides what counts: a reply is
taken once, by request id; a failed attempt is retried within one budget; a
lost sampler is restored and asked again for what it still owes.
"""

import collections
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spopp_jax import types
from spopp_jax.sampler import base, errors

_LOG = logging.getLogger(__name__)
_TRUNCATED = (types.Status.CONTEXT_LIMIT, types.Status.LENGTH)
# A sampler that dies of what it is asked would be restored for ever.
_MAX_LOSSES_IN_A_ROW = 3


class Finished(NamedTuple):
  """A usable trajectory beside the ticket it answers."""

  ticket: types.Ticket
  trajectory: types.Trajectory


class RolloutsFailed(RuntimeError):
  """The sampler does not deliver; the text names what is waited for."""


class Batcher:
  """Collects trajectories of the requests in flight, in completion order."""

  def __init__(
    self,
    sampler: base.Sampler,
    sampling: types.SamplingParams,
    *,
    attempts: int,
    keep_truncated: bool,
    rollout_timeout_s: float,
    recovery_timeout_s: float,
    window: int = 1024,
  ):
    """Prepares collecting.

    Args:
      sampler: serves the requests.
      sampling: decoding parameters of every request.
      attempts: tries a request before it is given up.
      keep_truncated: trajectories cut by a token limit count, as failures.
      rollout_timeout_s: longest wait without a single reply.
      recovery_timeout_s: deadline for bringing back a lost sampler.
      window: requests that the sampler holds at a time; the others wait here.
    """
    self._sampler = sampler
    self._sampling = sampling
    self._attempts = attempts
    self._keep = {types.Status.OK, *(_TRUNCATED if keep_truncated else ())}
    self._rollout_timeout_s = rollout_timeout_s
    self._recovery_timeout_s = recovery_timeout_s
    self._window = window
    self.on_finished: Callable[[], object] = lambda: None
    self._waiting: dict[str, types.Ticket] = {}
    self._unsent: collections.deque[types.Ticket] = collections.deque()
    self._published: tuple[Mapping[str, np.ndarray], int] | None = None
    self._losses_in_a_row = 0
    self.statuses: collections.Counter[types.Status] = collections.Counter()
    self._partial: dict[int | str, list[Finished]] = {}
    self._owed: collections.Counter[int | str] = collections.Counter()

  @property
  def in_flight(self) -> list[types.Ticket]:
    """Tickets that have not been answered, oldest first."""
    return list(self._waiting.values())

  def publish(self, params: Mapping[str, np.ndarray], version: int) -> None:
    """Makes a snapshot the one that generates; nothing may be in flight."""
    if self._waiting:
      raise ValueError(
        f'version {version} cannot be published while {len(self._waiting)} '
        'requests of the old one are in flight: drain first'
      )
    self._published = (params, version)
    try:
      self._sampler.publish(params, version)
    except errors.SamplerLost as error:
      self._recover(error)

  def submit(self, tickets: Sequence[types.Ticket]) -> None:
    """Sends requests off."""
    self._waiting |= {ticket.request_id: ticket for ticket in tickets}
    self._owed.update(map(_group, tickets))
    self._unsent.extend(tickets)
    try:
      self._send()
    except errors.SamplerLost as error:
      self._recover(error)

  def collect(self, groups: int) -> list[Finished]:
    """Returns the members of the first `groups` groups to finish.

    A group has finished when none of its requests is in flight. It lacks the
    members whose requests used up their attempts; one without any member does
    not count. Fewer groups are returned when no more are in flight.

    Raises:
      RolloutsFailed: no reply within the timeout, or the sampler is lost and
        could not be restored; names the waiting request ids.
    """
    finished: list[Finished] = []
    while self._waiting and groups > 0:
      try:
        trajectory = self._sampler.next(self._rollout_timeout_s)
      except errors.SamplerLost as error:
        self._recover(error)
        continue
      except errors.SamplerTimeout as error:
        raise RolloutsFailed(self._overdue(str(error))) from error
      members = self._accept(trajectory)
      groups -= bool(members)
      finished += members
    return finished

  def drain(self) -> list[Finished]:
    """Returns everything still in flight, once it has finished."""
    return self.collect(len(self._waiting))

  def _accept(self, trajectory: types.Trajectory) -> list[Finished]:
    """Takes one reply; returns its group if that was the last of it."""
    self._losses_in_a_row = 0
    ticket = self._waiting.pop(trajectory.request_id, None)
    if ticket is None:
      self.statuses[types.Status.DUPLICATE] += 1
      return []
    self.submit([])  # the sampler has room for one more
    status = trajectory.status
    if (
      status in self._keep
      and trajectory.policy_version != ticket.policy_version
    ):
      status = types.Status.STALE
    self.statuses[status] += 1
    if status in self._keep:
      if status is not types.Status.OK:
        trajectory = dataclasses.replace(trajectory, reward=0.0)
      members = self._partial.setdefault(_group(ticket), [])
      members.append(Finished(ticket, trajectory))
      self.on_finished()
    else:
      _LOG.warning(
        'request %s (%s) ended as %s: %s',
        ticket.request_id,
        ticket.task_id,
        status.name.lower(),
        trajectory.detail,
      )
      self._retry(ticket)
    return self._settle(_group(ticket))

  def _settle(self, group: int | str) -> list[Finished]:
    """Counts one answer; returns the group's members if it was the last."""
    self._owed[group] -= 1
    if self._owed[group]:
      return []
    del self._owed[group]
    return self._partial.pop(group, [])

  def _retry(self, ticket: types.Ticket) -> None:
    stem, attempt = _stem_and_attempt(ticket)
    tried = int(attempt or 1)
    if tried < self._attempts:
      # A finished request id is never run again, so a retry needs its own;
      # the frozen baseline stays.
      self.submit(
        [dataclasses.replace(ticket, request_id=f'{stem}/{tried + 1}')]
      )

  def _recover(self, loss: errors.SamplerLost) -> None:
    """Restores the sampler and asks again for what it owes."""
    while True:
      self._losses_in_a_row += 1
      if self._losses_in_a_row > _MAX_LOSSES_IN_A_ROW:
        raise RolloutsFailed(
          self._overdue(
            f'the sampler was lost {self._losses_in_a_row} times without a '
            f'reply in between, the last time so: {loss}'
          )
        ) from loss
      _LOG.warning(
        'sampler lost (%s); restoring it, %d requests wait, deadline %.0f s',
        loss,
        len(self._waiting),
        self._recovery_timeout_s,
      )
      try:
        self._restore()
      except errors.SamplerLost as again:
        loss = again
      else:
        _LOG.warning('sampler restored')
        return

  def _restore(self) -> None:
    """Connects, publishes and submits again, or raises SamplerLost."""
    try:
      self._sampler.reconnect(self._recovery_timeout_s)
    except errors.SamplerError as error:
      raise self._not_restored(error) from error
    try:
      if self._published is not None:
        self._sampler.publish(*self._published)
      self._unsent = collections.deque(self._waiting.values())
      self._send()
    except errors.SamplerLost:
      raise
    except errors.SamplerError as error:
      raise self._not_restored(error) from error

  def _not_restored(self, error: errors.SamplerError) -> RolloutsFailed:
    return RolloutsFailed(
      self._overdue(f'the sampler could not be restored: {error}')
    )

  def _send(self) -> None:
    """Sends unsent requests as far as the window allows."""
    held = len(self._waiting) - len(self._unsent)
    room = min(self._window - held, len(self._unsent))
    tickets = [self._unsent.popleft() for _ in range(room)]
    if tickets:
      self._sampler.submit([self._request(ticket) for ticket in tickets])

  def _request(self, ticket: types.Ticket) -> base.Request:
    return base.Request(
      request_id=ticket.request_id,
      task_id=ticket.task_id,
      policy_version=ticket.policy_version,
      seed=ticket.seed,
      sampling=self._sampling,
    )

  def _overdue(self, reason: str) -> str:
    ids = ', '.join(list(self._waiting)[:5])
    more = len(self._waiting) - 5
    waiting = f'{ids} and {more} more' if more > 0 else ids
    return (
      f'{reason}; waiting for {len(self._waiting)} requests ({waiting}). '
      'Continue from the last checkpoint with --config.run.resume=True'
    )


def _stem_and_attempt(ticket: types.Ticket) -> tuple[str, str]:
  stem, _, attempt = ticket.request_id.partition('/')
  return stem, attempt


def _group(ticket: types.Ticket) -> int | str:
  """Returns the key of the ticket's group; retries stay in it."""
  if ticket.group_id < 0:
    return _stem_and_attempt(ticket)[0]
  return ticket.group_id
