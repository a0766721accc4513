"""Token losses to a numerator and a count; nothing here divides."""

import chex
import jax.numpy as jnp

from spopp_jax import types


def token_mean(
  values: types.Array, mask: types.Array
) -> tuple[types.Array, types.Array]:
  """Returns the two sums whose quotient is the mean over counted tokens.

  Both sums stay on the device: add them (and the gradient of the numerator)
  over microbatches and devices first and divide once. A psum in here would
  scale the gradient by the number of devices.

  Example: values [[1, 2, 9]], mask [[T, T, F]] gives (3, 2).

  Args:
    values: [B, S] float; not read outside the mask.
    mask: [B, S] bool; counted tokens.

  Returns:
    numerator [] float32 and count [] float32; (0, 0) if nothing counts.
  """
  chex.assert_rank([values, mask], 2)
  chex.assert_equal_shape([values, mask])
  chex.assert_type(mask, bool)
  numerator = jnp.sum(jnp.where(mask, values, 0), dtype=jnp.float32)
  return numerator, jnp.sum(mask, dtype=jnp.float32)
