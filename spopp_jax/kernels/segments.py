"""Quantities per trajectory of packed rows, by id and never by position.

A trajectory may span rows; rows hold several trajectories. The id N marks
padding: it receives nothing and gives nothing. Under a mapped axis every
device holds whole trajectories with ids of its own, so nothing is reduced
here.
"""

import chex
import jax
import jax.numpy as jnp

from spopp_jax import types


def counted_tokens(
  action_mask: types.Array, trajectory_ids: types.Array, usable: types.Array
) -> types.Array:
  """Returns the one mask that lengths, statistics and loss read.

  Args:
    action_mask: [B, S] bool; True where the policy sampled the token.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.
    usable: [N] bool; False for trajectories that must not count.

  Returns:
    [B, S] bool; True on action tokens of usable trajectories.
  """
  chex.assert_rank([action_mask, trajectory_ids, usable], [2, 2, 1])
  chex.assert_equal_shape([action_mask, trajectory_ids])
  chex.assert_type([action_mask, trajectory_ids, usable], [bool, int, bool])
  return action_mask & jnp.take(
    usable, trajectory_ids, mode='fill', fill_value=False
  )


def trajectory_sums(
  values: types.Array,
  mask: types.Array,
  trajectory_ids: types.Array,
  *,
  num_trajectories: int,
) -> types.Array:
  """Sums the counted tokens of each trajectory in float32.

  Example: values [[1, 2, 5]], mask [[T, T, F]], ids [[0, 1, 1]], N = 3 gives
  [1, 2, 0].

  Args:
    values: [B, S] float; whatever stands outside the mask is not read.
    mask: [B, S] bool.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.
    num_trajectories: N, static.

  Returns:
    [N] float32; 0 for a trajectory without counted tokens.
  """
  chex.assert_rank([values, mask, trajectory_ids], 2)
  chex.assert_equal_shape([values, mask, trajectory_ids])
  chex.assert_type([mask, trajectory_ids], [bool, int])
  counted = jnp.where(mask, values, 0).astype(jnp.float32)
  return jax.ops.segment_sum(
    counted.reshape(-1),
    trajectory_ids.reshape(-1),
    num_segments=num_trajectories,
  )


def trajectory_lengths(
  mask: types.Array, trajectory_ids: types.Array, *, num_trajectories: int
) -> types.Array:
  """Counts L_i, the counted tokens of each trajectory.

  Args:
    mask: [B, S] bool.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.
    num_trajectories: N, static.

  Returns:
    [N] float32; exact up to 2**24 tokens a trajectory.
  """
  return trajectory_sums(
    mask, mask, trajectory_ids, num_trajectories=num_trajectories
  )


def to_tokens(
  per_trajectory: types.Array, trajectory_ids: types.Array
) -> types.Array:
  """Gives every token the value of its trajectory.

  Args:
    per_trajectory: [N] float.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.

  Returns:
    [B, S] in the dtype of `per_trajectory`; 0 at padding.
  """
  chex.assert_rank([per_trajectory, trajectory_ids], [1, 2])
  chex.assert_type(trajectory_ids, int)
  return jnp.take(per_trajectory, trajectory_ids, mode='fill', fill_value=0)
