"""Surrogates per token: PPO with dual clip (SPO++ section 2.4) and CISPO."""

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
) -> Surrogate:
  """Computes the clipped loss, then caps it at -c A where A is negative.

    r = exp(current - proximal)
    clipped = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
    loss = min(clipped, -c A) where A < 0, else clipped

  Example: A = -1, r = 10, c = 2 gives 2; A = 1, r = 10, clip_high = .2 gives
  -1.2. Gradient flows through `current_logprobs` alone.

  Args:
    current_logprobs: [B, S] float, nats; the policy being differentiated.
    proximal_logprobs: [B, S] float, nats; the policy at the step's start.
    advantages: [B, S] float32; each token's advantage.
    mask: [B, S] bool; counted tokens, the others are not read.
    clip_low: [0, 1); how far r may fall.
    clip_high: >= 0; how far r may rise.
    dual_clip: c > 1; None switches the dual clip off.

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

  free = -advantages * ratio
  held = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  loss = jnp.maximum(free, held)
  dual_clipped = jnp.zeros_like(mask)
  if dual_clip is not None:
    ceiling = -dual_clip * advantages
    dual_clipped = (advantages < 0) & (loss > ceiling)
    loss = jnp.where(advantages < 0, jnp.minimum(loss, ceiling), loss)
  return Surrogate(
    loss=loss,
    ratio=jnp.where(mask, ratio, 0),
    clipped=held > free,
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
