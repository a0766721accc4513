"""A tiny decoder, its episodes and their log-probs without packing."""

import types as python_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax import types
from spopp_jax.models import dense, parameters

CONFIG = dense.DecoderConfig(
  vocab_size=11,
  hidden_size=16,
  num_hidden_layers=1,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=8,
  intermediate_size=16,
)
ROW = 16


@pytest.fixture(scope='module', autouse=True)
def _quick_compilation():
  """Tiny programs run as fast, and compile in less time."""
  name = 'jax_disable_most_optimizations'
  before = jax.config.values[name]
  jax.config.update(name, True)
  yield
  jax.config.update(name, before)


def make_parameters(seed=0):
  rng = np.random.default_rng(seed)
  _, shapes = parameters.graph(CONFIG)
  return {
    name: rng.normal(name.endswith('norm.weight'), 0.3, shape).astype('f4')
    for name, shape in sorted((k, v.shape) for k, v in shapes.items())
  }


def make_trajectories(lengths=(9, 5, 16, 3, 7, 12), seed=0):
  """Random episodes; their behaviour is not that of any parameters here."""
  rng = np.random.default_rng(seed)
  trajectories = []
  for i, length in enumerate(lengths):
    mask = rng.random(length) < 0.6
    mask[0], mask[1] = False, True
    logprobs = np.where(mask, rng.uniform(-4, -1, length), 0)
    trajectories.append(
      types.Trajectory(
        request_id=f'r{i}',
        task_id='t',
        status=types.Status.OK,
        reward=float(rng.random() < 0.5),
        policy_version=0,
        weights_checksum='',
        tokens=rng.integers(0, 11, length).astype(np.int32),
        action_mask=mask,
        behaviour_logprobs=logprobs.astype(np.float32),
        num_turns=1,
        sampling=types.SamplingParams(),
      )
    )
  return trajectories


@jax.jit
def padded_logprobs(params, tokens, temperature):
  """Log-probs [ROW] of one episode padded to a row."""
  decoder = parameters.bind(parameters.graph(CONFIG)[0], params)
  positions = jnp.arange(ROW, dtype=jnp.int32)[None]
  hidden = decoder.hidden(tokens[None], positions, jnp.ones_like(positions))
  logprobs = jax.nn.log_softmax(decoder.logits(hidden)[0] / temperature)
  chosen = jnp.take_along_axis(logprobs[:-1], tokens[1:, None], axis=1)[:, 0]
  return jnp.pad(chosen, (1, 0))


def logprobs_alone(params, tokens, temperature=1.0):
  """Log-probs [T] of one episode in a forward pass of its own."""
  padded = np.pad(tokens, (0, ROW - len(tokens)))
  return padded_logprobs(params, padded, temperature)[: len(tokens)]


@pytest.fixture(scope='session')
def tiny():
  return python_types.SimpleNamespace(
    config=CONFIG,
    row_length=ROW,
    make_parameters=make_parameters,
    make_trajectories=make_trajectories,
    padded_logprobs=padded_logprobs,
    logprobs_alone=logprobs_alone,
  )
