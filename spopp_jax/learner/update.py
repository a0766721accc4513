"""The jitted learner step: advantages once, then one pass of minibatches."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from spopp_jax import types
from spopp_jax.kernels import token_logprobs
from spopp_jax.learner import packing, row_devices
from spopp_jax.learner import state as state_lib
from spopp_jax.models import dense, parameters
from spopp_jax.objectives import base as objectives

Announce = Callable[[str, dict[str, Any]], None]
# Tokens whose logits are held at a time; enough for efficient products.
CHUNK_TOKENS = 1024


def silent(call: str, arrays: dict[str, Any]) -> None:
  """Announces nothing: for a host that is told by another."""
  del call, arrays


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

  Attributes:
    objective: gives advantages, weights and loss.
    devices: how many share the rows, of all hosts together.
  """

  def __init__(
    self,
    config: dense.DecoderConfig,
    objective: objectives.Objective,
    optimizer: optax.GradientTransformation,
    *,
    temperature: float = 1.0,
    microbatches: int = 1,
    chunk_tokens: int = CHUNK_TOKENS,
    minibatch_size: int,
    row_length: int,
    row_buckets: Sequence[int],
    devices: int = 1,
    announce: Announce | None = None,
  ):
    """Compiles nothing yet.

    Args:
      config: the decoder.
      objective: gives advantages, weights and loss.
      optimizer: applied to every minibatch.
      temperature: > 0; the sampler's, so that log-probs mean the same.
      microbatches: parts that a minibatch's gradient is computed in; they
        save memory and change nothing else. Rows must divide by it.
      chunk_tokens: >= 1; tokens whose logits are held at a time.
      minibatch_size: trajectories that are scored at a time.
      row_length: S, tokens of a packed row.
      row_buckets: allowed numbers of rows.
      devices: how many of this process's devices share the rows, which must
        divide by their number; each holds all parameters.
      announce: makes every host take part: called with the name of each call
        below and its arrays before it computes, so that the other hosts can
        make the same call. None is this host alone.

    Raises:
      ValueError: there are fewer devices.
    """
    self._rows = row_devices.RowDevices(devices, all_hosts=announce is not None)
    self._announce = announce or silent
    self.objective = objective
    self.devices = self._rows.count
    self._minibatch_size = minibatch_size
    self._optimizer = optimizer
    self._row_length = row_length
    self._row_buckets = tuple(row_buckets)
    graphdef, _ = parameters.graph(config)
    logprobs = functools.partial(
      packed_logprobs,
      graphdef=graphdef,
      temperature=temperature,
      chunk_tokens=chunk_tokens,
    )
    everywhere = self._rows.everywhere
    self._score = jax.jit(
      functools.partial(_map_rows, logprobs), out_shardings=everywhere
    )
    self._update = jax.jit(
      functools.partial(_update, logprobs, objective, optimizer, microbatches),
      donate_argnums=0,
      out_shardings=everywhere,
    )

  def init(self, params: Mapping[str, Any]) -> state_lib.LearnerState:
    """Returns the state before the first update; copies the parameters."""
    self._announce('init', {k: np.asarray(v) for k, v in params.items()})
    return self._rows.replicate(state_lib.initial(params, self._optimizer))

  def place(self, state: state_lib.LearnerState) -> state_lib.LearnerState:
    """Returns a state that was saved, laid out for the updates to come."""
    leaves = jax.tree.leaves(state)
    self._announce(
      'place', {str(i): np.asarray(x) for i, x in enumerate(leaves)}
    )
    return self._rows.replicate(state)

  def update(
    self, state: state_lib.LearnerState, batch: types.PackedBatch
  ) -> tuple[state_lib.LearnerState, dict[str, jax.Array]]:
    """Takes M optimizer steps; donates `state`. Metrics are scalars."""
    self._announce('update', batch._asdict())
    return self._update(state, self._rows.spread(batch))

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
      row_multiple=self.devices,
    )
    # Inside a segment every token but the first has a predecessor.
    scored = batch._replace(action_mask=batch.positions > 0)
    logprobs = self.score_packed(params, scored)
    lengths = [len(t.tokens) for t in trajectories]
    return packing.unpack(batch, logprobs, lengths)

  def score_packed(
    self, params: parameters.Parameters, batch: types.PackedBatch
  ) -> np.ndarray:
    """Returns [M, B, S] float32 nats where the action mask is set, else 0."""
    self._announce('score', batch._asdict())
    return np.asarray(self._score(params, self._rows.spread(batch)))


def packed_logprobs(
  params: parameters.Parameters,
  batch: types.PackedBatch,
  *,
  graphdef: nnx.GraphDef,
  temperature: float,
  chunk_tokens: int,
) -> jax.Array:
  """Returns [B, S] float32 nats where the action mask is set, else 0."""
  decoder = parameters.bind(graphdef, params)
  hidden = decoder.hidden(batch.tokens, batch.positions, batch.segment_ids)
  return token_logprobs.token_logprobs(
    hidden,
    decoder.output_matrix(),
    batch.tokens,
    batch.action_mask,
    batch.kept_ids,
    temperature=temperature,
    chunk_tokens=chunk_tokens,
  ).logprobs


