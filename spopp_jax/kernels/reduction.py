"""Sums and maxima over a batch that may be spread over devices."""

import jax
import jax.numpy as jnp

from spopp_jax import types


def global_sum(
  values: types.Array, *, axis_name: str | None = None
) -> types.Array:
  """Sums all entries in float32, then over the mapped axis.

  Args:
    values: [...] any dtype; entries that do not count are already 0.
    axis_name: mapped axis of an enclosing shard_map or pmap; None under jit on
      global arrays.

  Returns:
    [] float32.
  """
  total = jnp.sum(values, dtype=jnp.float32)
  return total if axis_name is None else jax.lax.psum(total, axis_name)


def global_max(
  values: types.Array, *, axis_name: str | None = None
) -> types.Array:
  """Returns the largest entry over the batch and the mapped axis.

  Args:
    values: [...] float32; entries that do not count hold a lower bound.
    axis_name: as in `global_sum`.

  Returns:
    [] float32.
  """
  largest = jnp.max(values)
  return largest if axis_name is None else jax.lax.pmax(largest, axis_name)
