"""Sequence-level ratios of GSPO (2507.18071) and GEPO (2508.17850).

Both feed `surrogate.clipped_surrogate` as its current log-probs, with zeros
for the proximal ones and without a dual clip.
"""

import chex
import jax
import jax.numpy as jnp

from spopp_jax import types
from spopp_jax.kernels import importance, segments


def token_form_log_ratios(
  log_ratios: types.Array,
  mask: types.Array,
  trajectory_ids: types.Array,
  *,
  num_trajectories: int,
) -> types.Array:
  """Gives every token its trajectory's log-ratio, its gradient to itself.

    log s_it = sg(mean_i l) + l_it - sg(l_it)

  In value each token has the GSPO ratio s_i = exp(mean_i l); in gradient token
  t has s_i d l_it, so that with seq_mean_token_mean the loss has GSPO's
  gradient, and tokens may carry advantages of their own. Example: l = [.3,
  -.1, .2] has log s = .1333 at all three tokens, s = 1.1426.

  Args:
    log_ratios: [B, S] float32 nats; current over proximal.
    mask: [B, S] bool; counted tokens.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.
    num_trajectories: N, static.

  Returns:
    [B, S] float32 nats; 0 outside the mask.
  """
  means = importance.sequence_mean_log_ratios(
    log_ratios, mask, trajectory_ids, num_trajectories=num_trajectories
  )
  own = jnp.where(mask, log_ratios, 0).astype(jnp.float32)
  shared = jax.lax.stop_gradient(segments.to_tokens(means, trajectory_ids))
  return jnp.where(mask, shared, 0) + (own - jax.lax.stop_gradient(own))


def group_expectations(
  behaviour_logprobs: types.Array,
  group_ids: types.Array,
  usable: types.Array,
  *,
  num_groups: int,
) -> types.Array:
  """Returns the log of each prompt group's expected behaviour probability.

    log E_i = LSE_j(2 log q_j) - LSE_j(log q_j), j over the group of i

  The probability of a member, weighted by itself. Groups go by id, wherever
  their members stand, and lie whole on one device. Example: two members with
  q = [.5, .25] have E = (.25 + .0625) / .75 = .4167.

  Args:
    behaviour_logprobs: [N] float32 nats; log q of each trajectory.
    group_ids: [N] int32 in [0, G]; trajectories of one prompt share it, G is
      padding.
    usable: [N] bool; the others join no group and are not read.
    num_groups: G, static.

  Returns:
    [N] float32 nats, detached; 0 where not usable and at padding.
  """
  chex.assert_rank([behaviour_logprobs, group_ids, usable], 1)
  chex.assert_equal_shape([behaviour_logprobs, group_ids, usable])
  chex.assert_type([behaviour_logprobs, group_ids, usable], [float, int, bool])
  usable = usable & (group_ids < num_groups)
  behaviour = jnp.where(usable, behaviour_logprobs, -jnp.inf)
  behaviour = jax.lax.stop_gradient(behaviour.astype(jnp.float32))

  def of_members(per_group):
    return jnp.take(per_group, group_ids, mode='fill', fill_value=0)

  peaks = jax.ops.segment_max(behaviour, group_ids, num_segments=num_groups)
  peaks = jnp.where(usable, of_members(peaks), 0)
  relative = jnp.exp(behaviour - peaks)

  def group_total(values):
    totals = jax.ops.segment_sum(values, group_ids, num_segments=num_groups)
    return jnp.where(usable, of_members(totals), 1)

  expectations = (
    peaks + jnp.log(group_total(relative**2)) - jnp.log(group_total(relative))
  )
  return jnp.where(usable, expectations, 0)


def group_expectation_log_weights(
  *,
  current_logprobs: types.Array,
  behaviour_logprobs: types.Array,
  mask: types.Array,
  trajectory_ids: types.Array,
  group_ids: types.Array,
  usable: types.Array,
  num_groups: int,
  length_normalize: bool = True,
) -> types.Array:
  """Returns GEPO's log weights: learner over the group's expectation.

    log w_i = log p_i - log E_i, the denominator detached

  Sequence log-probs are means over tokens (as its authors' code has it) or
  sums (as the paper has it). w differs from 1 even for p = q, unless all q of
  the group are equal. Example: the means log p = [-.45, -.8, -.35, -.6] and
  log q = [-.5, -.7, -.4, -.9] give w = [1.131, .797, 1.250, .973].

  Args:
    current_logprobs: [B, S] float, nats; p, differentiable.
    behaviour_logprobs: [B, S] float, nats; q.
    mask: [B, S] bool; counted tokens.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.
    group_ids: [N] int32 in [0, G]; trajectories of one prompt share it, G is
      padding.
    usable: [N] bool; the others join no group.
    num_groups: G, static.
    length_normalize: means over tokens instead of sums.

  Returns:
    [N] float32 nats, never clamped; 0 for trajectories that are not usable or
    have no counted tokens.
  """
  num_trajectories = usable.shape[0]
  lengths = segments.trajectory_lengths(
    mask, trajectory_ids, num_trajectories=num_trajectories
  )
  usable = usable & (lengths > 0)
  scale = 1 / jnp.maximum(lengths, 1) if length_normalize else 1.0

  def sequence(logprobs):
    sums = segments.trajectory_sums(
      logprobs, mask, trajectory_ids, num_trajectories=num_trajectories
    )
    return sums * scale

  expectations = group_expectations(
    sequence(behaviour_logprobs), group_ids, usable, num_groups=num_groups
  )
  usable = usable & (group_ids < num_groups)
  return jnp.where(usable, sequence(current_logprobs), 0) - expectations
