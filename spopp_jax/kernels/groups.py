"""Arrangement of trajectories into groups, by id and never by position.

A group holds the rollouts of one prompt. Groups may be incomplete, their
members may stand anywhere in the batch, and the id G marks padding.
"""

import chex
import jax
import jax.numpy as jnp

from spopp_jax import types


def to_groups(
  values: types.Array,
  group_ids: types.Array,
  usable: types.Array,
  *,
  num_groups: int,
  group_size: int,
) -> tuple[types.Array, types.Array]:
  """Gathers the usable members of each group into one row.

  Members keep their order of appearance; free slots follow them. Example:
  values [1, 2, 3], ids [1, 0, 1], all usable, G = K = 2 gives
  [[2, 0], [1, 3]] with validity [[T, F], [T, T]].

  Args:
    values: [N] float or bool; not read where unusable.
    group_ids: [N] int32 in [0, G]; G is padding.
    usable: [N] bool; False leaves the member out.
    num_groups: G, static.
    group_size: K, static; the largest group must fit: further members of a
      full group get no slot. N always fits.

  Returns:
    [G, K] values in their own dtype, 0 in free slots, and [G, K] bool, True
    where a member stands.
  """
  chex.assert_rank(values, 1)
  slots = _slots(group_ids, usable, num_groups, group_size)
  free = jnp.zeros((num_groups * group_size,), jnp.asarray(values).dtype)
  grouped = free.at[slots].set(values, mode='drop')
  valid = jnp.zeros_like(free, bool).at[slots].set(True, mode='drop')
  shape = (num_groups, group_size)
  return grouped.reshape(shape), valid.reshape(shape)


def from_groups(
  grouped: types.Array, group_ids: types.Array, usable: types.Array
) -> types.Array:
  """Gives each trajectory back the value of its slot: undoes `to_groups`.

  Args:
    grouped: [G, K] float or bool.
    group_ids: [N] int32, as given to `to_groups`.
    usable: [N] bool, as given to `to_groups`.

  Returns:
    [N] in the dtype of `grouped`; 0 for members without a slot.
  """
  chex.assert_rank(grouped, 2)
  slots = _slots(group_ids, usable, *grouped.shape)
  return jnp.take(grouped.reshape(-1), slots, mode='fill', fill_value=0)


def _slots(group_ids, usable, num_groups, group_size):
  """Index [N] of each member in the flattened [G, K]; G K without a slot."""
  chex.assert_rank([group_ids, usable], 1)
  chex.assert_equal_shape([group_ids, usable])
  chex.assert_type([group_ids, usable], [int, bool])
  ids = jnp.where(usable & (group_ids >= 0), group_ids, num_groups)
  ids = jnp.minimum(ids, num_groups)
  order = jnp.argsort(ids, stable=True)
  sizes = jax.ops.segment_sum(
    jnp.ones_like(ids), ids, num_segments=num_groups + 1
  )
  first = jnp.cumsum(sizes) - sizes
  sorted_ranks = jnp.arange(ids.shape[0]) - first[ids[order]]
  ranks = jnp.zeros_like(sorted_ranks).at[order].set(sorted_ranks)
  placed = (ids < num_groups) & (ranks < group_size)
  return jnp.where(placed, ids * group_size + ranks, num_groups * group_size)
