"""Builds both ends of the sampler service from one configuration."""

import pathlib
import sys

import ml_collections

from spopp_jax import types
from spopp_jax.envs import base as envs
from spopp_jax.models import parameters, policy_files
from spopp_jax.sampler import client, engine, local, rollout
from spopp_jax.sampler import base as sampler_base

_SERVED_BLOCKS = ('environment', 'sampler')


def sampling_params(config: ml_collections.ConfigDict) -> types.SamplingParams:
  """Returns the decoding parameters of every request."""
  return types.SamplingParams(
    temperature=config.sampler.temperature,
    max_turn_tokens=config.sampler.max_turn_tokens,
    max_turns=config.environment.step_limit,
  )


def make_driver(
  config: ml_collections.ConfigDict,
  policy: policy_files.Policy,
  tasks: envs.TaskSuite,
) -> rollout.RolloutDriver:
  """Returns engine and environments joined, with no parameters loaded."""
  return rollout.RolloutDriver(
    engine.DecodeEngine(
      policy.config,
      num_slots=config.sampler.slots,
      max_context=config.sampler.context_length,
      max_turn_tokens=config.sampler.max_turn_tokens,
      end_id=policy.tokenizer.end_id,
    ),
    tasks,
    policy.tokenizer,
  )
