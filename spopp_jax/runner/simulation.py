"""Runs of the real loop over simulated services, with a learner that is none.

Dispatcher, batcher, staleness policy, evidence, pool and loop are those of a
training run; services and clock are simulated, and an update takes time but
changes no parameter. A record holds what happened, for checks and figures.
"""

import copy
import json
import pathlib
import types as python_types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import ml_collections
import numpy as np

from spopp_jax import types
from spopp_jax.learner import checkpoint, update
from spopp_jax.learner import state as learner_state
from spopp_jax.runner import (
  batcher,
  dispatch,
  flow,
  loop,
  metrics,
  preemption,
  simulated_services,
  staleness,
  training,
)
from spopp_jax.runner.simulation_record import OFFLINE, Record, Setting, Step
from spopp_jax.sampler import base, retries
from spopp_jax.tracker import base as tracker
from spopp_jax.tracker import event_time, no_evidence


class Stop(NamedTuple):
  """An end of the process, after which the run is resumed.

  Attributes:
    after_s: when, counted from its beginning.
    saves: it is asked to stop and saves itself; else it is killed and goes on
      from the checkpoint of the last step.
  """

  after_s: float
  saves: bool


class _Ear:
  """Implements `sampler.base.Sampler`: a pool, and notes what passes."""

  def __init__(self, world: simulated_services.World, record: Record):
    self._world = world
    self._record = record
    self._version = -1

  @property
  def num_arrived(self) -> int:
    return self._world.pool.num_arrived

  def submit(self, requests: Sequence[base.Request]) -> None:
    self._record.asked += [(self._version, one) for one in requests]
    self._world.pool.submit(requests)

  def publish(
    self,
    params: Mapping[str, np.ndarray],
    version: int,
    *,
    interrupt: bool = False,
  ) -> str:
    self._version = version
    return self._world.pool.publish(params, version, interrupt=interrupt)

  def close(self) -> None:
    self._world.pool.close()

  def next(self, timeout_s: float) -> types.Trajectory:
    reply = self._world.pool.next(timeout_s)
    self._record.replies.append((self._world.now_s, reply))
    return reply


class _Memory:
  """Checkpoints as `learner.checkpoint.CheckpointStore` keeps, in memory."""

  def __init__(self, record: Record):
    self._record = record
    self.saved: checkpoint.Checkpoint | None = None
    self._sizes = (0, 0, 0)

  def latest_step(self) -> int | None:
    return None if self.saved is None else self.saved.step

  def save(
    self, step: int, *, arrays: Mapping[str, Any], extra: Mapping[str, Any]
  ) -> None:
    self.saved = checkpoint.Checkpoint(
      step, copy.deepcopy(dict(arrays)), json.loads(json.dumps(extra))
    )
    record = self._record
    self._sizes = len(record.steps), len(record.asked), len(record.replies)

  def restore(self) -> checkpoint.Checkpoint:
    """Returns what was saved, and forgets what came later."""
    assert self.saved is not None
    record = self._record
    steps, asked, replies = self._sizes
    del record.steps[steps:], record.asked[asked:], record.replies[replies:]
    record.resumed_at.append(self.saved.step)
    return self.saved


class _Killed(Exception):
  """The process is no more."""


class _Clock:
  """A `preemption.StopRequest` and a learner that know the simulated time."""

  def __init__(
    self, world: simulated_services.World, setting: Setting, stop: Stop | None
  ):
    self._world = world
    self._setting = setting
    self._stop = stop

  def check(self) -> None:
    if self._stop is None or self._world.now_s < self._stop.after_s:
      return
    if self._stop.saves:
      raise preemption.Stopped('stopped')
    raise _Killed

  def place(self, state: Any) -> Any:
    return state

  def to_save(self, state: Any) -> Any:
    return state

  def policy(self, state: Any) -> Any:
    return state.params

  def update(
    self, state: Any, packed: Any
  ) -> tuple[Any, dict[str, np.ndarray]]:
    del packed
    self._world.pass_time(self._setting.update_s)
    return state, {
      'skipped_in_a_row': np.zeros(()),
      'log_ratio_abs_mean': np.zeros(()),
    }


