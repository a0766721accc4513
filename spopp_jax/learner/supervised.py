"""Supervised steps on demonstrated episodes: the cold start's arithmetic."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spopp_jax import types
from spopp_jax.learner import forward
from spopp_jax.learner import state as state_lib
from spopp_jax.models import dense, parameters


class SupervisedLearner:
  """Minimizes the mean cross-entropy of action tokens over packed rows."""

  def __init__(
    self,
    config: dense.DecoderConfig,
    optimizer: optax.GradientTransformation,
  ):
    self._optimizer = optimizer
    graphdef, _ = parameters.graph(config)
    logprobs = functools.partial(
      forward.packed_logprobs, graphdef, forward.Settings()
    )
    self._update = jax.jit(
      functools.partial(_update, logprobs, optimizer), donate_argnums=0
    )

  def init(self, params: Mapping[str, Any]) -> state_lib.LearnerState:
    """Returns the state before the first step; copies the parameters."""
    return state_lib.initial(params, self._optimizer)

  def update(
    self, state: state_lib.LearnerState, batch: types.PackedBatch
  ) -> tuple[state_lib.LearnerState, jax.Array]:
    """Takes one step on rows [1, B, S]; returns the mean loss in nats."""
    rows = jax.tree.map(lambda x: x[0] if x.ndim >= 3 else x, batch)
    return self._update(state, rows)


def _update(logprobs, optimizer, state, batch):
  count = jnp.maximum(batch.action_mask.sum(), 1)
  loss = lambda params: -logprobs(params, batch).sum() / count
  value, grads = jax.value_and_grad(loss)(state.params)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  return state._replace(
    params=optax.apply_updates(state.params, updates),
    opt_state=opt_state,
    updates=state.updates + 1,
  ), value
