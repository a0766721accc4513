"""Between the loop and a sampler: what is in flight, what has finished.

What finishes are whole groups: one rollout, or the rollouts that a group
method compares, once the last of them has ended.

It holds the requests in flight, so it alone decides what counts: a reply is
taken once, by request id, and a failed attempt is tried again within one
budget. Where the sampler runs and whether it was lost in between is the
sampler's own affair.
"""

import collections
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spopp_jax import types
from spopp_jax.runner import pauses as pauses_lib
from spopp_jax.sampler import base, errors, retries

_LOG = logging.getLogger(__name__)
# How often a wait looks up.
_SLICE_S = 1.0
_TRUNCATED = (types.Status.CONTEXT_LIMIT, types.Status.LENGTH)

# A prompt group's number, or the id of a rollout that is a group of its own.
Group = int | str


class Finished(NamedTuple):
  """A usable trajectory beside the ticket it answers."""

  ticket: types.Ticket
  trajectory: types.Trajectory


class RolloutsFailed(RuntimeError):
  """The sampler does not deliver; the text names what is waited for."""


class Batcher:
  """Accounts for every request from its dispatch to its batch.

  Attributes:
    statuses: how requests ended; DUPLICATE counts surplus replies, all others
      together are the requests that `dispatched` counts less those in flight.
    dispatched: requests sent, retries included.
    open: groups with requests in flight, and the oldest version asked of them.
    busy: groups in flight by task id.
    finished: groups that have finished and were not taken, first finished
      first, with that version.
    on_finished: called at every usable reply.
  """

  def __init__(
    self,
    sampler: base.Sampler,
    sampling: types.SamplingParams,
    *,
    budget: retries.RetryBudget,
    keep_truncated: bool,
    rollout_timeout_s: float,
    max_given_up: int = 256,
    pauses: pauses_lib.Pauses | None = None,
    check_stop: Callable[[], None] = lambda: None,
  ):
    """Prepares collecting.

    Args:
      sampler: serves the requests.
      sampling: decoding parameters of every request.
      budget: tries of a rollout; the sampler may spend of it too.
      keep_truncated: trajectories cut by a token limit count, as failures.
      rollout_timeout_s: longest wait without a single reply.
      max_given_up: rollouts in a row that may use up all their tries.
      pauses: is told of long waits.
      check_stop: called about once a second of waiting; may raise.
    """
    self._sampler = sampler
    self._sampling = sampling
    self._budget = budget
    self._keep = {types.Status.OK, *(_TRUNCATED if keep_truncated else ())}
    self._rollout_timeout_s = rollout_timeout_s
    self._max_given_up = max_given_up
    self._pauses = pauses or pauses_lib.Pauses()
    self._check_stop = check_stop
    self.on_finished: Callable[[], object] = lambda: None
    self._waiting: dict[str, types.Ticket] = {}
    self._members: dict[Group, list[Finished]] = {}
    self._tasks: dict[Group, str] = {}
    self._owed: collections.Counter[Group] = collections.Counter()
    self._received: list[Finished] = []
    self._given_up_in_a_row = 0
    self.statuses: collections.Counter[types.Status] = collections.Counter()
    self.dispatched = 0
    self.open: dict[Group, int] = {}
    self.finished: dict[Group, int] = {}
    self.busy: collections.Counter[str] = collections.Counter()

  @property
  def in_flight(self) -> list[types.Ticket]:
    """Tickets that have not been answered, oldest first."""
    return list(self._waiting.values())

  @property
  def held(self) -> list[Finished]:
    """What has finished and was not taken, also of unfinished groups."""
    return [item for members in self._members.values() for item in members]

  def publish(
    self,
    params: Mapping[str, np.ndarray],
    version: int,
    *,
    interrupt: bool = False,
  ) -> None:
    """Has what is sent from now on generated with a snapshot."""
    self._sampler.publish(params, version, interrupt=interrupt)

  def submit(self, tickets: Sequence[types.Ticket]) -> None:
    """Sends requests off."""
    for ticket in tickets:
      self._waiting[ticket.request_id] = ticket
      group = group_of(ticket)
      self._owed[group] += 1
      if group not in self.open:
        self._tasks[group] = ticket.task_id
        self.busy[ticket.task_id] += 1
      # A group may have finished but for members that come only now.
      version = self.finished.pop(group, ticket.policy_version)
      self.open[group] = min(
        version, ticket.policy_version, self.open.get(group, version)
      )
    self.dispatched += len(tickets)
    self._sampler.submit([self._request(ticket) for ticket in tickets])

  def wait(self, reason: Callable[[], str] = lambda: 'a rollout') -> None:
    """Takes in the next reply.

    Args:
      reason: what the caller waits for, in words.

    Raises:
      RolloutsFailed: no reply within the timeout, no sampler, or one rollout
        after another uses up its tries; names the waiting request ids.
    """
    left_s = self._rollout_timeout_s
    while True:
      self._check_stop()
      slice_s = min(_SLICE_S, left_s)
      try:
        trajectory = self._sampler.next(slice_s)
        break
      except errors.SamplerError as error:
        left_s -= slice_s
        why = str(error)
        if left_s <= 0:
          why = f'no rollout ended within {self._rollout_timeout_s:g} s ({why})'
        if left_s <= 0 or type(error) is not errors.SamplerTimeout:
          raise RolloutsFailed(self._overdue(why)) from error
        self._pauses.waiting(
          lambda: f'{reason()}; {self._waiting_for()}', 'an answer of a sampler'
        )
    self._pauses.over()
    self._accept(trajectory)

  def drain(self) -> list[Finished]:
    """Waits until nothing is in flight; returns all that was not taken."""
    while self._waiting:
      self.wait()
    return self.take(list(self.finished))

  def take(self, groups: Iterable[Group]) -> list[Finished]:
    """Returns the members of finished groups, which are then forgotten."""
    taken = []
    for group in groups:
      del self.finished[group]
      taken += self._members.pop(group)
    return taken

  def discard(self, groups: Iterable[Group]) -> None:
    """Forgets finished groups as too old."""
    for item in self.take(groups):
      self.statuses[item.trajectory.status] -= 1
      self.statuses[types.Status.STALE] += 1

  def received(self) -> list[Finished]:
    """Returns every usable reply since the last call, in order of receipt."""
    received, self._received = self._received, []
    return received

  def restore(
    self, held: Iterable[Finished], tickets: Sequence[types.Ticket]
  ) -> None:
    """Goes on where another batcher was: with what it held, and in flight."""
    for item in held:
      group = group_of(item.ticket)
      self._members.setdefault(group, []).append(item)
      version = item.ticket.policy_version
      self.finished[group] = min(version, self.finished.get(group, version))
    self.submit(tickets)
    self.dispatched -= len(tickets)

  def step_of(self, group: Group) -> int:
    """Returns the step that a finished group was dispatched for."""
    return self._members[group][0].ticket.step

  def _accept(self, trajectory: types.Trajectory) -> None:
    """Takes one reply, once."""
    ticket = self._waiting.pop(trajectory.request_id, None)
    if ticket is None:
      self.statuses[types.Status.DUPLICATE] += 1
      return
    status = trajectory.status
    if (
      status in self._keep and trajectory.policy_version < ticket.policy_version
    ):
      status = types.Status.STALE
    self.statuses[status] += 1
    if status in self._keep:
      if status is not types.Status.OK:
        trajectory = dataclasses.replace(trajectory, reward=0.0)
      item = Finished(ticket, trajectory)
      self._members.setdefault(group_of(ticket), []).append(item)
      self._received.append(item)
      self._given_up_in_a_row = 0
      self._budget.forget(ticket.request_id)
      self.on_finished()
    else:
      _LOG.warning(
        'request %s (%s) ended as %s: %s',
        ticket.request_id,
        ticket.task_id,
        status.name.lower(),
        trajectory.detail,
      )
      self._retry(ticket, f'{status.name.lower()}, {trajectory.detail}')
    self._settle(group_of(ticket))

  def _settle(self, group: Group) -> None:
    """Counts one answer; the group has finished if it was the last."""
    self._owed[group] -= 1
    if self._owed[group]:
      return
    del self._owed[group]
    task_id = self._tasks.pop(group)
    self.busy[task_id] -= 1
    if not self.busy[task_id]:
      del self.busy[task_id]
    version = self.open.pop(group)
    if group in self._members:
      self.finished[group] = version

  def _retry(self, ticket: types.Ticket, why: str) -> None:
    """Asks once more with the same frozen baseline, or gives up."""
    if self._budget.spend(ticket.request_id):
      again = retries.next_try(ticket.request_id)
      self.submit([dataclasses.replace(ticket, request_id=again)])
      return
    self._budget.forget(ticket.request_id)
    self._given_up_in_a_row += 1
    if self._given_up_in_a_row > self._max_given_up:
      raise RolloutsFailed(
        self._overdue(
          f'{self._given_up_in_a_row} rollouts in a row failed in each of '
          f'their {self._budget.attempts} tries, the last one as {why}'
        )
      )

  def _request(self, ticket: types.Ticket) -> base.Request:
    return base.Request(
      request_id=ticket.request_id,
      task_id=ticket.task_id,
      policy_version=ticket.policy_version,
      seed=ticket.seed,
      sampling=self._sampling,
    )

  def _overdue(self, reason: str) -> str:
    return (
      f'{reason}; {self._waiting_for()}. Continue from the last checkpoint '
      'with --config.run.resume=True'
    )

  def _waiting_for(self) -> str:
    ids = ', '.join(list(self._waiting)[:5])
    more = len(self._waiting) - 5
    waiting = f'{ids} and {more} more' if more > 0 else ids
    return f'waiting for {len(self._waiting)} requests ({waiting})'


def group_of(ticket: types.Ticket) -> Group:
  """Returns the key of the ticket's group; retries stay in it."""
  if ticket.group_id < 0:
    return retries.stem(ticket.request_id)
  return ticket.group_id
