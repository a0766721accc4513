"""Layers that the decoders share; weights have Hugging Face's layout."""

import math

import chex
import jax
import jax.numpy as jnp
from flax import nnx


class Linear(nnx.Module):
  """y = x W^T without bias; `weight` is [out, in] as in safetensors files."""

  def __init__(
    self,
    in_features: int,
    out_features: int,
    *,
    rngs: nnx.Rngs,
    scale: float = 1.0,
  ):
    stddev = scale / math.sqrt(in_features)
    self.weight = nnx.Param(
      stddev * jax.random.normal(rngs.params(), (out_features, in_features))
    )

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Maps [..., in] to [..., out]."""
    # One 2-D product: XLA's CPU back end is 1.4 times slower on 3-D operands.
    flat = inputs.reshape(-1, inputs.shape[-1])
    outputs = flat @ self.weight[...].T
    return outputs.reshape(*inputs.shape[:-1], outputs.shape[-1])


class Embedding(nnx.Module):
  """Token embedding [V, D] that also serves as a tied output matrix."""

  def __init__(self, vocab_size: int, features: int, *, rngs: nnx.Rngs):
    self.weight = nnx.Param(
      jax.random.normal(rngs.params(), (vocab_size, features))
      / math.sqrt(features)
    )

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Maps [...] int32 ids to [..., D]."""
    return self.weight[...][tokens]

  def attend(self, hidden: jax.Array) -> jax.Array:
    """Maps [..., D] to float32 logits [..., V]."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    logits = jnp.matmul(
      flat, self.weight[...].T, preferred_element_type=jnp.float32
    )
    return logits.reshape(*hidden.shape[:-1], logits.shape[-1])


class RMSNorm(nnx.Module):
  """x / rms(x) * weight, computed in float32."""

  def __init__(self, features: int, *, epsilon: float):
    self.weight = nnx.Param(jnp.ones((features,)))
    self.epsilon = epsilon

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Normalizes the last axis."""
    x = inputs.astype(jnp.float32)
    x = x * jax.lax.rsqrt(
      jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon
    )
    weight = jnp.broadcast_to(self.weight[...], x.shape)
    return (x * weight).astype(inputs.dtype)


def rotary(inputs: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
  """Rotates head vectors by their positions (half-split pairing).

  Args:
    inputs: [B, S, H, D] float; D even.
    positions: [B, S] int32.
    theta: base of the frequencies theta^(-2i/D).

  Returns:
    [B, S, H, D] in the dtype of `inputs`.
  """
  chex.assert_rank([inputs, positions], [4, 2])
  half = inputs.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[:, :, None, None] * frequency[None, None, None, :]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  first, second = jnp.split(inputs.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  ).astype(inputs.dtype)
