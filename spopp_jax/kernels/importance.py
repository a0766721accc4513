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


def in_window(
  log_weights: types.Array, *, low: float, high: float
) -> types.Array:
  """Returns where low <= exp(log_weights) <= high.

  The bounds move to log space, the weights are never exponentiated: a weight
  beyond float32 is judged rightly, and the window is on the ratio itself, not
  on its inverse. Example: window [0.6, 1.4] keeps the ratios 0.65 and 1.3 of
  [0.5, 0.65, 1.3, 1.5]. NaN is outside every window.

  Args:
    log_weights: [...] float32 nats, of tokens or of trajectories.
    low: >= 0; 0 is no lower bound.
    high: > low; inf is no upper bound.

  Returns:
    [...] bool.

  Raises:
    ValueError: if not 0 <= low < high.
  """
  if not 0 <= low < high:
    raise ValueError(
      f'window [{low}, {high}] must hold 0 <= low < high: bounds are ratios, '
      'not log ratios'
    )
  chex.assert_type(log_weights, float)
  log_low = math.log(low) if low > 0 else -math.inf
  return (log_weights >= log_low) & (log_weights <= math.log(high))


def icepop(log_weights: types.Array, *, low: float, high: float) -> types.Array:
  """Returns the weight inside the window and 0 outside it, detached.

  w = exp(log_weights) if low <= w <= high else 0. With low 0 this is the
  masked form of the decoupled weight, `truncate` being its capped form. The
  denominator of the loss stays the count of all tokens. Example: window
  [0.5, 2] maps the weights [1.2, 2.7, 0.4] to [1.2, 0, 0].

  Args:
    log_weights: [...] float32 nats.
    low: >= 0; 0 is no lower bound.
    high: > low, finite.

  Returns:
    [...] float32 in {0} and [low, high].

  Raises:
    ValueError: if not 0 <= low < high < inf.
  """
  if not high < math.inf:
    raise ValueError(f'high ({high}) must be finite: it bounds the weights')
  kept = in_window(log_weights, low=low, high=high)
  weights = jnp.exp(jnp.where(kept, log_weights, 0))
  return jax.lax.stop_gradient(jnp.where(kept, weights, 0))


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


def sequence_mean_log_ratios(
  log_ratios: types.Array,
  mask: types.Array,
  trajectory_ids: types.Array,
  *,
  num_trajectories: int,
) -> types.Array:
  """Averages the log-ratios of each trajectory over its counted tokens.

    mean_i = sum_t l_it / L_i = log of the geometric mean of the token ratios

  Example: token ratios [10, 0.1] have mean log ratio 0, geometric mean 1.

  Args:
    log_ratios: [B, S] float32 nats.
    mask: [B, S] bool; counted tokens.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.
    num_trajectories: N, static.

  Returns:
    [N] float32 nats, differentiable; 0 for a trajectory without tokens.
  """
  sums = sequence_log_weights(
    log_ratios, mask, trajectory_ids, num_trajectories=num_trajectories
  )
  lengths = segments.trajectory_lengths(
    mask, trajectory_ids, num_trajectories=num_trajectories
  )
  return sums / jnp.maximum(lengths, 1)


def geometric_mean_mask(
  log_ratios: types.Array,
  mask: types.Array,
  trajectory_ids: types.Array,
  *,
  num_trajectories: int,
  low: float,
  high: float,
) -> types.Array:
  """Keeps whole trajectories whose geometric mean ratio is in the window.

  The filter's statistic and the token weight are separate: combine as
  `jnp.where(kept, truncate(log_ratios, cap=...), 0)`. Example: token ratios
  [10, 0.1] pass the window [0.5, 2], and cap 2 gives the weights [2, 0.1].

  Args:
    log_ratios: [B, S] float32 nats; proximal over behaviour.
    mask: [B, S] bool; counted tokens.
    trajectory_ids: [B, S] int32 in [0, N]; N is padding.
    num_trajectories: N, static.
    low: >= 0; smallest geometric mean kept.
    high: > low; largest geometric mean kept.

  Returns:
    [B, S] bool; False outside `mask`.

  Raises:
    ValueError: if not 0 <= low < high.
  """
  means = sequence_mean_log_ratios(
    log_ratios, mask, trajectory_ids, num_trajectories=num_trajectories
  )
  return segments.counted_tokens(
    mask, trajectory_ids, in_window(means, low=low, high=high)
  )


def proximal_coefficients(
  behaviour_versions: types.Array, current_version: types.Array
) -> types.Array:
  """Returns how far A-3PO moves the proximal policy towards the current one.

    a = clip((v - 1 - v_b) / (v - v_b), 0, 1); 0 where v_b >= v or v_b < 0

  Example: at version 10, tokens of versions [7, 9, 10] get [2 / 3, 0, 0].

  Args:
    behaviour_versions: [...] int32; version that generated each token, -1
      where no policy did.
    current_version: [] int32; version being trained.

  Returns:
    [...] float32 in [0, 1).
  """
  chex.assert_type([behaviour_versions, current_version], int)
  lags = jnp.asarray(current_version) - jnp.asarray(behaviour_versions)
  stale = (lags > 1) & (jnp.asarray(behaviour_versions) >= 0)
  lags = jnp.where(stale, lags, 1).astype(jnp.float32)
  return (lags - 1) / lags


def interpolated_proximal(
  *,
  behaviour_logprobs: types.Array,
  current_logprobs: types.Array,
  coefficients: types.Array,
  mask: types.Array,
) -> types.Array:
  """Approximates the proximal log-probs without a forward pass (A-3PO).

    log prox = log behave + a (sg(log current) - log behave)

  Example: behave -2, current -1, a = 2 / 3 gives -4 / 3.

  Args:
    behaviour_logprobs: [B, S] float, nats.
    current_logprobs: [B, S] float, nats.
    coefficients: [B, S] float32; a, from `proximal_coefficients`.
    mask: [B, S] bool; counted tokens, the others are not read.

  Returns:
    [B, S] float32 nats, detached; 0 outside the mask.
  """
  ratio = log_ratio(current_logprobs, behaviour_logprobs, mask)
  chex.assert_equal_shape([coefficients, mask])
  behaviour = jnp.where(mask, behaviour_logprobs, 0).astype(jnp.float32)
  coefficients = jnp.where(mask, coefficients, 0)
  return jax.lax.stop_gradient(behaviour + coefficients * ratio)
