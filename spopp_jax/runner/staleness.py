"""How old the work may be that a step trains on: one policy, one clock.

The clock is the policy version: parameters published after so many updates. A
step that consumes a rollout of version v when the learner stands at update u
has lag u - v, in which all waiting counts. Each policy says what is dispatched
under the present version, which finished groups the next step takes, and what
happens to the rest when a version is published.
"""

import collections
import dataclasses
from typing import Any

import ml_collections
import numpy as np

from spopp_jax import types
from spopp_jax.runner import batcher as batcher_lib
from spopp_jax.runner import dispatch as dispatch_lib
from spopp_jax.runner import staleness_base as base

# The flight is refilled when this part of it has room.
_PARTS = 256
POLICIES = ('drain', 'bounded', 'interruptible', 'scheduled')


class _Stateless:
  """A policy that follows from the clock and the flight alone."""

  def state_dict(self) -> dict[str, Any]:
    return {}

  def load_state_dict(self, state: dict[str, Any]) -> None:
    del state


class Drain(_Stateless):
  """Each version generates for one step; then its flight is drained (SPO++).

  With max_lag 1 a version generates while the learner computes the next one.
  """

  interrupts = refills = False
  drops_rest = True

  def __init__(self, flow: base.Flow, *, max_lag: int):
    self.publishes_first = max_lag > 0
    self._flow = flow

  def tickets(
    self,
    clock: base.Clock,
    dispatcher: dispatch_lib.Dispatcher,
    batcher: batcher_lib.Batcher,
  ) -> list[types.Ticket]:
    """Fills the flight once; later replaces what failed beyond its tries."""
    if batcher.num_in_flight:
      return []
    missing = self._flow.batch - len(batcher.finished)
    wanted = missing * self._flow.group_size
    if not batcher.finished:
      wanted = self._flow.in_flight
    return self._flow.dispatch(wanted, clock, dispatcher, batcher)

  def choose(
    self, clock: base.Clock, batcher: batcher_lib.Batcher
  ) -> list[batcher_lib.Group] | None:
    """Takes the first groups to finish."""
    del clock
    return self._flow.first(batcher)

  def event(self, ticket: types.Ticket, trajectory: types.Trajectory) -> int:
    """Returns the version that generated the trajectory."""
    del ticket
    return trajectory.policy_version


class Bounded(_Stateless):
  """Work crosses publications; no step trains on more than max_lag versions.

  A request dispatched under version v, as the n-th that waits to be consumed
  by step u or later, is consumed at the latest by step u + n // batch. It is
  dispatched if that step is v + max_lag or an earlier one, so the bound holds
  by admission. First finished may leave old work behind; a step therefore
  waits until what it leaves can be taken in time by the steps to come, each a
  batch, or, with `discards`, drops what is overdue when it comes.
  """

  publishes_first = interrupts = drops_rest = False

  def __init__(self, flow: base.Flow, *, max_lag: int, discards: bool):
    self._flow = flow
    self._max_lag = max_lag
    self._discards = discards
    # In order, what is dispatched must not depend on when answers come.
    self.refills = not flow.in_order

  def tickets(
    self,
    clock: base.Clock,
    dispatcher: dispatch_lib.Dispatcher,
    batcher: batcher_lib.Batcher,
  ) -> list[types.Ticket]:
    """Fills the flight as far as the bound admits."""
    size, flying = self._flow.group_size, batcher.num_in_flight
    flight = self._flow.in_flight
    steps = self._max_lag + 1 - (clock.step - clock.version)
    held = (len(batcher.open) + len(batcher.finished)) * size
    room = min(flight - flying, steps * self._flow.batch * size - held)
    # A dispatch costs much the same for one request as for some.
    if self.refills and room < flight // _PARTS and flying > flight // 2:
      return []
    return self._flow.dispatch(room, clock, dispatcher, batcher)

  def choose(
    self, clock: base.Clock, batcher: batcher_lib.Batcher
  ) -> list[batcher_lib.Group] | None:
    """Takes the oldest versions first, among them the first finished."""
    last = clock.step - self._max_lag  # the oldest version allowed
    if self._discards:
      batcher.discard(
        [group for group, version in batcher.finished.items() if version < last]
      )
    elif batcher.oldest_open is not None and batcher.oldest_open <= last:
      return None  # as below, but without a sort at every answer
    if self._flow.in_order:
      return self._flow.first(batcher)
    if len(batcher.finished) < self._flow.batch:
      return None
    by_version = sorted(batcher.finished, key=batcher.finished.__getitem__)
    chosen = by_version[: self._flow.batch]
    if not self._discards and self._strands(chosen, last + 1, batcher):
      return None
    return chosen

  def _strands(
    self,
    chosen: list[batcher_lib.Group],
    last: int,
    batcher: batcher_lib.Batcher,
  ) -> bool:
    """Whether the steps to come could not take all that is left in time.

    Versions up to `last` are due at the next step, each later one a step later.
    """
    newest = batcher.finished[chosen[-1]]
    if batcher.oldest_open is None or batcher.oldest_open >= newest:
      return False  # the oldest come first: what was admitted fits
    left = collections.Counter(batcher.open.values())
    left.update(batcher.finished.values())
    left.subtract(batcher.finished[group] for group in chosen)
    waiting = 0
    for version in sorted(left):
      waiting += left[version]
      if waiting > (version - last + 1) * self._flow.batch:
        return True
    return False

  def event(self, ticket: types.Ticket, trajectory: types.Trajectory) -> int:
    """Returns the version that generated the trajectory."""
    del ticket
    return trajectory.policy_version


