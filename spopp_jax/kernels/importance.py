"""Ratios between policies and the detached weights made of them.

Three policies matter: behaviour (generated the tokens), proximal (the learner
at the start of the step) and current. The rollout weight is proximal over
behaviour, and the surrogate's ratio current over proximal, so that their
product counts the step from behaviour to current once.
"""

import math

import chex
import jax
import jax.numpy as jnp

from spopp_jax import types
from spopp_jax.kernels import segments


def log_ratio(
  numerator_logprobs: types.Array,
  denominator_logprobs: types.Array,
  mask: types.Array,
) -> types.Array:
  """Returns log(numerator policy / denominator policy) at counted tokens.

  Masked slots are cleared before the subtraction: whatever they hold (NaN,
  inf) reaches neither the value nor the gradient.

  Args:
    numerator_logprobs: [B, S] float, nats.
    denominator_logprobs: [B, S] float, nats.
    mask: [B, S] bool; counted tokens.

  Returns:
    [B, S] float32 nats; 0 outside the mask.
  """
  chex.assert_rank([numerator_logprobs, denominator_logprobs, mask], 2)
  chex.assert_equal_shape([numerator_logprobs, denominator_logprobs, mask])
  chex.assert_type(
    [numerator_logprobs, denominator_logprobs, mask], [float, float, bool]
  )
  numerator = jnp.where(mask, numerator_logprobs, 0).astype(jnp.float32)
  denominator = jnp.where(mask, denominator_logprobs, 0).astype(jnp.float32)
  return numerator - denominator


def truncate(log_weights: types.Array, *, cap: float) -> types.Array:
  """Returns min(exp(log_weights), cap), detached.

  The minimum is taken in log space, so no log weight overflows and none is
  clamped from below. Example: cap 2 maps log weights [0, 1, -0.7] to
  [1, 2, 0.4966].

  Args:
    log_weights: [...] float32 nats.
    cap: > 0; upper truncation.

  Returns:
    [...] float32 in [0, cap].
  """
  chex.assert_type(log_weights, float)
  log_cap = math.log(cap)
  return jax.lax.stop_gradient(
    jnp.where(
      log_weights > log_cap, cap, jnp.exp(jnp.minimum(log_weights, log_cap))
    )
  )


def sequence_log_weights(
  log_ratios: types.Array,
  mask: types.Array,
  trajectory_ids: types.Array,
  *,
  num_trajectories: int,
) -> types.Array:
  """Sums the log-ratios of each trajectory: log of the sequence ratio.

  Args:
    log_ratios: [B, S] float32 nats.
    mask: [B, S] bool; counted tokens.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.
    num_trajectories: N, static.

  Returns:
    [N] float32 nats, never clamped; 0 for a trajectory without tokens.
  """
  return segments.trajectory_sums(
    log_ratios, mask, trajectory_ids, num_trajectories=num_trajectories
  )
