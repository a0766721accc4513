"""What every staleness policy is told, and what is asked of it."""

import dataclasses
from typing import Any, NamedTuple, Protocol

from spopp_jax import types
from spopp_jax.runner import batcher as batcher_lib
from spopp_jax.runner import dispatch as dispatch_lib


class Clock(NamedTuple):
  """Where the learner and the samplers stand.

  Attributes:
    step: updates done when the next batch is consumed.
    version: the published version.
  """

  step: int
  version: int


class Staleness(Protocol):
  """One policy.

  Attributes:
    publishes_first: a version is published before the update of the step, so
      that the samplers generate meanwhile.
    interrupts: open episodes go on under a version published meanwhile.
    refills: requests are dispatched whenever there is room, not once a step.
    drops_rest: once a step has its batch, the rest of the flight is drained
      and trains nothing.
  """

  publishes_first: bool
  interrupts: bool
  refills: bool
  drops_rest: bool

  def tickets(
    self,
    clock: Clock,
    dispatcher: dispatch_lib.Dispatcher,
    batcher: batcher_lib.Batcher,
  ) -> list[types.Ticket]:
    """Returns what is to be dispatched now: admission control."""

  def choose(
    self, clock: Clock, batcher: batcher_lib.Batcher
  ) -> list[batcher_lib.Group] | None:
    """Returns the groups of the step's batch; None while it is not ready."""

  def event(self, ticket: types.Ticket, trajectory: types.Trajectory) -> int:
    """Returns the policy event that an outcome is filed under."""

  def state_dict(self) -> dict[str, Any]:
    """Returns a JSON-able state."""

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Restores what `state_dict` returned."""


@dataclasses.dataclass(frozen=True)
class Flow:
  """Sizes that every policy needs.

  Attributes:
    batch: groups a step.
    in_flight: requests in flight at once.
    group_size: requests a group.
    num_tasks: prompts.
    per_prompt: groups of one prompt in flight at most.
    in_order: batches are the oldest dispatched groups, not the first finished.
  """

  batch: int
  in_flight: int
  group_size: int
  num_tasks: int
  per_prompt: int
  in_order: bool

  def first(
    self, batcher: batcher_lib.Batcher
  ) -> list[batcher_lib.Group] | None:
    """Returns the groups of a batch, or None while they are not there."""
    if not self.in_order:
      ready = list(batcher.finished)[: self.batch]
      return ready if len(ready) == self.batch else None
    oldest = sorted([*batcher.finished, *batcher.open])[: self.batch]
    if len(oldest) < self.batch or not batcher.finished.keys() >= {*oldest}:
      return None
    return oldest

  def dispatch(
    self,
    requests: int,
    clock: Clock,
    dispatcher: dispatch_lib.Dispatcher,
    batcher: batcher_lib.Batcher,
  ) -> list[types.Ticket]:
    """Dispatches so many requests, as far as prompts are free."""
    busy = batcher.busy
    free = self.num_tasks * self.per_prompt - len(batcher.open)
    groups = min(requests // self.group_size, free)
    if groups <= 0:
      return []
    return dispatcher.dispatch(
      groups * self.group_size,
      policy_version=clock.version,
      step=clock.step,
      busy=busy,
    )
