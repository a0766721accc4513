"""The components of a run and everything of them that a checkpoint holds."""

import dataclasses
import pathlib
from collections.abc import Sequence

import ml_collections
import numpy as np

from spopp_jax import types
from spopp_jax.learner import (
  checkpoint,
  logprob_contract,
  packing,
  update,
)
from spopp_jax.learner import state as learner_state
from spopp_jax.runner import batcher as batcher_lib
from spopp_jax.runner import dispatch as dispatch_lib
from spopp_jax.runner import metrics as metrics_lib
from spopp_jax.runner import staleness as staleness_lib
from spopp_jax.runner import stored
from spopp_jax.tracker import base as tracker

_MAX_SKIPPED_IN_A_ROW = 3

Finished = batcher_lib.Finished


class TrainingStopped(RuntimeError):
  """The run cannot go on; the text says why and what to look at."""


@dataclasses.dataclass
class Training:
  """One run: its components and their state.

  Attributes:
    config: the validated configuration.
    group_size: rollouts a prompt and dispatch.
    directory: where the run writes.
    learner: scores and updates.
    state: parameters and optimizer state.
    evidence: prompt values.
    dispatcher: draws prompts.
    batcher: talks to the sampler.
    staleness: how old the work may be.
    metrics: takes one record a step.
    checkpoints: the run's checkpoints.
    published: host copy of the parameters that the sampler holds.
    policy_version: version of `published`, which is the policy event: the
      batches that had been consumed when it was published.
    updates_done: batches consumed.
    step: batches consumed and recorded.
    collecting: the step that the next collected batch is for.
  """

  config: ml_collections.ConfigDict
  group_size: int
  directory: pathlib.Path
  learner: update.Learner
  state: learner_state.LearnerState
  evidence: tracker.Evidence
  dispatcher: dispatch_lib.Dispatcher
  batcher: batcher_lib.Batcher
  staleness: staleness_lib.Staleness
  metrics: metrics_lib.MetricsWriter
  checkpoints: checkpoint.CheckpointStore
  published: dict[str, np.ndarray]
  policy_version: int = 0
  updates_done: int = 0
  step: int = 0
  collecting: int = 0

  @property
  def clock(self) -> staleness_lib.Clock:
    """Where learner and samplers stand."""
    return staleness_lib.Clock(self.collecting, self.policy_version)

  def publish(self) -> None:
    """Publishes the learner's parameters, unless they are published."""
    if self.policy_version == self.updates_done:
      return
    self.published = {k: np.asarray(v) for k, v in self.state.params.items()}
    self.policy_version = self.updates_done
    self.batcher.publish(
      self.published,
      self.policy_version,
      interrupt=self.staleness.interrupts,
    )

  def dispatch(self) -> None:
    """Sends off what the staleness policy admits now."""
    self.batcher.submit(
      self.staleness.tickets(self.clock, self.dispatcher, self.batcher)
    )

  def collect(self) -> list[Finished]:
    """Waits for the batch of the next step.

    Raises:
      RolloutsFailed: the sampler does not deliver.
      TrainingStopped: nothing is in flight and nothing can be dispatched.
    """
    while True:
      if self.staleness.refills:
        self.file_outcomes()
        self.dispatch()
      chosen = self.staleness.choose(self.clock, self.batcher)
      if chosen is not None:
        break
      if not self.batcher.in_flight:
        self.dispatch()
      if not self.batcher.in_flight:
        raise TrainingStopped(
          f'the batch of step {self.collecting} lacks rollouts and none can be '
          'dispatched; the warnings above and the log of the sampler say why'
        )
      self.batcher.wait()
    self.collecting += 1
    return self.batcher.take(chosen)

  def drain(self) -> list[Finished]:
    """Waits for the rest of the flight where the policy has it trained never.

    Returns:
      What came too late for the batch.
    """
    return self.batcher.drain() if self.staleness.drops_rest else []

  def file_outcomes(self, batch: Sequence[Finished] = ()) -> None:
    """Hands outcomes to the evidence, each under its policy event.

    Args:
      batch: what a step consumes; counts where evidence is of the consumed.
    """
    received = self.batcher.received()
    if self.config.dispatch.evidence_from == 'received':
      self._file(received)
    else:
      self._file(batch)

  def _file(self, items: Sequence[Finished]) -> None:
    self.evidence.receive(
      [
        tracker.Outcome(
          request_id=item.ticket.request_id,
          task_id=item.ticket.task_id,
          policy_event=self.staleness.event(*item),
          reward=item.trajectory.reward,
        )
        for item in items
      ]
    )

  def pack(self, batch: Sequence[Finished]) -> types.PackedBatch:
    """Packs the batch; the deal to minibatches depends on seed and step.

    Raises:
      TrainingStopped: the batch is empty.
      LogprobContractError: its log-probs cannot be compared.
    """
    if not batch:
      raise TrainingStopped(
        f'no rollout of step {self.step} is usable; the warnings above and '
        "the sampler's log say why"
      )
    # The deal must not depend on who finished first.
    batch = sorted(batch, key=lambda item: item.ticket.request_id)
    self.check_logprobs([item.trajectory for item in batch])
    c = self.config.learner
    return packing.pack(
      [item.trajectory for item in batch],
      [item.ticket.value for item in batch],
      groups=[item.ticket.group_id for item in batch],
      group_size=self.group_size,
      num_slots=self.config.dispatch.batch_size,
      minibatches=c.minibatches,
      row_length=c.row_length,
      row_buckets=c.row_buckets,
      row_multiple=c.microbatches,
      rng=np.random.default_rng((self.config.seed, self.step)),
    )

  def check_logprobs(self, trajectories: Sequence[types.Trajectory]) -> None:
    """Refuses log-probs that give no ratio; see `logprob_contract.check`."""
    logprob_contract.check(
      trajectories,
      temperature=self.config.sampler.temperature,
      allow_proxy_ratio=self.config.learner.allow_proxy_ratio,
    )

  def score(self, trajectories: Sequence[types.Trajectory]) -> list[np.ndarray]:
    """Log-probabilities under the learner's present parameters."""
    return self.learner.score(self.state.params, trajectories)

  def guard(self, scalars: dict[str, np.ndarray]) -> None:
    """Stops a run whose updates are not finite again and again."""
    if int(scalars['skipped_in_a_row']) >= _MAX_SKIPPED_IN_A_ROW:
      self.save()
      raise TrainingStopped(
        f'{_MAX_SKIPPED_IN_A_ROW} updates in a row had a non-finite gradient '
        f'and were skipped, the last at step {self.step - 1}; see '
        f'{self.directory / "metrics.jsonl"}. A lower '
        '--config.optimizer.learning_rate is the first thing to try'
      )

  def save_when_due(self) -> None:
    """Saves every checkpoint_every_steps and after the last step."""
    run = self.config.run
    if self.step % run.checkpoint_every_steps == 0 or self.step == run.steps:
      self.save()

  def save(self) -> None:
    """Writes one checkpoint that a resumed run continues from exactly."""
    self._settle()
    held, records = stored.pack(self.batcher.held)
    self.checkpoints.save(
      self.step,
      arrays={
        'state': self.state,
        'published': self.published,
        'evidence': self.evidence.state_dict(),
        'held': held,
      },
      extra={
        'policy_version': self.policy_version,
        'updates_done': self.updates_done,
        'collecting': self.collecting,
        'dispatcher': self.dispatcher.state_dict(),
        'staleness': self.staleness.state_dict(),
        'in_flight': [dataclasses.asdict(t) for t in self.batcher.in_flight],
        'held': records,
        'dispatched': self.batcher.dispatched,
        'statuses': {s.name: n for s, n in self.batcher.statuses.items()},
      },
    )

  def _settle(self) -> None:
    """Waits for what only an older snapshot can generate.

    A resumed run has the present snapshot alone. Under `interrupts` that is
    the one that goes on anyway.
    """
    if self.staleness.interrupts:
      return
    while any(
      ticket.policy_version < self.policy_version
      for ticket in self.batcher.in_flight
    ):
      self.batcher.wait()
    self.file_outcomes()

  def adopt(self, saved: checkpoint.Checkpoint) -> None:
    """Goes on from a checkpoint: asks again for the rollouts it waits for."""
    self.step = saved.step
    self.state = saved.arrays['state']
    self.published = saved.arrays['published']
    self.evidence.load_state_dict(saved.arrays['evidence'])
    extra = saved.extra
    self.policy_version = extra['policy_version']
    self.updates_done = extra['updates_done']
    self.collecting = extra['collecting']
    self.dispatcher.load_state_dict(extra['dispatcher'])
    self.staleness.load_state_dict(extra['staleness'])
    self.batcher.statuses.update(
      {types.Status[name]: n for name, n in extra['statuses'].items()}
    )
    self.batcher.dispatched = extra['dispatched']
    self.batcher.publish(self.published, self.policy_version)
    self.batcher.restore(
      stored.unpack(saved.arrays['held'], extra['held']),
      [types.Ticket(**t) for t in extra['in_flight']],
    )