class _Run(training.Training):
  """A run whose steps are recorded instead of learned from."""

  def __init__(
    self, world: simulated_services.World, record: Record, **parts: Any
  ):
    super().__init__(**parts)
    self._world = world
    self._record = record
    self._batch: list[flow.Finished] = []

  def pack(self, batch: Sequence[flow.Finished]) -> types.PackedBatch:
    self._batch = list(batch)
    return cast(types.PackedBatch, None)

  def save_when_due(self) -> None:
    talks = self.flow.batcher
    self._record.steps.append(
      Step(
        step=self.step - 1,
        at_s=self._world.now_s,
        version=self.flow.version,
        batch=self._batch,
        in_flight=talks.in_flight,
        groups=len(talks.open) + len(talks.finished),
        asked=len(self._record.asked),
        dispatched=talks.dispatched,
        statuses=dict(talks.statuses),
      )
    )
    super().save_when_due()


def run(setting: Setting, *, seed: int, stops: Sequence[Stop] = ()) -> Record:
  """Trains for `setting.steps` steps, resumed after every stop.

  Args:
    setting: what to do.
    seed: of what happens to services and messages.
    stops: ends of the process; one that comes after the last step does
      nothing. The services start anew with the run.

  Returns:
    What happened.

  Raises:
    RolloutsFailed: the services do not deliver.
    NothingToCollect: nothing is in flight and nothing can be dispatched.
  """
  record = Record(setting)
  memory = _Memory(record)
  began_s = 0.0
  for number, stop in enumerate([*stops, None]):
    budget = retries.RetryBudget(setting.attempts)
    world = simulated_services.World(
      setting.site, budget, seed + 1_000_003 * number
    )
    components = _assemble(setting, world, record, memory, budget, stop)
    if memory.saved is None:
      components.flow.publish(components.published, 0)
      components.flow.dispatch()
      components.save()
    else:
      components.adopt(memory.restore())
    start = len(record.steps)
    ended = False
    try:
      loop.train(components, cast(preemption.StopRequest, components.learner))
      ended = True
    except preemption.Stopped:
      components.save_now()
    except _Killed:
      pass
    record.steps[start:] = [
      step._replace(at_s=step.at_s + began_s) for step in record.steps[start:]
    ]
    began_s += world.now_s
    if ended:
      break
  evidence = components.flow.evidence
  record.counts = evidence.counts(setting.task_ids, components.flow.version)
  return record


def _assemble(
  setting: Setting,
  world: simulated_services.World,
  record: Record,
  memory: _Memory,
  budget: retries.RetryBudget,
  stop: Stop | None,
) -> _Run:
  params = {'w': np.zeros(2, np.float32)}
  clock = _Clock(world, setting, stop)
  single = setting.group_size == 1
  make = event_time.EventTimeEvidence if single else no_evidence.NoEvidence
  offline = np.full(setting.num_tasks, OFFLINE)
  evidence: tracker.Evidence = make(setting.task_ids, offline, offline)
  config = _config(setting)
  talks = batcher.Batcher(
    _Ear(world, record),
    types.SamplingParams(),
    budget=budget,
    keep_truncated=True,
    rollout_timeout_s=4 * setting.site.request_timeout_s,
    max_given_up=2 * setting.in_flight,
    crosses_versions=setting.staleness == 'interruptible',
    check_stop=clock.check,
  )
  return _Run(
    world,
    record,
    config=config,
    group_size=setting.group_size,
    directory=pathlib.Path(),
    learner=cast(update.Learner, clock),
    state=cast(
      learner_state.LearnerState, python_types.SimpleNamespace(params=params)
    ),
    flow=flow.Flow(
      dispatch.Dispatcher(
        setting.task_ids,
        evidence,
        seed=setting.seed,
        group_size=setting.group_size,
        max_in_flight_per_prompt=setting.per_prompt,
      ),
      talks,
      staleness.make(config, setting.group_size),
      evidence,
      setting.evidence_from,
    ),
    metrics=cast(
      metrics.MetricsWriter,
      python_types.SimpleNamespace(write=lambda *_: None),
    ),
    checkpoints=cast(checkpoint.CheckpointStore, memory),
    published=params,
  )


def _config(setting: Setting) -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      'seed': setting.seed,
      'environment': {'num_tasks': setting.num_tasks},
      'run': {'steps': setting.steps, 'checkpoint_every_steps': 5},
      'learner': {'stop_on_gap': True},
      'dispatch': {
        name: getattr(setting, name)
        for name in (
          *('batch_size', 'in_flight', 'per_prompt', 'in_order', 'max_lag'),
          *('staleness', 'discard_overdue'),
        )
      },
    }
  )
