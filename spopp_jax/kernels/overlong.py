"""The soft penalty of responses that near the length limit (DAPO)."""

import jax.numpy as jnp

from spopp_jax import types


def soft_overlong_penalty(
  lengths: types.Array, *, limit: float, buffer: float
) -> types.Array:
  """Returns what is added to the reward of a long response.

    0                                where length <= limit - buffer
    (limit - buffer - length) / buffer   in between
    -1                               where length > limit

  Example: limit 20480, buffer 4096 gives [0, -0.25, -1] for the lengths
  [16384, 17408, 20481].

  Args:
    lengths: [N] float32; generated tokens of each trajectory.
    limit: > 0, tokens; the longest response that is allowed.
    buffer: in (0, limit], tokens before the limit in which the penalty grows.

  Returns:
    [N] float32 in [-1, 0].

  Raises:
    ValueError: if not 0 < buffer <= limit.
  """
  if not 0 < buffer <= limit:
    raise ValueError(f'buffer ({buffer}) must lie in (0, limit ({limit})]')
  return jnp.clip((limit - buffer - lengths) / buffer, -1, 0)
