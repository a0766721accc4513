"""Layers that the decoders share; weights have Hugging Face's layout."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spopp_jax.models import mesh


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
    return mesh.by_words(self.weight[...])[tokens]

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


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How Llama 3 stretches the rotary frequencies to longer contexts.

  A frequency whose wavelength is above L / low is divided by the factor, one
  below L / high stays, L being the context trained on first; in between the two
  are blended.

  Attributes:
    factor: > 1.
    low_freq_factor: low.
    high_freq_factor: high, above low.
    original_max_position_embeddings: L, in tokens.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int

  def __post_init__(self):
    values = dataclasses.asdict(self)
    for name, value in values.items():
      if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f'rope_scaling.{name} ({value!r}) must be positive')
    if self.high_freq_factor <= self.low_freq_factor:
      raise ValueError(
        f'rope_scaling.high_freq_factor ({self.high_freq_factor}) must be '
        f'above low_freq_factor ({self.low_freq_factor})'
      )


def rotary_frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> np.ndarray:
  """Returns theta^(-2i/D), scaled if asked: [D/2] float32, radians a position.

  Args:
    head_dim: D, even.
    theta: base.
    scaling: of Llama 3.
  """
  half = head_dim // 2
  frequencies = theta ** (-np.arange(half, dtype=np.float64) / half)
  if scaling is not None:
    s = scaling
    turns = s.original_max_position_embeddings * frequencies / (2 * np.pi)
    kept = (turns - s.low_freq_factor) / (
      s.high_freq_factor - s.low_freq_factor
    )
    kept = np.clip(kept, 0, 1)
    frequencies = frequencies * (kept + (1 - kept) / s.factor)
  return frequencies.astype(np.float32)


def rotary(
  inputs: jax.Array, positions: jax.Array, frequencies: np.ndarray
) -> jax.Array:
  """Rotates head vectors by their positions (half-split pairing).

  Args:
    inputs: [B, S, H, D] float; D even.
    positions: [B, S] int32.
    frequencies: [D/2] float32, radians a position.

  Returns:
    [B, S, H, D] in the dtype of `inputs`.
  """
  chex.assert_rank([inputs, positions], [4, 2])
  angle = positions[:, :, None, None] * frequencies[None, None, None, :]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  first, second = jnp.split(inputs.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  ).astype(inputs.dtype)
