"""A whole run: policy, sampler, offline values, training, evaluation."""

import contextlib
import dataclasses
import logging
import pathlib
import time
from typing import Any

import ml_collections

from spopp_jax import envs, tracker
from spopp_jax.envs import base as envs_base
from spopp_jax.envs import household
from spopp_jax.learner import checkpoint, footprint, logprob_contract
from spopp_jax.models import lora, policy_files, presets
from spopp_jax.runner import batcher as batcher_lib
from spopp_jax.runner import (
  cold_start,
  config_rules,
  dispatch,
  estimate,
  flow,
  hosts,
  logprob_check,
  loop,
  meeting,
  metrics,
  preemption,
  run_directory,
  sampling,
  staleness,
  training,
)
from spopp_jax.runner import config as config_lib
from spopp_jax.sampler import base as sampler_base
from spopp_jax.sampler import errors as sampler_errors
from spopp_jax.sampler import retries
from spopp_jax.tracker import offline_evidence

_LOG = logging.getLogger(__name__)

# What a user can mend; the texts say how. Anything else is a bug.
EXPECTED_ERRORS = (
  config_lib.ConfigError,
  checkpoint.CheckpointError,
  footprint.TooLarge,
  household.GameError,
  logprob_contract.LogprobContractError,
  policy_files.PolicyError,
  sampler_errors.SamplerError,
  batcher_lib.RolloutsFailed,
  logprob_check.LogprobMismatch,
  flow.NothingToCollect,
  training.TrainingStopped,
  meeting.HostsMissing,
  metrics.MetricsError,
)


@dataclasses.dataclass(frozen=True)
class Result:
  """What a finished run reports.

  Attributes:
    directory: where the run wrote.
    policy: the starting policy.
    training: the trained components.
    before: every task under the starting policy.
    after: every task under the final policy.
    wall_s: seconds of this call.
  """

  directory: pathlib.Path
  policy: policy_files.Policy
  training: training.Training
  before: estimate.Estimate
  after: estimate.Estimate
  wall_s: float


def run(
  config: ml_collections.ConfigDict,
  sampler: sampler_base.Sampler | None = None,
  stop: preemption.StopRequest | None = None,
  lead: hosts.Lead | None = None,
) -> Result:
  """Trains as the configuration says, or continues an earlier run.

  Args:
    config: validated (`config.load_config`).
    sampler: serves the rollouts and is closed at the end; by default what the
      configuration names: the services of `sampler.addresses`.
    stop: asks the run to save itself and end.
    lead: the other hosts, which compute along (`meeting.start`).

  Returns:
    The result; its directory holds the policy, metrics and checkpoints.

  Raises:
    Stopped: the run was asked to stop; the text says how to continue.
    Exception: one of EXPECTED_ERRORS, with a text that says what to do.
  """
  stop = stop or preemption.StopRequest()
  start = time.perf_counter()
  tasks = envs.load_tasks(config.environment)
  directory, policy = _prepare(config, tasks)
  with contextlib.ExitStack() as stack:
    budget = retries.RetryBudget(config.dispatch.attempts)
    try:
      if sampler is None:
        sampler = sampling.connect(
          config, policy, directory, tasks, budget, stop
        )
      stack.callback(sampler.close)
      batcher = sampling.make_batcher(
        config, sampler, budget, directory=directory, stop=stop
      )
      before = _offline_outcomes(config, directory, policy, tasks, batcher)
    except preemption.Stopped as stopped:
      raise preemption.Stopped(
        f'{stopped} before the training began: start the same command again',
        stopped.exit_code,
      ) from None
    components = _assemble(config, directory, policy, batcher, before, lead)
    stack.callback(components.metrics.close)
    if not config.run.resume:
      _begin(components, before)
    try:
      loop.train(components, stop)
      after = _finish(components, tasks)
    except preemption.Stopped as stopped:
      components.save_now()
      raise preemption.Stopped(
        f'{stopped} after {components.step} of {config.run.steps} steps, saved '
        f'in {directory}; continue with --config.run.name={directory.name} '
        '--config.run.resume=True',
        stopped.exit_code,
      ) from None
  wall_s = time.perf_counter() - start
  return Result(directory, policy, components, before, after, wall_s)


def _begin(components: training.Training, before: estimate.Estimate) -> None:
  """Checks the sampler's log-probs, dispatches, and saves the start."""
  batch_size = components.config.dispatch.batch_size
  if sample := before.trajectories[:batch_size]:
    components.check_logprobs(sample)
    logprob_check.check(sample, components.score)
  components.flow.dispatch()
  components.save()