class Interruptible(Bounded):
  """As bounded, but open episodes go on under every new version.

  Each token knows its version; age and event are those at dispatch.
  """

  interrupts = True

  def event(self, ticket: types.Ticket, trajectory: types.Trajectory) -> int:
    """Returns the version at dispatch."""
    del trajectory
    return ticket.policy_version


class Scheduled:
  """Every rollout has a lag drawn from 1 to max_lag (TETPO's protocol).

  A step's prompts are drawn max_lag versions ahead. Each of its rollouts is
  dispatched while the snapshot it needs is the present one, so that none is
  kept, and waits. The first steps find no version old enough and take the
  first. What is lost, all its tries used up, is replaced under the present
  version: a member by another of its group, a whole group by another prompt's.
  """

  publishes_first = True
  interrupts = refills = drops_rest = False

  def __init__(self, flow: base.Flow, *, max_lag: int, seed: int):
    self._flow = flow
    self._max_lag = max_lag
    self._seed = seed
    self._planned: list[types.Ticket] = []
    self._next_step = 0

  def tickets(
    self,
    clock: base.Clock,
    dispatcher: dispatch_lib.Dispatcher,
    batcher: batcher_lib.Batcher,
  ) -> list[types.Ticket]:
    """Returns what needs the present version, for all steps to come."""
    while self._next_step <= clock.version + self._max_lag:
      self._plan(self._next_step, clock, dispatcher)
      self._next_step += 1
    self._replace(clock, dispatcher, batcher)
    now = [t for t in self._planned if t.policy_version == clock.version]
    self._planned = [
      t for t in self._planned if t.policy_version != clock.version
    ]
    return dispatcher.freeze(now)

  def _plan(
    self, step: int, clock: base.Clock, dispatcher: dispatch_lib.Dispatcher
  ) -> None:
    tickets = dispatcher.dispatch(
      self._flow.batch * self._flow.group_size,
      policy_version=clock.version,
      step=step,
    )
    rng = np.random.default_rng((self._seed, step))
    lags = rng.integers(1, self._max_lag, len(tickets), endpoint=True)
    self._planned += [
      dataclasses.replace(ticket, policy_version=max(0, step - int(lag)))
      for ticket, lag in zip(tickets, lags, strict=True)
    ]

  def _replace(
    self,
    clock: base.Clock,
    dispatcher: dispatch_lib.Dispatcher,
    batcher: batcher_lib.Batcher,
  ) -> None:
    """Plans substitutes for what the next step has lost."""
    if batcher.num_in_flight:
      return
    members = {
      group: batcher.tickets_of(group)
      for group in self._of_step(clock.step, batcher)
    }
    for ticket in self._planned:
      if ticket.step == clock.step:
        members.setdefault(batcher_lib.group_of(ticket), []).append(ticket)
    for tickets in members.values():
      self._planned += dispatcher.more_of(
        tickets[0],
        self._flow.group_size - len(tickets),
        policy_version=clock.version,
      )
    missing = max(0, self._flow.batch - len(members))
    self._planned += dispatcher.dispatch(
      missing * self._flow.group_size,
      policy_version=clock.version,
      step=clock.step,
    )

  def choose(
    self, clock: base.Clock, batcher: batcher_lib.Batcher
  ) -> list[batcher_lib.Group] | None:
    """Takes the step's own groups, once all are whole."""
    if batcher.num_in_flight:
      return None
    size = self._flow.group_size
    whole = [
      group
      for group in self._of_step(clock.step, batcher)
      if len(batcher.tickets_of(group)) == size
    ]
    return whole if len(whole) == self._flow.batch else None

  def _of_step(
    self, step: int, batcher: batcher_lib.Batcher
  ) -> list[batcher_lib.Group]:
    return [
      group
      for group in batcher.finished
      if batcher.tickets_of(group)[0].step == step
    ]

  def event(self, ticket: types.Ticket, trajectory: types.Trajectory) -> int:
    """Returns the version that generated the trajectory."""
    del ticket
    return trajectory.policy_version

  def state_dict(self) -> dict[str, Any]:
    """Returns the plan."""
    return {
      'planned': [dataclasses.asdict(ticket) for ticket in self._planned],
      'next_step': self._next_step,
    }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Restores the plan."""
    self._planned = [types.Ticket(**ticket) for ticket in state['planned']]
    self._next_step = state['next_step']


def make(config: ml_collections.ConfigDict, group_size: int) -> base.Staleness:
  """Returns the policy that a configuration names.

  Args:
    config: validated; reads seed, environment and the block dispatch.
    group_size: requests a prompt and dispatch.
  """
  settings = config.dispatch
  flow = base.Flow(
    batch=settings.batch_size // group_size,
    in_flight=settings.in_flight,
    group_size=group_size,
    num_tasks=config.environment.num_tasks,
    per_prompt=settings.per_prompt,
    in_order=settings.in_order,
  )
  max_lag, discards = settings.max_lag, settings.discard_overdue
  match settings.staleness:
    case 'drain':
      return Drain(flow, max_lag=max_lag)
    case 'bounded':
      return Bounded(flow, max_lag=max_lag, discards=discards)
    case 'interruptible':
      return Interruptible(flow, max_lag=max_lag, discards=discards)
    case 'scheduled':
      return Scheduled(flow, max_lag=max_lag, seed=config.seed)
  raise ValueError(
    f'dispatch.staleness ({settings.staleness!r}) must be one of {POLICIES}'
  )
