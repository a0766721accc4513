"""Dense decoders, Qwen3 and Llama: grouped queries, rotary, SwiGLU.

Qwen3 normalizes queries and keys, Llama does not; SmolLM2 is a Llama.

Parameter paths equal the Hugging Face names (`model.layers.0.self_attn.
q_proj.weight`), so saving and loading safetensors is a rename.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from spopp_jax.models import attention, layers, mesh


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Sizes of a decoder, named as in Hugging Face's config.json.

  Attributes:
    vocab_size: rows of the embedding.
    hidden_size: width D of the residual stream.
    num_hidden_layers: blocks.
    num_attention_heads: query heads; a multiple of num_key_value_heads.
    num_key_value_heads: key and value heads.
    head_dim: width of a head, even.
    intermediate_size: width of the SwiGLU.
    rope_theta: base of the rotary frequencies.
    rms_norm_eps: epsilon inside the root of every RMSNorm.
    tie_word_embeddings: the output matrix is the embedding.
    qk_norm: queries and keys are normalized a head (Qwen3), or not (Llama).
    rope_scaling: of Llama 3; None is none.
  """

  vocab_size: int
  hidden_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  intermediate_size: int
  rope_theta: float = 10_000.0
  rms_norm_eps: float = 1e-6
  tie_word_embeddings: bool = True
  qk_norm: bool = True
  rope_scaling: layers.RopeScaling | None = None

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name == 'rope_scaling':
        continue
      allowed: tuple[Any, ...] = (
        (int, float) if field.type is float else (field.type,)
      )
      if type(value) not in allowed:
        names = ' or '.join(kind.__name__ for kind in allowed)
        raise ValueError(f'{field.name} ({value!r}) must be {names}')
      if field.type is not bool and value <= 0:
        raise ValueError(f'{field.name} ({value}) must be positive')
    if self.num_attention_heads % self.num_key_value_heads:
      raise ValueError(
        f'num_attention_heads ({self.num_attention_heads}) must be a multiple '
        f'of num_key_value_heads ({self.num_key_value_heads})'
      )
    if self.head_dim % 2:
      raise ValueError(f'head_dim ({self.head_dim}) must be even')


def config_from(values: Mapping[str, Any]) -> DecoderConfig:
  """Returns the sizes that `dataclasses.asdict` gave, also after JSON.

  Raises:
    TypeError, ValueError: they are no sizes of a decoder.
  """
  scaling = values.get('rope_scaling')
  if scaling is not None:
    values = {**values, 'rope_scaling': layers.RopeScaling(**scaling)}
  return DecoderConfig(**values)


class KVCache(NamedTuple):
  """Keys and values of one layer: [B, T, KV, D] each, index = position."""

  keys: jax.Array
  values: jax.Array


class Attention(nnx.Module):
  """Causal grouped-query attention over packed rows or a cache."""

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    c = config
    self.config = config
    queries = c.num_attention_heads * c.head_dim
    keys = c.num_key_value_heads * c.head_dim
    self.q_proj = layers.Linear(c.hidden_size, queries, rngs=rngs)
    self.k_proj = layers.Linear(c.hidden_size, keys, rngs=rngs)
    self.v_proj = layers.Linear(c.hidden_size, keys, rngs=rngs)
    self.o_proj = layers.Linear(
      queries,
      c.hidden_size,
      rngs=rngs,
      scale=(2 * c.num_hidden_layers) ** -0.5,
    )
    if c.qk_norm:
      self.q_norm = layers.RMSNorm(c.head_dim, epsilon=c.rms_norm_eps)
      self.k_norm = layers.RMSNorm(c.head_dim, epsilon=c.rms_norm_eps)

  def __call__(
    self,
    hidden: jax.Array,
    positions: jax.Array,
    visible: attention.Visible,
    cache: KVCache | None,
  ) -> tuple[jax.Array, KVCache | None]:
    """Attends within the row, or to the cache after writing to it.

    Args:
      hidden: [B, S, D] float.
      positions: [B, S] int32; also the index in the cache. Positions at or
        above the cache's length are not written.
      visible: which keys a query sees.
      cache: the layer's cache, or None.

    Returns:
      [B, S, D] float and the cache with the new keys and values.
    """
    c = self.config
    batch, length, _ = hidden.shape
    split = lambda x: x.reshape(batch, length, -1, c.head_dim)
    queries = split(self.q_proj(hidden))
    keys = split(self.k_proj(hidden))
    values = split(self.v_proj(hidden))
    if c.qk_norm:
      queries, keys = self.q_norm(queries), self.k_norm(keys)
    frequencies = layers.rotary_frequencies(
      c.head_dim, c.rope_theta, c.rope_scaling
    )
    queries = layers.rotary(queries, positions, frequencies)
    keys = layers.rotary(keys, positions, frequencies)
    if cache is not None:
      rows = jnp.arange(batch)[:, None]
      cache = KVCache(
        cache.keys.at[rows, positions].set(keys, mode='drop'),
        cache.values.at[rows, positions].set(values, mode='drop'),
      )
      keys = cache.keys[:, : visible.mask.shape[-1]]
      values = cache.values[:, : visible.mask.shape[-1]]
    attended = attention.attend(queries, keys, values, visible)
    return self.o_proj(attended.reshape(batch, length, -1)), cache


