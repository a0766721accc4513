"""Builds the runner's end of the sampler services from one configuration."""

import functools
import pathlib

import ml_collections

from spopp_jax import types
from spopp_jax.envs import base as envs
from spopp_jax.models import parameters, policy_files
from spopp_jax.runner import (
  batcher,
  config_rules,
  pauses,
  preemption,
  sampler_list,
  serving,
)
from spopp_jax.sampler import base as sampler_base
from spopp_jax.sampler import (
  client,
  credentials,
  failures,
  handshake,
  local,
  member,
  pool,
  publication,
  retries,
  rollout,
)


def sampling_params(config: ml_collections.ConfigDict) -> types.SamplingParams:
  """Returns the decoding parameters of every request."""
  return types.SamplingParams(
    temperature=config.sampler.temperature,
    top_p=config.sampler.top_p,
    top_k=config.sampler.top_k,
    min_p=config.sampler.min_p,
    max_turn_tokens=config.sampler.max_turn_tokens,
    max_turns=config.environment.step_limit,
  )


def make_batcher(
  config: ml_collections.ConfigDict,
  sampler: sampler_base.Sampler,
  budget: retries.RetryBudget,
  *,
  directory: pathlib.Path | None = None,
  stop: preemption.StopRequest | None = None,
) -> batcher.Batcher:
  """Returns the runner's end of a sampler.

  Args:
    config: reads the blocks sampler and dispatch.
    sampler: serves the rollouts.
    budget: tries of a rollout, shared with the sampler.
    directory: the run's, which gets pauses.jsonl.
    stop: looked at while waiting.
  """
  return batcher.Batcher(
    sampler,
    sampling_params(config),
    budget=budget,
    keep_truncated=config.dispatch.keep_truncated,
    # A lost sampler is restored by the sampler's side in the meantime.
    rollout_timeout_s=config.sampler.rollout_timeout_s
    + config.sampler.recovery_timeout_s,
    max_given_up=2 * config.dispatch.in_flight,
    crosses_versions=config.dispatch.staleness == 'interruptible',
    pauses=pauses.Pauses(directory and directory / 'pauses.jsonl'),
    check_stop=(stop or preemption.StopRequest()).check,
  )


def connect(
  config: ml_collections.ConfigDict,
  policy: policy_files.Policy,
  directory: pathlib.Path,
  tasks: envs.TaskSuite,
  budget: retries.RetryBudget,
  stop: preemption.StopRequest | None = None,
) -> sampler_base.Sampler:
  """Connects to the configured services and starts those of this run's own.

  Args:
    config: `sampler.addresses` decides.
    policy: what the services must serve.
    directory: the run's; holds `policy/`, gets samplers.txt and, of a service
      of its own, the log.
    tasks: what the services must offer.
    budget: tries of a rollout.
    stop: looked at while waiting.

  Raises:
    SamplerLost: not one service in time.
    Stopped: `stop` asks for it.
    HandshakeRefused: no service that fits.
  """
  expected = handshake.Expectation(
    tokenizer_fingerprint=serving.make_template(
      config, policy.tokenizer
    ).fingerprint,
    model_fingerprint=parameters.fingerprint(policy.config),
    tasks_fingerprint=rollout.tasks_fingerprint(tasks.task_ids),
    max_context_tokens=config.learner.row_length,
    vocab_size=policy.config.vocab_size,
  )
  store = None
  if config.sampler.transport != 'grpc':
    store = publication.Store(directory / 'weights')
  names = sampler_list.SamplerList(
    directory,
    config.sampler.addresses,
    functools.partial(
      credentials.check_address,
      credentials=config_rules.sampler_credentials(config.sampler),
      allow_insecure=config.sampler.allow_insecure,
    ),
  )
  samplers = pool.Pool(
    names,
    functools.partial(
      _connector,
      config,
      expected,
      directory,
      failures.Failures(directory / 'failures'),
    ),
    budget=budget,
    request_timeout_s=config.sampler.rollout_timeout_s,
    recovery_timeout_s=config.sampler.recovery_timeout_s,
    store=store,
  )
  samplers.start(
    config.sampler.connect_timeout_s, (stop or preemption.StopRequest()).check
  )
  return samplers


def _connector(
  config: ml_collections.ConfigDict,
  expected: handshake.Expectation,
  directory: pathlib.Path,
  kept: failures.Failures,
  name: str,
) -> member.Connect:
  """Returns what connects to a service by its name in the list."""
  timeout_s = config.sampler.connect_timeout_s
  if sampler_list.is_own(name):
    return lambda deliver: local.LocalSampler(
      serving.serve_command(config, directory / 'policy'),
      expected,
      log_path=directory / sampler_list.log_name(name),
      ready_deadline_s=timeout_s,
      transport=config.sampler.transport,
      deliver=deliver,
      failures=kept,
    )
  return lambda deliver: client.SamplerClient(
    name,
    expected,
    own=config_rules.sampler_credentials(config.sampler),
    allow_insecure=config.sampler.allow_insecure,
    connect_deadline_s=timeout_s,
    transport=config.sampler.transport,
    deliver=deliver,
    failures=kept,
  )
