"""The learner's step as a function: advantages once, then the minibatches."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from spopp_jax import types
from spopp_jax.learner import state as state_lib
from spopp_jax.models import mesh, parameters
from spopp_jax.objectives import base as objectives


def _rows(batch: types.PackedBatch) -> dict[str, jax.Array]:
  return {name: getattr(batch, name) for name in mesh.PER_TOKEN}


def map_rows(
  logprobs: Callable, params: parameters.Parameters, batch: types.PackedBatch
) -> jax.Array:
  """Applies `logprobs` to one minibatch after another: [M, B, S]."""
  return jax.lax.map(
    lambda rows: logprobs(params, batch._replace(**rows)), _rows(batch)
  )


def update(
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
  proximal = None if fused else map_rows(logprobs, state.params, batch)
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
