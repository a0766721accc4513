"""Advantages against the rollouts of the same prompt (GRPO and relatives).

Groups are ids; they may be incomplete and their members may stand anywhere.
Under a mapped axis ids are global: the members of one group may sit on
several devices.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from spopp_jax import types

_EPSILON = 1e-6


def group_advantages(
  rewards: types.Array,
  group_ids: types.Array,
  usable: types.Array,
  *,
  num_groups: int,
  scale: bool = True,
  leave_one_out: bool = False,
  axis_name: str | None = None,
) -> types.Array:
  """Centres each reward on its group and scales by the group's deviation.

    A_i = (R_i - mean) / (std + 1e-6), std with divisor n - 1   (GRPO)
    A_i = R_i - mean                                scale=False (Dr. GRPO)
    A_i = (R_i - mean) n / (n - 1)      leave_one_out, no scale (RLOO)

  n counts usable members. Two passes in float32. |A_i| stays below
  (n - 1) / sqrt(n) for GRPO. Example: rewards [1, 0, 0, 0] of one group give
  [1.5, -0.5, -0.5, -0.5] with scale, [0.75, -0.25, -0.25, -0.25] without, and
  [1, -1/3, -1/3, -1/3] for RLOO.

  Args:
    rewards: [N] float; not read where unusable.
    group_ids: [N] int32 in [0, G]; G is padding.
    usable: [N] bool; False leaves the member out of its group.
    num_groups: G, static.
    scale: divide by the deviation.
    leave_one_out: the baseline is the mean of the other members.
    axis_name: mapped axis that the trajectories are spread over, if any.

  Returns:
    [N] float32; exactly 0 in groups of equal rewards, hence of one member,
    and for the unusable.
  """
  rewards, ids, counted = _members(rewards, group_ids, usable, num_groups)

  def total(values):
    sums = jax.ops.segment_sum(values, ids, num_segments=num_groups)
    return sums if axis_name is None else jax.lax.psum(sums, axis_name)

  number = total(counted.astype(jnp.float32))
  mean = total(rewards) / jnp.maximum(number, 1)
  centred = jnp.where(counted, rewards - _give(mean, ids), 0)
  factor = jnp.ones_like(number)
  if scale:
    variance = total(centred**2) / jnp.maximum(number - 1, 1)
    factor = factor / (jnp.sqrt(variance) + _EPSILON)
  if leave_one_out:
    factor = factor * number / jnp.maximum(number - 1, 1)
  smallest, largest = _extremes(rewards, ids, num_groups, axis_name)
  # Equal rewards leave a rounding residual that scaling would blow up.
  factor = jnp.where(largest > smallest, factor, 0)
  return centred * _give(factor, ids)


def in_varied_group(
  rewards: types.Array,
  group_ids: types.Array,
  usable: types.Array,
  *,
  num_groups: int,
  axis_name: str | None = None,
) -> types.Array:
  """Returns who belongs to a group with unequal rewards (DAPO keeps these).

  Example: rewards [1, 1, 0, 1], ids [0, 0, 1, 1] gives [F, F, T, T].

  Args:
    rewards: [N] float; not read where unusable.
    group_ids: [N] int32 in [0, G]; G is padding.
    usable: [N] bool; False leaves the member out of its group.
    num_groups: G, static.
    axis_name: mapped axis that the trajectories are spread over, if any.

  Returns:
    [N] bool; False for the unusable and for groups of one member.
  """
  rewards, ids, counted = _members(rewards, group_ids, usable, num_groups)
  smallest, largest = _extremes(rewards, ids, num_groups, axis_name)
  return counted & _give(largest > smallest, ids)


class GroupCounts(NamedTuple):
  """Numbers of groups, to be added over batches and then divided.

  Attributes:
    groups: [] float32; groups with a usable member.
    equal: [] float32; of these, with equal rewards: no signal.
    all_zero: [] float32; of these, where every reward is 0.
    all_one: [] float32; of these, where every reward is 1.
  """

  groups: types.Array
  equal: types.Array
  all_zero: types.Array
  all_one: types.Array


def group_counts(
  rewards: types.Array,
  group_ids: types.Array,
  usable: types.Array,
  *,
  num_groups: int,
  axis_name: str | None = None,
) -> GroupCounts:
  """Counts groups that carry no signal; batches must hold whole groups.

  Example: rewards [1, 1, 0, 1], ids [0, 0, 1, 1] gives 2 groups, 1 equal, 0
  all zero, 1 all one.

  Args:
    rewards: [N] float; not read where unusable.
    group_ids: [N] int32 in [0, G]; G is padding.
    usable: [N] bool; False leaves the member out of its group.
    num_groups: G, static.
    axis_name: mapped axis that the trajectories are spread over, if any.

  Returns:
    The counts, the same on every device of the mapped axis.
  """
  rewards, ids, _ = _members(rewards, group_ids, usable, num_groups)
  smallest, largest = _extremes(rewards, ids, num_groups, axis_name)
  equal = smallest == largest

  def count(chosen):
    return jnp.sum(chosen, dtype=jnp.float32)

  return GroupCounts(
    groups=count(smallest <= largest),
    equal=count(equal),
    all_zero=count(equal & (largest == 0)),
    all_one=count(equal & (largest == 1)),
  )


def _members(rewards, group_ids, usable, num_groups):
  """Rewards (0 where not counted), ids (G where not counted), who counts."""
  chex.assert_rank([rewards, group_ids, usable], 1)
  chex.assert_equal_shape([rewards, group_ids, usable])
  chex.assert_type([rewards, group_ids, usable], [float, int, bool])
  counted = usable & (group_ids >= 0) & (group_ids < num_groups)
  rewards = jnp.where(counted, rewards, 0).astype(jnp.float32)
  rewards = jax.lax.stop_gradient(rewards)
  return rewards, jnp.where(counted, group_ids, num_groups), counted


def _extremes(rewards, ids, num_groups, axis_name):
  """Smallest and largest reward [G]; +inf and -inf without a member."""
  smallest = jax.ops.segment_min(rewards, ids, num_segments=num_groups)
  largest = jax.ops.segment_max(rewards, ids, num_segments=num_groups)
  if axis_name is None:
    return smallest, largest
  return (
    jax.lax.pmin(smallest, axis_name),
    jax.lax.pmax(largest, axis_name),
  )


def _give(per_group, ids):
  """Gives every member the value of its group; 0 outside."""
  return jnp.take(per_group, ids, mode='fill', fill_value=0)
