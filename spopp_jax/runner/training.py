"""The components of a run and everything of them that a checkpoint holds."""

import dataclasses
import logging
import pathlib
from collections.abc import Mapping, Sequence

import ml_collections
import numpy as np

from spopp_jax import objectives, types
from spopp_jax.learner import (
  checkpoint,
  footprint,
  forward,
  logprob_contract,
  packing,
  update,
)
from spopp_jax.learner import state as learner_state
from spopp_jax.models import dense, lora, parameters
from spopp_jax.models import mesh as mesh_lib
from spopp_jax.runner import config_rules, logprob_check
from spopp_jax.runner import flow as flow_lib
from spopp_jax.runner import metrics as metrics_lib

_LOG = logging.getLogger(__name__)
_MAX_SKIPPED_IN_A_ROW = 3

Finished = flow_lib.Finished


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
    flow: its rollouts and their evidence.
    metrics: takes one record a step.
    checkpoints: the run's checkpoints.
    published: host copy of the parameters that the sampler holds.
    updates_done: batches consumed.
    step: batches consumed and recorded.
    gap_alarm: watches the gap between sampler and learner.
  """

  config: ml_collections.ConfigDict
  group_size: int
  directory: pathlib.Path
  learner: update.Learner
  state: learner_state.LearnerState
  flow: flow_lib.Flow
  metrics: metrics_lib.MetricsWriter
  checkpoints: checkpoint.CheckpointStore
  published: dict[str, np.ndarray]
  updates_done: int = 0
  step: int = 0
  gap_alarm: logprob_check.GapAlarm = dataclasses.field(
    default_factory=logprob_check.GapAlarm
  )

  @property
  def policy_version(self) -> int:
    """The version that is published."""
    return self.flow.version

  def publish(self) -> None:
    """Publishes the learner's parameters, unless they are published."""
    if self.flow.version != self.updates_done:
      self.published = self.learner.policy(self.state)
      self.flow.publish(self.published, self.updates_done)

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
      row_multiple=c.microbatches * self.learner.row_parts,
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

  def guard(self, record: Mapping[str, float]) -> None:
    """Stops a run that learns nothing sound, or warns of it."""
    alarm = self.gap_alarm.check(
      record['log_ratio_abs_mean'], record['lag_events']
    )
    if alarm:
      _LOG.warning('step %d: %s', self.step - 1, alarm)
    if self.config.learner.stop_on_gap and alarm:
      self.save()
      raise TrainingStopped(f'step {self.step - 1}: {alarm}')
    if record['skipped_in_a_row'] >= _MAX_SKIPPED_IN_A_ROW:
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
    self.flow.settle()
    self._write()

  def save_now(self) -> None:
    """Writes a checkpoint in the middle of a collection, unless there is one.

    What is in flight is asked for again by the resumed run, under its newest
    version where it was dispatched under an older one.
    """
    self.flow.file_outcomes()
    if self.checkpoints.latest_step() != self.step:
      self._write()

  def _write(self) -> None:
    arrays, extra = self.flow.state()
    self.checkpoints.save(
      self.step,
      arrays={
        'state': self.learner.to_save(self.state),
        'published': self.published,
        **arrays,
      },
      extra={
        'updates_done': self.updates_done,
        'gaps': list(self.gap_alarm.earlier),
        'flow': extra,
      },
    )

  def adopt(self, saved: checkpoint.Checkpoint) -> None:
    """Goes on from a checkpoint."""
    self.step = saved.step
    self.state = self.learner.place(saved.arrays['state'])
    self.published = saved.arrays['published']
    self.updates_done = saved.extra['updates_done']
    self.gap_alarm = logprob_check.GapAlarm(saved.extra['gaps'])
    self.flow.adopt(saved.arrays, saved.extra['flow'], self.published)


def make_learner(
  config: ml_collections.ConfigDict,
  decoder: dense.DecoderConfig,
  announce: update.Announce | None = None,
) -> update.Learner:
  """Returns the learner that a configuration describes.

  Args:
    config: validated.
    decoder: sizes of the policy.
    announce: as of `update.Learner`.

  Raises:
    ConfigError: the mesh needs other devices than there are, or adapters go to
      a layer that the policy does not have.
  """
  try:
    mesh = mesh_lib.DeviceMesh(
      mesh_lib.Sizes(config.mesh.data, config.mesh.fsdp, config.mesh.tensor),
      all_hosts=announce is not None,
    )
  except ValueError as error:
    raise config_rules.ConfigError(str(error)) from error
  adapters = _adapters(config, decoder)
  overrides = config_rules.given(config.objective)
  c = config.learner
  return update.Learner(
    decoder,
    objectives.make_objective(overrides.pop('name'), overrides),
    update.make_optimizer(**config.optimizer),
    settings=forward.Settings(
      temperature=config.sampler.temperature,
      chunk_tokens=c.chunk_tokens,
      compute_dtype=c.compute_dtype,
      remat=c.remat,
      adapters=adapters,
    ),
    minibatch_size=-(-config.dispatch.batch_size // c.minibatches),
    microbatches=c.microbatches,
    row_length=c.row_length,
    row_buckets=c.row_buckets,
    mesh=mesh,
    announce=announce,
  )


def footprint_of(
  config: ml_collections.ConfigDict,
  learner: update.Learner,
  *,
  compiler_options: dict[str, str | bool] | None = None,
) -> footprint.Footprint:
  """Measures a step of the most rows that its buckets foresee.

  Args:
    config: the learner's.
    learner: need not have a state.
    compiler_options: as of `footprint.measure`.
  """
  c = config.learner
  multiple = c.microbatches * learner.row_parts
  group_size = learner.objective.group_size
  groups = config.dispatch.batch_size // group_size
  limit = -(-groups // c.minibatches) * group_size
  rows = -(-min(max(c.row_buckets), limit) // multiple) * multiple
  top_k = config.sampler.top_k
  batch = packing.padding(
    (c.minibatches, rows, c.row_length),
    config.dispatch.batch_size,
    top_k if top_k <= packing.WIDEST_TOP_K else 0,
  )
  return footprint.measure(
    learner,
    batch,
    available_bytes=round(config.mesh.memory_gib * 2**30) or None,
    compiler_options=compiler_options,
  )


def _adapters(
  config: ml_collections.ConfigDict, decoder: dense.DecoderConfig
) -> lora.Config | None:
  settings = dict(config.lora.items())
  if not settings['rank']:
    return None
  adapters = lora.Config(**settings, seed=config.seed)
  try:
    lora.shapes(adapters, parameters.graph(decoder)[1])
  except ValueError as error:
    raise config_rules.ConfigError(f'lora.{error}') from error
  return adapters