class MLP(nnx.Module):
  """SwiGLU: down(silu(gate(x)) * up(x))."""

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    c = config
    self.gate_proj = layers.Linear(
      c.hidden_size, c.intermediate_size, rngs=rngs
    )
    self.up_proj = layers.Linear(c.hidden_size, c.intermediate_size, rngs=rngs)
    self.down_proj = layers.Linear(
      c.intermediate_size,
      c.hidden_size,
      rngs=rngs,
      scale=(2 * c.num_hidden_layers) ** -0.5,
    )

  def __call__(self, hidden: jax.Array) -> jax.Array:
    """Maps [B, S, D] to [B, S, D]."""
    return self.down_proj(
      jax.nn.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
    )


class Block(nnx.Module):
  """Pre-norm attention and SwiGLU, each with a residual."""

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    norm = lambda: layers.RMSNorm(
      config.hidden_size, epsilon=config.rms_norm_eps
    )
    self.input_layernorm = norm()
    self.self_attn = Attention(config, rngs=rngs)
    self.post_attention_layernorm = norm()
    self.mlp = MLP(config, rngs=rngs)

  def __call__(self, hidden, positions, visible, cache):
    """Applies the block; shapes as in `Attention`."""
    attended, cache = self.self_attn(
      self.input_layernorm(hidden), positions, visible, cache
    )
    hidden = hidden + attended
    return hidden + self.mlp(self.post_attention_layernorm(hidden)), cache


class Trunk(nnx.Module):
  """Embedding, blocks and the final norm."""

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    self.embed_tokens = layers.Embedding(
      config.vocab_size, config.hidden_size, rngs=rngs
    )
    self.layers = nnx.List(
      [Block(config, rngs=rngs) for _ in range(config.num_hidden_layers)]
    )
    self.norm = layers.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps)

  def __call__(self, tokens, positions, visible, caches):
    """Maps [B, S] tokens to [B, S, D] hidden states and the new caches."""
    hidden = mesh.by_rows(self.embed_tokens(tokens))
    new_caches = []
    for block, cache in zip(self.layers, caches, strict=True):
      hidden, cache = block(hidden, positions, visible, cache)
      hidden = mesh.by_rows(hidden)
      new_caches.append(cache)
    return self.norm(hidden), tuple(new_caches)


class Decoder(nnx.Module):
  """The language model: trunk and output matrix."""

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.model = Trunk(config, rngs=rngs)
    if not config.tie_word_embeddings:
      self.lm_head = layers.Linear(
        config.hidden_size, config.vocab_size, rngs=rngs
      )

  def hidden(
    self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
  ) -> jax.Array:
    """Returns hidden states of packed rows.

    Args:
      tokens: [B, S] int32.
      positions: [B, S] int32, restarting at 0 in every segment.
      segment_ids: [B, S] int32; a token sees only earlier tokens of its own
        segment.

    Returns:
      [B, S, D] float; state `s` predicts token `s + 1`.
    """
    chex.assert_equal_shape([tokens, positions, segment_ids])
    visible = attention.within_segments(segment_ids)
    no_caches = (None,) * self.config.num_hidden_layers
    return self.model(tokens, positions, visible, no_caches)[0]

  def extend(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    caches: tuple[KVCache, ...],
    attend_length: int,
  ) -> tuple[jax.Array, tuple[KVCache, ...]]:
    """Feeds new tokens to cached sequences.

    Args:
      tokens: [B, C] int32.
      positions: [B, C] int32; set to the cache's length or more for tokens
        that are not there: they are not written and their output is void.
      caches: one cache a layer, filled below each sequence's first position.
      attend_length: static; keys at or above this position are not read, so
        every valid position must be below it.

    Returns:
      Hidden states [B, C, D] and the extended caches.
    """
    keys = jnp.arange(attend_length)
    visible = attention.Visible(keys[None, None, :] <= positions[:, :, None])
    return self.model(tokens, positions, visible, caches)

  def output_matrix(self) -> jax.Array:
    """Returns W [V, D]: the logits are hidden @ W.T."""
    if self.config.tie_word_embeddings:
      return self.model.embed_tokens.weight[...]
    return self.lm_head.weight[...]

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Maps hidden states [..., D] to float32 logits [..., V]."""
    if self.config.tie_word_embeddings:
      return self.model.embed_tokens.attend(hidden)
    return self.lm_head(hidden).astype(jnp.float32)


def empty_caches(
  config: DecoderConfig, batch: int, length: int
) -> tuple[KVCache, ...]:
  """Returns zeroed caches for `batch` sequences of at most `length`."""
  c = config
  shape = (batch, length, c.num_key_value_heads, c.head_dim)
  empty = lambda: KVCache(jnp.zeros(shape), jnp.zeros(shape))
  return tuple(empty() for _ in range(c.num_hidden_layers))