def _finish(
  components: training.Training, tasks: envs_base.TaskSuite
) -> estimate.Estimate:
  """Publishes the last parameters and measures them."""
  components.metrics.close()
  components.flow.batcher.drain()
  components.publish()
  learner = components.learner
  if learner.settings.adapters is not None:
    lora.save(
      components.directory / 'adapter',
      learner.settings.adapters,
      learner.trained(components.state),
      base_model=str(components.directory / 'policy'),
    )
  return _measure(
    components.config,
    components.flow.batcher,
    tasks,
    rollouts=components.config.evaluation.rollouts_per_task,
    policy_version=components.policy_version,
    purpose='evaluation',
  )


def _prepare(
  config: ml_collections.ConfigDict, tasks: household.HouseholdTasks
) -> tuple[pathlib.Path, policy_files.Policy]:
  """Returns the run's directory and its starting policy, which it holds.

  A given policy is read before the directory is made, so that a refused start
  leaves nothing behind.
  """
  if config.run.resume:
    directory = run_directory.prepare(config)
    return directory, policy_files.load(directory / 'policy')
  if config.cold_start.policy:
    policy = policy_files.load(config.cold_start.policy)
    preset = config.model.preset
    if preset and not presets.fits(policy.config, preset):
      raise config_lib.ConfigError(
        f'cold_start.policy ({config.cold_start.policy}) holds another model '
        f'than model.preset ({preset}): {policy.config}'
      )
    directory = run_directory.prepare(config)
  else:
    directory = run_directory.prepare(config)
    policy = cold_start.train_policy(config, tasks)
  policy_files.save(directory / 'policy', policy)
  return directory, policy


def _offline_outcomes(
  config: ml_collections.ConfigDict,
  directory: pathlib.Path,
  policy: policy_files.Policy,
  tasks: envs_base.TaskSuite,
  batcher: batcher_lib.Batcher,
) -> estimate.Estimate:
  """Measures the starting policy on every task, or reads what was measured."""
  path = directory / 'offline.json'
  if config.run.resume:
    return estimate.read(path, tasks.task_ids)
  batcher.publish(policy.params, 0)
  if config.offline.path:
    before = estimate.read(pathlib.Path(config.offline.path), tasks.task_ids)
  else:
    before = _measure(
      config,
      batcher,
      tasks,
      rollouts=config.offline.rollouts_per_task,
      policy_version=0,
      purpose='offline values',
    )
  before.write(path)
  return before


def _measure(
  config: ml_collections.ConfigDict,
  batcher: batcher_lib.Batcher,
  tasks: envs_base.TaskSuite,
  **settings: Any,
) -> estimate.Estimate:
  return estimate.measure(
    batcher,
    tasks.task_ids,
    seed=config.seed,
    progress=config.run.progress,
    **settings,
  )


def _assemble(
  config: ml_collections.ConfigDict,
  directory: pathlib.Path,
  policy: policy_files.Policy,
  batcher: batcher_lib.Batcher,
  before: estimate.Estimate,
  lead: hosts.Lead | None,
) -> training.Training:
  """Joins the components, at the first step or at the last checkpoint."""
  if lead is not None:
    lead.announce('begin', {}, dataclasses.asdict(policy.config))
  learner = training.make_learner(
    config, policy.config, lead.announce if lead else None
  )
  objective = learner.objective
  needs = training.footprint_of(config, learner)
  _LOG.info('%s', needs)
  footprint.check(needs)
  state = learner.init(policy.params)
  evidence = tracker.make_evidence(
    objective.baseline,
    before.task_ids,
    *offline_evidence.jeffreys(before.successes, before.rollouts),
    **config_rules.given(config.evidence),
  )
  checkpoints = checkpoint.CheckpointStore(directory / 'checkpoints')
  saved = checkpoints.restore({'state': state}) if config.run.resume else None
  if saved and saved.step > config.run.steps:
    raise config_lib.ConfigError(
      f'run.steps ({config.run.steps}) lies behind the checkpoint of step '
      f'{saved.step} that is to be resumed'
    )
  components = training.Training(
    config=config,
    group_size=objective.group_size,
    directory=directory,
    learner=learner,
    state=state,
    flow=flow.Flow(
      dispatch.Dispatcher(
        before.task_ids,
        evidence,
        seed=config.seed,
        group_size=objective.group_size,
        max_in_flight_per_prompt=config.dispatch.per_prompt,
      ),
      batcher,
      staleness.make(config, objective.group_size),
      evidence,
      config.dispatch.evidence_from,
    ),
    metrics=metrics.MetricsWriter(
      directory,
      total_steps=config.run.steps,
      resume_step=saved.step if saved else 0,
      progress=config.run.progress,
    ),
    checkpoints=checkpoints,
    published=dict(policy.params),
  )
  if saved:
    components.adopt(saved)
  return components
