"""Sequence-level ratios of GSPO (2507.18071) and GEPO (2508.17850).

Both are a log-ratio of whole trajectories that every token carries: GSPO's
against the proximal or behaviour policy, GEPO's against what the prompt group
expects. `token_form_log_ratios` feeds `surrogate.clipped_surrogate` as its
current log-probs, with zeros for the proximal ones.
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
  length_normalize: bool = True,
) -> types.Array:
  """Gives every token its trajectory's log-ratio, its gradient to itself.

    log s_it = sg(mean_i l) + l_it - sg(l_it)         (GSPO)
    log s_it = sg(sum_i l) + L_i (l_it - sg(l_it))    length_normalize=False

  In value each token has the ratio s_i = exp(mean_i l) (or of the sum), so
  tokens may carry advantages of their own; with seq_mean_token_mean the loss
  has the gradient of the same loss of s_i. Example: l = [.3, -.1, .2] has
  log s = .1333 at all three tokens, s = 1.1426.

  Args:
    log_ratios: [B, S] float32 nats; current over what it is compared with.
    mask: [B, S] bool; counted tokens.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.
    num_trajectories: N, static.
    length_normalize: means over tokens instead of sums, static.

  Returns:
    [B, S] float32 nats; 0 outside the mask.
  """
  means = importance.sequence_mean_log_ratios(
    log_ratios, mask, trajectory_ids, num_trajectories=num_trajectories
  )
  own = jnp.where(mask, log_ratios, 0).astype(jnp.float32)
  shared, gain = segments.to_tokens(means, trajectory_ids), jnp.float32(1)
  if not length_normalize:
    lengths = segments.trajectory_lengths(
      mask, trajectory_ids, num_trajectories=num_trajectories
    )
    gain = segments.to_tokens(lengths, trajectory_ids)
  shared = jax.lax.stop_gradient(jnp.where(mask, shared, 0))
  return gain * (shared + (own - jax.lax.stop_gradient(own)))


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
  usable = usable & (group_ids >= 0) & (group_ids < num_groups)
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


def group_expectation_logprobs(
  behaviour_logprobs: types.Array,
  *,
  mask: types.Array,
  trajectory_ids: types.Array,
  group_ids: types.Array,
  usable: types.Array,
  num_groups: int,
  length_normalize: bool = True,
) -> types.Array:
  """Returns GEPO's denominator as a log-prob of every token, detached.

  The learner's log-probs less these, averaged over a trajectory's tokens (as
  its authors' code has it) or summed (as the paper has it), are GEPO's

    log w_i = log p_i - log E_i

  with E of `group_expectations`, log p and log q being means or sums alike.
  w differs from 1 even for p = q, unless all q of the group are equal.
  Example: the means log p = [-.45, -.8, -.35, -.6] and log q = [-.5, -.7, -.4,
  -.9] give w = [1.131, .797, 1.250, .973].

  Args:
    behaviour_logprobs: [B, S] float, nats; q.
    mask: [B, S] bool; counted tokens, the others are not read.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.
    group_ids: [N] int32 in [0, G]; trajectories of one prompt share it, G is
      padding.
    usable: [N] bool; the others join no group.
    num_groups: G, static.
    length_normalize: means over tokens instead of sums, static.

  Returns:
    [B, S] float32 nats: log E_i, over L_i for sums; 0 outside the mask and
    for trajectories of no group, which must not count.
  """
  num_trajectories = usable.shape[0]
  lengths = segments.trajectory_lengths(
    mask, trajectory_ids, num_trajectories=num_trajectories
  )
  share = 1 / jnp.maximum(lengths, 1)
  sums = segments.trajectory_sums(
    behaviour_logprobs,
    mask,
    trajectory_ids,
    num_trajectories=num_trajectories,
  )
  expectations = group_expectations(
    sums * share if length_normalize else sums,
    group_ids,
    usable & (lengths > 0),
    num_groups=num_groups,
  )
  per_token = expectations if length_normalize else expectations * share
  return jnp.where(mask, segments.to_tokens(per_token, trajectory_ids), 0)
