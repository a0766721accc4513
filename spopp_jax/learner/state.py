"""What the learner carries from update to update."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spopp_jax.models import parameters


class LearnerState(NamedTuple):
  """A device pytree, donated to every update.

  Attributes:
    params: the policy's parameters by name, float32.
    opt_state: optax state.
    updates: [] int32; optimizer steps applied.
    skipped_in_a_row: [] int32; updates refused one after another because the
      loss or the gradient was not finite.
  """

  params: parameters.Parameters
  opt_state: optax.OptState
  updates: jax.Array
  skipped_in_a_row: jax.Array


def initial(
  params: Mapping[str, Any], optimizer: optax.GradientTransformation
) -> LearnerState:
  """Returns the state before the first update; copies the parameters."""
  copies = {k: jnp.array(v, jnp.float32) for k, v in params.items()}
  return LearnerState(
    params=copies,
    opt_state=optimizer.init(copies),
    updates=jnp.int32(0),
    skipped_in_a_row=jnp.int32(0),
  )
