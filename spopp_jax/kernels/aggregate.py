"""Token losses to a numerator and a count; nothing here divides."""

import chex
import jax.numpy as jnp

from spopp_jax import types
from spopp_jax.kernels import segments


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


def token_sum(
  values: types.Array,
  mask: types.Array,
  *,
  total_tokens: types.Array | None = None,
) -> tuple[types.Array, types.Array]:
  """Returns the sum over counted tokens; the counts of all parts make 1.

  Example: values [[1, 2, 9]], mask [[T, T, F]] gives (3, 1), and (3, 0.5) as
  a part of 4 counted tokens.

  Args:
    values: [B, S] float; not read outside the mask.
    mask: [B, S] bool; counted tokens.
    total_tokens: [] number of counted tokens of all microbatches and devices;
      None if this batch is all.

  Returns:
    numerator [] float32 and count [] float32, this part's share of the
    tokens; (0, 0) if nothing counts.
  """
  numerator, tokens = token_mean(values, mask)
  total = tokens if total_tokens is None else total_tokens
  return numerator, tokens / jnp.maximum(total, 1)


def seq_mean_token_sum(
  values: types.Array,
  mask: types.Array,
  trajectory_ids: types.Array,
  *,
  num_trajectories: int,
) -> tuple[types.Array, types.Array]:
  """Returns the sums for the mean over trajectories of their token sums.

  Only trajectories with a counted token count. Microbatches and devices must
  hold whole trajectories (their rows may differ). Example: values [[1, 2, 5]],
  all counted, ids [[0, 0, 1]] gives (8, 2).

  Args:
    values: [B, S] float; not read outside the mask.
    mask: [B, S] bool; counted tokens.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.
    num_trajectories: N, static.

  Returns:
    numerator [] float32 and count [] float32; (0, 0) if nothing counts.
  """
  sums, lengths = _trajectories(values, mask, trajectory_ids, num_trajectories)
  return jnp.sum(sums), jnp.sum(lengths > 0, dtype=jnp.float32)


def seq_mean_token_sum_norm(
  values: types.Array,
  mask: types.Array,
  trajectory_ids: types.Array,
  *,
  num_trajectories: int,
  norm: float,
) -> tuple[types.Array, types.Array]:
  """Returns the sums for `seq_mean_token_sum` over a constant (Dr. GRPO).

  Example: values [[1, 2, 5]], all counted, ids [[0, 0, 1]], norm 4 gives
  (8, 8).

  Args:
    values: [B, S] float; not read outside the mask.
    mask: [B, S] bool; counted tokens.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.
    num_trajectories: N, static.
    norm: > 0, static; usually the largest allowed length, in tokens.

  Returns:
    numerator [] float32 and count [] float32; (0, 0) if nothing counts.

  Raises:
    ValueError: norm is not positive.
  """
  if not norm > 0:
    raise ValueError(f'norm ({norm}) must be positive')
  numerator, count = seq_mean_token_sum(
    values, mask, trajectory_ids, num_trajectories=num_trajectories
  )
  return numerator, count * norm


def seq_mean_token_mean(
  values: types.Array,
  mask: types.Array,
  trajectory_ids: types.Array,
  *,
  num_trajectories: int,
) -> tuple[types.Array, types.Array]:
  """Returns the sums for the mean over trajectories of their token means.

  Only trajectories with a counted token count. Microbatches and devices must
  hold whole trajectories. Example: values [[1, 2, 5]], all counted, ids
  [[0, 0, 1]] gives (6.5, 2).

  Args:
    values: [B, S] float; not read outside the mask.
    mask: [B, S] bool; counted tokens. Keep rejected tokens in the mask with
      value 0 to leave the denominators as they were.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.
    num_trajectories: N, static.

  Returns:
    numerator [] float32 and count [] float32; (0, 0) if nothing counts.
  """
  sums, lengths = _trajectories(values, mask, trajectory_ids, num_trajectories)
  means = sums / jnp.maximum(lengths, 1)
  return jnp.sum(means), jnp.sum(lengths > 0, dtype=jnp.float32)


def _trajectories(values, mask, trajectory_ids, num_trajectories):
  """Token sums [N] and counted tokens [N] of each trajectory."""
  sums = segments.trajectory_sums(
    values, mask, trajectory_ids, num_trajectories=num_trajectories
  )
  lengths = segments.trajectory_lengths(
    mask, trajectory_ids, num_trajectories=num_trajectories
  )
  return sums, lengths
