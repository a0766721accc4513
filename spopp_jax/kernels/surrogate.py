"""Surrogates per token: PPO with dual clip (SPO++ section 2.4) and CISPO."""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from spopp_jax import types
from spopp_jax.kernels import importance

# exp(20) times any advantage stays finite in float32, gradient included.
_LOG_RATIO_BOUND = 20.0


class Surrogate(NamedTuple):
  """Per-token surrogate and what it did; all 0 or False outside the mask.

  Attributes:
    loss: [B, S] float32; differentiable in the current log-probs.
    ratio: [B, S] float32; current over proximal.
    clipped: [B, S] bool; the clip range decided; under PPO: A > 0 and ratio
      above it, or A < 0 and ratio below it.
    dual_clipped: [B, S] bool; the dual clip decided: A < 0 and ratio above c.
    k1: [B, S] float32 nats; -log ratio.
    k3: [B, S] float32 nats; ratio - 1 - log ratio.
  """

  loss: types.Array
  ratio: types.Array
  clipped: types.Array
  dual_clipped: types.Array
  k1: types.Array
  k3: types.Array


def clipped_surrogate(
  *,
  current_logprobs: types.Array,
  proximal_logprobs: types.Array,
  advantages: types.Array,
  mask: types.Array,
  clip_low: float,
  clip_high: float,
  dual_clip: float | None,
  region_logprobs: types.Array | None = None,
) -> Surrogate:
  """Computes the clipped loss, then caps it at -c A where A is negative.

    r = exp(current - proximal)
    clipped = -A (1 + clip_high) where A > 0 and r > 1 + clip_high
              -A (1 - clip_low)  where A < 0 and r < 1 - clip_low
              -A r               elsewhere
    loss = min(clipped, -c A) where A < 0, else clipped

  The first step is max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); with
  `region_logprobs` the ratio that may leave the range is against that policy
  instead, and r carries the gradient inside it. clip_low = 1 and clip_high =
  inf clip nothing. Example: A = -1, r = 10, c = 2 gives 2; A = 1, r = 10,
  clip_high = .2 gives -1.2. Gradient flows through `current_logprobs` alone.

  Args:
    current_logprobs: [B, S] float, nats; the policy being differentiated.
    proximal_logprobs: [B, S] float, nats; the policy at the step's start.
    advantages: [B, S] float32; each token's advantage.
    mask: [B, S] bool; counted tokens, the others are not read.
    clip_low: [0, 1]; how far the judged ratio may fall.
    clip_high: >= 0; how far the judged ratio may rise.
    dual_clip: c > 1; None switches the dual clip off.
    region_logprobs: [B, S] float, nats; the policy whose ratio is judged;
      None is the proximal one.

  Returns:
    The surrogate and its diagnostics.
  """
  log_ratio = importance.log_ratio(
    current_logprobs, jax.lax.stop_gradient(proximal_logprobs), mask
  )
  chex.assert_equal_shape([advantages, mask])
  advantages = jax.lax.stop_gradient(
    jnp.where(mask, advantages, 0).astype(jnp.float32)
  )
  bounded = jnp.clip(log_ratio, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
  ratio = jnp.exp(bounded)

  judged = jax.lax.stop_gradient(ratio)
  if region_logprobs is not None:
    distance = importance.log_ratio(current_logprobs, region_logprobs, mask)
    judged = jax.lax.stop_gradient(
      jnp.exp(jnp.clip(distance, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND))
    )
  above = (advantages > 0) & (judged > 1 + clip_high)
  below = (advantages < 0) & (judged < 1 - clip_low)
  loss = -advantages * ratio
  ceiling = 1 + clip_high if math.isfinite(clip_high) else 0  # 0 * inf is NaN
  loss = jnp.where(above, -advantages * ceiling, loss)
  loss = jnp.where(below, -advantages * (1 - clip_low), loss)
  dual_clipped = jnp.zeros_like(mask)
  if dual_clip is not None:
    worst = -dual_clip * advantages
    dual_clipped = (advantages < 0) & (loss > worst)
    loss = jnp.where(dual_clipped, worst, loss)
  return Surrogate(
    loss=loss,
    ratio=jnp.where(mask, ratio, 0),
    clipped=above | below,
    dual_clipped=dual_clipped,
    k1=-log_ratio,
    k3=jnp.expm1(bounded) - bounded,
  )


def weighted_likelihood(
  *,
  current_logprobs: types.Array,
  proximal_logprobs: types.Array,
  advantages: types.Array,
  mask: types.Array,
  clip_low: float,
  clip_high: float,
) -> Surrogate:
  """Computes CISPO's loss: the clip bounds a constant, no gradient is lost.

    loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log current

  `clipped` says where the clip changed the constant, whatever A's sign. Both
  bounds are relative to 1, clip_low = 1 being none. Example: A = 1, r =
  exp(.3), clip_high = .2, log current = -1 gives 1.2 with gradient -1.2.

  Args:
    current_logprobs: [B, S] float, nats; the policy being differentiated.
    proximal_logprobs: [B, S] float, nats; the policy at the step's start.
    advantages: [B, S] float32; each token's advantage.
    mask: [B, S] bool; counted tokens, the others are not read.
    clip_low: [0, 1]; how far r may fall.
    clip_high: >= 0; how far r may rise.

  Returns:
    The surrogate; nothing is dual clipped.
  """
  log_ratio = jax.lax.stop_gradient(
    importance.log_ratio(current_logprobs, proximal_logprobs, mask)
  )
  chex.assert_equal_shape([advantages, mask])
  advantages = jax.lax.stop_gradient(
    jnp.where(mask, advantages, 0).astype(jnp.float32)
  )
  bounded = jnp.clip(log_ratio, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
  ratio = jnp.exp(bounded)
  weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  current = jnp.where(mask, current_logprobs, 0).astype(jnp.float32)
  return Surrogate(
    loss=-weight * advantages * current,
    ratio=jnp.where(mask, ratio, 0),
    clipped=weight != ratio,
    dual_clipped=jnp.zeros_like(mask),
    k1=-log_ratio,
    k3=jnp.expm1(bounded) - bounded,
  )
