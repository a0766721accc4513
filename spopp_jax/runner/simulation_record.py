"""What a simulated run is told to do, and what is recorded of it."""

import dataclasses
from typing import NamedTuple

import numpy as np

from spopp_jax import types
from spopp_jax.runner import flow, simulated_services
from spopp_jax.sampler import base

# Offline evidence of every prompt: one success and one failure.
OFFLINE = 1.0


@dataclasses.dataclass(frozen=True)
class Setting:
  """What a run does; fields as in configs/common.py unless said otherwise.

  Attributes:
    staleness: the policy.
    max_lag: of the policy.
    batch_size: trajectories a step.
    in_flight: requests at once.
    group_size: requests a prompt and dispatch; 1 keeps prompt evidence.
    num_tasks: prompts.
    per_prompt: groups of a prompt at once.
    in_order: batches do not depend on timing.
    discard_overdue: drops what is too old instead of waiting for it.
    evidence_from: 'received' or 'consumed'.
    attempts: tries of a rollout.
    steps: learner steps.
    update_s: seconds that an update takes.
    seed: of the run.
    site: the services.
  """

  staleness: str = 'drain'
  max_lag: int = 1
  batch_size: int = 16
  in_flight: int = 24
  group_size: int = 1
  num_tasks: int = 64
  per_prompt: int = 1
  in_order: bool = False
  discard_overdue: bool = False
  evidence_from: str = 'received'
  attempts: int = 8
  steps: int = 20
  update_s: float = 1.0
  seed: int = 0
  site: simulated_services.Site = dataclasses.field(
    default_factory=simulated_services.Site
  )

  @property
  def task_ids(self) -> list[str]:
    """The prompts."""
    return [f'task-{i}' for i in range(self.num_tasks)]


class Step(NamedTuple):
  """What was the case when a step had ended.

  Attributes:
    step: its number.
    at_s: the time.
    version: the published version.
    batch: what it trained on.
    in_flight: the tickets in flight.
    groups: groups open or finished, not trained.
    asked: requests in `Record.asked` until then.
    dispatched: requests sent, as the batcher counts.
    statuses: how requests ended, as the batcher counts.
  """

  step: int
  at_s: float
  version: int
  batch: list[flow.Finished]
  in_flight: list[types.Ticket]
  groups: int
  asked: int
  dispatched: int
  statuses: dict[types.Status, int]


@dataclasses.dataclass
class Record:
  """All that happened, but what was lost with a process that was killed.

  Attributes:
    setting: of the run.
    steps: one entry a step.
    asked: every request as it was asked, with the version published then;
      what a resumed run asks again counts again.
    replies: every reply taken by the runner, with the time.
    counts: evidence [P] of success and failure as of the last version.
    resumed_at: the steps at which the run was resumed.
  """

  setting: Setting
  steps: list[Step] = dataclasses.field(default_factory=list)
  asked: list[tuple[int, base.Request]] = dataclasses.field(
    default_factory=list
  )
  replies: list[tuple[float, types.Trajectory]] = dataclasses.field(
    default_factory=list
  )
  counts: tuple[np.ndarray, np.ndarray] = (np.zeros(0), np.zeros(0))
  resumed_at: list[int] = dataclasses.field(default_factory=list)

  @property
  def seconds(self) -> float:
    """The time that the whole run took."""
    return self.steps[-1].at_s

  @property
  def trained(self) -> list[flow.Finished]:
    """Everything that was trained, in order."""
    return [item for step in self.steps for item in step.batch]