def _rows(batch: types.PackedBatch) -> dict[str, jax.Array]:
  return {name: getattr(batch, name) for name in row_devices.PER_TOKEN}


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
  microbatches: int,
  state: state_lib.LearnerState,
  batch: types.PackedBatch,
) -> tuple[state_lib.LearnerState, dict[str, jax.Array]]:
  """Standardizes once, then scans the minibatches."""
  merge = lambda x: jnp.concatenate(x, axis=0)  # [M, B, ...] to [M B, ...]
  whole = batch._replace(**{k: merge(v) for k, v in _rows(batch).items()})
  advantages = objective.advantages(whole)
  # With one optimizer step the proximal policy is the current one, and an
  # uncut minibatch takes it from the loss's own forward pass.
  fused = batch.tokens.shape[0] == 1 and microbatches == 1
  proximal = None if fused else _map_rows(logprobs, state.params, batch)
  gradient = functools.partial(
    _gradient, logprobs, objective, microbatches, advantages
  )

  def step(state, inputs):
    rows, proximal = inputs
    part, sums, grads = gradient(state.params, batch._replace(**rows), proximal)
    loss = _divide(sums.numerator, sums.denominator)
    grads = jax.tree.map(lambda g: _divide(g, sums.denominator), grads)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    state, skipped = _apply(optimizer, state, grads, finite, sums.denominator)
    return state, (part, sums, grad_norm, skipped)

  state, (parts, sums, grad_norms, skipped) = jax.lax.scan(
    step, state, (_rows(batch), proximal)
  )
  weights = parts.weights._replace(
    **{k: merge(v) for k, v in _per_token(parts.weights).items()},
    tokens=parts.weights.tokens.sum(),
  )
  metrics = {
    k: _divide(v.sum(), weights.tokens) for k, v in sums.metrics.items()
  }
  metrics |= {k: v.mean() for k, v in parts.metrics.items()}
  metrics |= objective.diagnostics(
    whole, advantages, merge(parts.proximal), weights
  )
  metrics['loss'] = _divide(sums.numerator.sum(), sums.denominator.sum())
  metrics['grad_norm'] = grad_norms.mean()
  metrics['skipped_update'] = skipped.sum()
  metrics['skipped_in_a_row'] = state.skipped_in_a_row
  return state, metrics


class _Constants(NamedTuple):
  """What is detached in a minibatch's loss, and the metrics of making it."""

  proximal: jax.Array
  weights: objectives.Weights
  metrics: objectives.Metrics


class _Sums(NamedTuple):
  """What adds up over microbatches."""

  numerator: jax.Array
  denominator: jax.Array
  metrics: objectives.Metrics


def _gradient(
  logprobs: Callable,
  objective: objectives.Objective,
  microbatches: int,
  advantages: jax.Array,
  params: parameters.Parameters,
  minibatch: types.PackedBatch,
  proximal: jax.Array | None,
) -> tuple[_Constants, _Sums, parameters.Parameters]:
  """Returns constants, sums and the gradient of the numerator.

  `proximal` None takes it from the one forward pass of an uncut minibatch.
  """

  def constants(proximal):
    weights, metrics = objective.weights(minibatch, proximal, advantages)
    return _Constants(proximal, weights, metrics)

  def sums(params, rows, part):
    cut = minibatch._replace(**rows)
    current = logprobs(params, cut)
    if part is None:
      part = constants(jax.lax.stop_gradient(current))
    totals = _Sums(*objective.loss(current, cut, advantages, part.weights))
    return totals.numerator, (part, totals)

  value_and_grad = jax.value_and_grad(sums, has_aux=True)
  if proximal is None:
    (_, aux), grads = value_and_grad(params, _rows(minibatch), None)
    return *aux, grads

  part = constants(proximal)

  def of_microbatch(inputs):
    rows, per_token = inputs
    weights = part.weights._replace(**per_token)
    (_, (_, totals)), grads = value_and_grad(
      params, rows, part._replace(weights=weights)
    )
    return totals, grads

  cuts = jax.tree.map(
    lambda x: jnp.stack(jnp.split(x, microbatches)),
    (_rows(minibatch), _per_token(part.weights)),
  )
  shapes = jax.eval_shape(of_microbatch, jax.tree.map(lambda x: x[0], cuts))
  total, _ = jax.lax.scan(
    lambda total, cut: (jax.tree.map(jnp.add, total, of_microbatch(cut)), None),
    jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
    cuts,
  )
  return part, *total


def _per_token(weights: objectives.Weights) -> dict[str, jax.Array]:
  return {k: v for k, v in weights._asdict().items() if k != 'tokens'}


def _divide(numerator: jax.Array, count: jax.Array) -> jax.Array:
  """Returns numerator / count; 0 / 0 is 0."""
  return numerator / jnp.where(count > 0, count, 1)


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
