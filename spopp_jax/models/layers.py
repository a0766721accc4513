"""Layers that the decoders share; weights have Hugging Face's layout."""

import dataclasses
import math
from typing import NamedTuple

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


def logits(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
  """Maps [..., D] by the rows of [V, D] to float32 logits [..., V]."""
  flat = hidden.reshape(-1, hidden.shape[-1])
  result = jnp.matmul(flat, matrix.T, preferred_element_type=jnp.float32)
  return result.reshape(*hidden.shape[:-1], result.shape[-1])


class RMSNorm(nnx.Module):
  """x / rms(x) * (offset + weight), computed in float32; first x / rms(x)."""

  def __init__(self, features: int, *, epsilon: float, offset: float = 0.0):
    self.weight = nnx.Param(jnp.full((features,), 1.0 - offset))
    self.epsilon = epsilon
    self.offset = offset

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Normalizes the last axis."""
    x = inputs.astype(jnp.float32)
    x = x * jax.lax.rsqrt(
      jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon
    )
    weight = self.weight[...].astype(jnp.float32) + self.offset
    # Of one row: broadcast, it would be kept whole for the gradient.
    return (x * weight.reshape(*(1,) * (x.ndim - 1), -1)).astype(inputs.dtype)


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
  rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> np.ndarray:
  """Returns theta^(-2i/R), scaled if asked: [R/2] float32, radians a position.

  Args:
    rotary_dim: R, even; dimensions of a head that are rotated.
    theta: base.
    scaling: of Llama 3.
  """
  half = rotary_dim // 2
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


class Rotation(NamedTuple):
  """By which angles tokens are rotated: [..., R/2] float32 each."""

  cos: jax.Array
  sin: jax.Array


def rotation(positions: jax.Array, frequencies: np.ndarray) -> Rotation:
  """Returns that of positions [...] by frequencies [R/2], radians each."""
  turns = (1,) * positions.ndim
  angle = positions[..., None] * frequencies.reshape(*turns, -1)
  return Rotation(jnp.cos(angle), jnp.sin(angle))


def rotary(inputs: jax.Array, by: Rotation) -> jax.Array:
  """Rotates the first R of the D dimensions of heads (half-split pairing).

  Args:
    inputs: [B, S, H, D] float.
    by: of the tokens [B, S].

  Returns:
    [B, S, H, D] in the dtype of `inputs`.
  """
  chex.assert_rank([inputs, by.cos, by.sin], [4, 3, 3])
  cos, sin = by.cos[:, :, None], by.sin[:, :, None]
  x, half = inputs.astype(jnp.float32), cos.shape[-1]
  first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin, rest], axis=-1
  ).astype(inputs.dtype)


def unit_length(inputs: jax.Array) -> jax.Array:
  """Returns x / sqrt(x . x + 1e-6) along the last axis."""
  square = jnp.sum(jnp.square(inputs), axis=-1, keepdims=True)
  return inputs * jax.lax.rsqrt(square + 1e-6)
