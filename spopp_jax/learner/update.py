"""The jitted learner step: advantages once, then one pass of minibatches."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from spopp_jax import types
from spopp_jax.kernels import token_logprobs
from spopp_jax.learner import packing
from spopp_jax.learner import state as state_lib
from spopp_jax.models import dense, parameters
from spopp_jax.objectives import base as objectives


def make_optimizer(
  *,
  learning_rate: float,
  b2: float,
  weight_decay: float,
  max_grad_norm: float,
  warmup_steps: int,
) -> optax.GradientTransformation:
  """Returns AdamW after global-norm clipping, with a linear warm-up.

  Args:
    learning_rate: reached after the warm-up.
    b2: decay of the second moment.
    weight_decay: decoupled, per update and learning rate.
    max_grad_norm: global norm that gradients are clipped to.
    warmup_steps: optimizer updates from 1/warmup_steps of the rate to all
      of it; 0 is none.
  """
  if warmup_steps:
    schedule = optax.linear_schedule(
      learning_rate / warmup_steps, learning_rate, warmup_steps - 1
    )
  else:
    schedule = optax.constant_schedule(learning_rate)
  return optax.chain(
    optax.clip_by_global_norm(max_grad_norm),
    optax.adamw(schedule, b2=b2, weight_decay=weight_decay),
  )


class Learner:
  """Scores and updates a decoder under an objective.

  A batch is a PackedBatch whose per-token arrays are [M, B, S]: M optimizer
  minibatches of B rows (`packing.pack`).
  """

  def __init__(
    self,
    config: dense.DecoderConfig,
    objective: objectives.Objective,
    optimizer: optax.GradientTransformation,
    *,
    temperature: float = 1.0,
    minibatch_size: int,
    row_length: int,
    row_buckets: Sequence[int],
  ):
    """Compiles nothing yet.

    Args:
      config: the decoder.
      objective: gives advantages, weights and loss.
      optimizer: applied to every minibatch.
      temperature: > 0; the sampler's, so that log-probs mean the same.
      minibatch_size: trajectories that are scored at a time.
      row_length: S, tokens of a packed row.
      row_buckets: allowed numbers of rows.
    """
    self._minibatch_size = minibatch_size
    self._optimizer = optimizer
    self._row_length = row_length
    self._row_buckets = tuple(row_buckets)
    graphdef, _ = parameters.graph(config)
    logprobs = functools.partial(
      packed_logprobs, graphdef=graphdef, temperature=temperature
    )
    self._score = jax.jit(functools.partial(_map_rows, logprobs))
    self._update = jax.jit(
      functools.partial(_update, logprobs, objective, optimizer),
      donate_argnums=0,
    )

  def init(self, params: Mapping[str, Any]) -> state_lib.LearnerState:
    """Returns the state before the first update; copies the parameters."""
    return state_lib.initial(params, self._optimizer)

  def update(
    self, state: state_lib.LearnerState, batch: types.PackedBatch
  ) -> tuple[state_lib.LearnerState, dict[str, jax.Array]]:
    """Takes M optimizer steps; donates `state`. Metrics are scalars."""
    return self._update(state, batch)

  def score(
    self,
    params: parameters.Parameters,
    trajectories: Sequence[types.Trajectory],
  ) -> list[np.ndarray]:
    """Returns each trajectory's log-probs [T] float32 nats, no gradient.

    Every token but the first is scored, observations included; the first has
    no predecessor and gets 0.
    """
    logprobs: list[np.ndarray] = []
    for start in range(0, len(trajectories), self._minibatch_size):
      group = trajectories[start : start + self._minibatch_size]
      logprobs += self._score_group(params, group)
    return logprobs

  def _score_group(
    self,
    params: parameters.Parameters,
    trajectories: Sequence[types.Trajectory],
  ) -> list[np.ndarray]:
    batch = packing.pack(
      trajectories,
      [0.0] * len(trajectories),
      num_slots=self._minibatch_size,
      minibatches=1,
      row_length=self._row_length,
      row_buckets=self._row_buckets,
    )
    # Inside a segment every token but the first has a predecessor.
    scored = batch._replace(action_mask=batch.positions > 0)
    logprobs = np.asarray(self._score(params, scored))
    lengths = [len(t.tokens) for t in trajectories]
    return packing.unpack(batch, logprobs, lengths)


def packed_logprobs(
  params: parameters.Parameters,
  batch: types.PackedBatch,
  *,
  graphdef: nnx.GraphDef,
  temperature: float,
) -> jax.Array:
  """Returns [B, S] float32 nats where the action mask is set, else 0."""
  decoder = parameters.bind(graphdef, params)
  hidden = decoder.hidden(batch.tokens, batch.positions, batch.segment_ids)
  return token_logprobs.token_logprobs(
    decoder.logits(hidden),
    batch.tokens,
    batch.action_mask,
    temperature=temperature,
  )


_PER_TOKEN = (
  'tokens',
  'positions',
  'segment_ids',
  'trajectory_ids',
  'action_mask',
  'behaviour_logprobs',
  'kept_ids',
)


def _rows(batch: types.PackedBatch) -> dict[str, jax.Array]:
  return {name: getattr(batch, name) for name in _PER_TOKEN}


def _map_rows(
  logprobs: Callable, params: parameters.Parameters, batch: types.PackedBatch
) -> jax.Array:
  """Applies `logprobs` to one minibatch after another: [M, B, S]."""
  return jax.lax.map(
    lambda rows: logprobs(params, batch._replace(**rows)), _rows(batch)
  )


def _update(
  logprobs: Callable,
  objective: objectives.Objective,
  optimizer: optax.GradientTransformation,
  state: state_lib.LearnerState,
  batch: types.PackedBatch,
) -> tuple[state_lib.LearnerState, dict[str, jax.Array]]:
  """Standardizes once, then scans the minibatches."""
  merge = lambda x: jnp.concatenate(x, axis=0)  # [M, B, ...] to [M B, ...]
  whole = batch._replace(**{k: merge(v) for k, v in _rows(batch).items()})
  advantages = objective.advantages(whole)
  single = batch.tokens.shape[0] == 1
  # With one optimizer step the proximal policy is the current one: the loss
  # takes it from its own forward pass.
  proximal = None if single else _map_rows(logprobs, state.params, batch)

  def loss(params, minibatch, proximal):
    current = logprobs(params, minibatch)
    if proximal is None:
      proximal = jax.lax.stop_gradient(current)
    weights = objective.weights(minibatch, proximal, advantages)
    numerator, count, metrics = objective.loss(
      current, minibatch, proximal, advantages, weights
    )
    sums = {**metrics, 'loss': numerator}
    return numerator / jnp.maximum(count, 1), (count, sums, proximal)

  def step(state, inputs):
    rows, proximal = inputs
    (value, (count, sums, proximal)), grads = jax.value_and_grad(
      loss, has_aux=True
    )(state.params, batch._replace(**rows), proximal)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
    state, skipped = _apply(optimizer, state, grads, finite, count)
    return state, (count, sums, proximal, grad_norm, skipped)

  state, (counts, sums, proximal, grad_norms, skipped) = jax.lax.scan(
    step, state, (_rows(batch), proximal)
  )
  action_tokens = counts.sum()
  metrics = {
    name: values.sum() / jnp.maximum(action_tokens, 1)
    for name, values in sums.items()
  }
  metrics |= objective.diagnostics(whole, advantages, merge(proximal))
  metrics['grad_norm'] = grad_norms.mean()
  metrics['skipped_update'] = skipped.sum()
  metrics['skipped_in_a_row'] = state.skipped_in_a_row
  return state, metrics


def _apply(optimizer, state, grads, finite, count):
  """One optimizer step, or none when there is nothing sound to apply."""
  usable = finite & (count > 0)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  stepped = state_lib.LearnerState(
    params=optax.apply_updates(state.params, updates),
    opt_state=opt_state,
    updates=state.updates + 1,
    skipped_in_a_row=jnp.int32(0),
  )
  kept = state._replace(
    skipped_in_a_row=state.skipped_in_a_row + (~finite).astype(jnp.int32)
  )
  state = jax.tree.map(
    lambda new, old: jnp.where(usable, new, old), stepped, kept
  )
  return state, (~usable).astype(jnp.int32)
