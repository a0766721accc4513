"""Qwen3.5's text decoder: most layers a gated delta net, some gated attention.

A gated delta net keeps one matrix S a head instead of keys and values:

  S_t = a_t S_{t-1} + k_t u_t^T,  u_t = b_t (v_t - (a_t S_{t-1})^T k_t)
  o_t = S_t^T q_t

with a decay a_t and a rate b_t of the token (Yang et al., arXiv:2412.06464).
Queries, keys and values pass a short causal convolution first.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from spopp_jax.models import delta_rule, dense, layers

LINEAR, FULL = 'linear_attention', 'full_attention'


@dataclasses.dataclass(frozen=True)
class Config(dense.DecoderConfig):
  """Sizes of a decoder, named as in Hugging Face's config.json.

  Attributes:
    layer_types: linear_attention or full_attention a layer.
    partial_rotary_factor: share of a head's dimensions that is rotated.
    linear_conv_kernel_dim: tokens that the convolution sees.
    linear_num_key_heads: heads of queries and keys in a delta net.
    linear_num_value_heads: heads of values; a multiple of the former.
    linear_key_head_dim: width of a query and a key.
    linear_value_head_dim: width of a value.
  """

  norm_offset: ClassVar[float] = 1.0
  caches_can_be_cut: ClassVar[bool] = False
  gated_attention: ClassVar[bool] = True

  layer_types: tuple[str, ...] = ()
  partial_rotary_factor: float = 0.25
  linear_conv_kernel_dim: int = 4
  linear_num_key_heads: int = 16
  linear_num_value_heads: int = 16
  linear_key_head_dim: int = 128
  linear_value_head_dim: int = 128

  def __post_init__(self):
    super().__post_init__()
    if self.rope_scaling is not None or not self.qk_norm:
      raise ValueError('Qwen3.5 has no rope_scaling and normalizes q and k')
    if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
      raise ValueError(
        f'partial_rotary_factor ({self.partial_rotary_factor}) must rotate an '
        f'even number of the {self.head_dim} dimensions of a head'
      )
    strange = set(self.layer_types) - {LINEAR, FULL}
    if strange or len(self.layer_types) != self.num_hidden_layers:
      raise ValueError(
        f'layer_types {self.layer_types} must name {LINEAR} or {FULL} for each '
        f'of {self.num_hidden_layers} layers'
      )
    if self.linear_num_value_heads % self.linear_num_key_heads:
      raise ValueError(
        f'linear_num_value_heads ({self.linear_num_value_heads}) must be a '
        f'multiple of linear_num_key_heads ({self.linear_num_key_heads})'
      )

  @property
  def rotary_dim(self) -> int:
    """How many of the first dimensions of a head are rotated."""
    return int(self.head_dim * self.partial_rotary_factor)

  @property
  def key_width(self) -> int:
    """Width of all keys of a token in a delta net."""
    return self.linear_num_key_heads * self.linear_key_head_dim

  @property
  def value_width(self) -> int:
    """Width of all values of a token in a delta net."""
    return self.linear_num_value_heads * self.linear_value_head_dim

  def mixer(self, layer: int, rngs: nnx.Rngs) -> tuple[str, dense.Mixer]:
    """Returns the name and the module by which a layer mixes tokens."""
    if self.layer_types[layer] == FULL:
      return super().mixer(layer, rngs)
    return 'linear_attn', GatedDeltaNet(self, rngs=rngs)

  def empty_cache(
    self,
    layer: int,
    batch: int,
    pieces: Sequence[int],
    dtype: jax.typing.DTypeLike,
  ) -> dense.Cache:
    """Returns the zeroed cache of a layer."""
    if self.layer_types[layer] == FULL:
      return super().empty_cache(layer, batch, pieces, dtype)
    mixed = 2 * self.key_width + self.value_width
    widths = (self.linear_key_head_dim, self.linear_value_head_dim)
    return DeltaCache(
      jnp.zeros((batch, self.linear_conv_kernel_dim - 1, mixed), dtype),
      jnp.zeros((batch, self.linear_num_value_heads, *widths)),
    )


class DeltaCache(NamedTuple):
  """What a delta net keeps of a sequence; it cannot be cut back.

  Attributes:
    inputs: [B, K - 1, C]; the convolution's last inputs.
    state: [B, H, Dk, Dv] float32; the matrix S.
  """

  inputs: jax.Array
  state: jax.Array


class GatedDeltaNet(nnx.Module):
  """The delta rule over packed rows or a cache; weights named as in files."""

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    c = config
    self.config = config
    mixed = 2 * c.key_width + c.value_width
    linear = lambda width: layers.Linear(c.hidden_size, width, rngs=rngs)
    self.in_proj_qkv = linear(mixed)
    self.in_proj_z = linear(c.value_width)
    self.in_proj_b = linear(c.linear_num_value_heads)
    self.in_proj_a = linear(c.linear_num_value_heads)
    self.conv1d = Convolution(mixed, c.linear_conv_kernel_dim, rngs=rngs)
    decay = jax.random.uniform(
      rngs.params(), (c.linear_num_value_heads,), minval=0.01, maxval=16.0
    )
    self.A_log = nnx.Param(jnp.log(decay))
    self.dt_bias = nnx.Param(jnp.ones((c.linear_num_value_heads,)))
    self.norm = layers.RMSNorm(c.linear_value_head_dim, epsilon=c.rms_norm_eps)
    self.out_proj = layers.Linear(
      c.value_width,
      c.hidden_size,
      rngs=rngs,
      scale=(2 * c.num_hidden_layers) ** -0.5,
    )

  def __call__(
    self,
    hidden: jax.Array,
    context: dense.Context,
    cache: DeltaCache | None,
  ) -> tuple[jax.Array, DeltaCache | None]:
    """Mixes the tokens of each segment, or goes on from the cache.

    Args:
      hidden: [B, S, D] float.
      context: tells segments, and with a cache the tokens that are there.
      cache: the layer's cache, or None.

    Returns:
      [B, S, D] float and the cache after the last token that is there.
    """
    c = self.config
    batch, length, _ = hidden.shape
    mixed = self.in_proj_qkv(hidden)
    before = None if cache is None else _of_rows(cache, context)
    convolved = self.conv1d(
      mixed, context.segment_ids, None if before is None else before.inputs
    )
    queries, keys, values = jnp.split(
      jax.nn.silu(convolved).astype(jnp.float32),
      (c.key_width, 2 * c.key_width),
      axis=-1,
    )
    heads = lambda x, width: x.reshape(batch, length, -1, width)
    rates = jax.nn.sigmoid(self.in_proj_b(hidden).astype(jnp.float32))
    steps = self.in_proj_a(hidden).astype(jnp.float32)
    steps = jax.nn.softplus(steps + _row(self.dt_bias))
    log_decays = -jnp.exp(_row(self.A_log)) * steps
    outputs, state = delta_rule.delta_rule(
      layers.unit_length(heads(queries, c.linear_key_head_dim))
      * c.linear_key_head_dim**-0.5,
      layers.unit_length(heads(keys, c.linear_key_head_dim)),
      heads(values, c.linear_value_head_dim),
      log_decays=log_decays,
      rates=rates,
      segment_ids=context.segment_ids,
      state=None if before is None else before.state,
    )
    gates = heads(self.in_proj_z(hidden), c.linear_value_head_dim)
    outputs = self.norm(outputs) * jax.nn.silu(gates.astype(jnp.float32))
    outputs = outputs.astype(hidden.dtype).reshape(batch, length, -1)
    if cache is not None:
      assert before is not None
      after = DeltaCache(
        _last_inputs(before.inputs, mixed, context.segment_ids), state
      )
      cache = _put_rows(cache, after, context.rows)
    return self.out_proj(outputs), cache


class Convolution(nnx.Module):
  """A causal convolution a channel; `weight` is [C, 1, K] as in files."""

  def __init__(self, channels: int, width: int, *, rngs: nnx.Rngs):
    self.weight = nnx.Param(
      width**-0.5 * jax.random.normal(rngs.params(), (channels, 1, width))
    )

  def __call__(
    self,
    inputs: jax.Array,
    segment_ids: jax.Array,
    before: jax.Array | None,
  ) -> jax.Array:
    """Maps [B, S, C]; a token sees at most the K - 1 before it.

    Args:
      inputs: [B, S, C] float.
      segment_ids: [B, S] int32; a token sees its own segment alone.
      before: [B, K - 1, C] inputs ahead of the first, in the segment of all, or
        None.
    """
    weight = self.weight[...]
    length, width = inputs.shape[1], weight.shape[-1]
    if before is None:
      before = jnp.zeros((len(inputs), width - 1, inputs.shape[-1]))
      ids = jnp.pad(segment_ids, ((0, 0), (width - 1, 0)), constant_values=-1)
    else:
      ids = jnp.pad(segment_ids, ((0, 0), (width - 1, 0)), mode='edge')
    padded = jnp.concatenate([before.astype(inputs.dtype), inputs], axis=1)
    total = jnp.zeros(inputs.shape, jnp.float32)
    for i in range(width):
      same = ids[:, i : i + length] == segment_ids
      seen = jnp.where(same[:, :, None], padded[:, i : i + length], 0)
      total += seen * weight[None, None, :, 0, i]
    return total.astype(inputs.dtype)


def _row(parameter: nnx.Param) -> jax.Array:
  """Returns a parameter a head as [1, 1, H] float32."""
  return parameter[...].astype(jnp.float32)[None, None]


def _of_rows(cache: DeltaCache, context: dense.Context) -> DeltaCache:
  """Returns the sequences' part of the cache; zeros where one starts."""
  starts = context.positions[:, 0] == 0
  rows = context.rows

  def take(array):
    array = array if rows is None else array[rows]
    fresh = starts.reshape(-1, *[1] * (array.ndim - 1))
    return jnp.where(fresh, 0, array)

  return jax.tree.map(take, cache)


def _put_rows(
  cache: DeltaCache, after: DeltaCache, rows: jax.Array | None
) -> DeltaCache:
  after = jax.tree.map(lambda new, old: new.astype(old.dtype), after, cache)
  if rows is None:
    return after
  return jax.tree.map(
    lambda new, old: old.at[rows].set(new, mode='drop'), after, cache
  )


def _last_inputs(
  before: jax.Array, inputs: jax.Array, is_there: jax.Array
) -> jax.Array:
  """Returns the K - 1 inputs up to the last token there: [B, K - 1, C]."""
  padded = jnp.concatenate([before.astype(inputs.dtype), inputs], axis=1)
  count = is_there.sum(axis=1, dtype=jnp.int32)
  index = count[:, None] + jnp.arange(before.shape[1])[None]
  return jnp.take_along_axis(padded, index[:, :, None], axis=1)
