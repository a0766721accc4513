"""What the learner carries from update to update."""

from typing import NamedTuple

import jax
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
