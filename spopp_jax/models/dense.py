"""Dense decoders, Qwen3 and Llama: grouped queries, rotary, SwiGLU.

Qwen3 normalizes queries and keys, Llama does not; SmolLM2 is a Llama. A family
whose layers mix tokens in another way derives its sizes from `DecoderConfig`
and says there which module each layer mixes with (`qwen3_5`).

Parameter paths equal the Hugging Face names (`model.layers.0.self_attn.
q_proj.weight`), so saving and loading safetensors is a rename.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spopp_jax.models import attention, kv_cache, layers, mesh

# Position of a token that is not there; above every length of a cache.
ABSENT = 2**30


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
    max_position_embeddings: tokens it was made for; kept for who reads the
      files, nothing here depends on it.
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
  max_position_embeddings: int = 32_768

  # (1 + weight) norms, gated attention and heads that are rotated in part are
  # what other families have.
  norm_offset: ClassVar[float] = 0.0
  caches_can_be_cut: ClassVar[bool] = True
  gated_attention: ClassVar[bool] = False

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type not in (int, float, bool):
        continue
      allowed: tuple[Any, ...] = (
        (int, float) if field.type is float else (field.type,)
      )
      if type(value) not in allowed:
        names = ' or '.join(kind.__name__ for kind in allowed)
        raise ValueError(f'{field.name} ({value!r}) must be {names}')
      if field.type is not bool and not 0 < value < math.inf:
        raise ValueError(f'{field.name} ({value}) must be positive and finite')
    if self.num_attention_heads % self.num_key_value_heads:
      raise ValueError(
        f'num_attention_heads ({self.num_attention_heads}) must be a multiple '
        f'of num_key_value_heads ({self.num_key_value_heads})'
      )
    if self.head_dim % 2:
      raise ValueError(f'head_dim ({self.head_dim}) must be even')

  @property
  def rotary_dim(self) -> int:
    """How many of the first dimensions of a head are rotated."""
    return self.head_dim

  @property
  def rotary_frequencies(self) -> np.ndarray:
    """Radians a position of each pair of rotated dimensions, [R/2] float32."""
    return layers.rotary_frequencies(
      self.rotary_dim, self.rope_theta, self.rope_scaling
    )

  def mixer(self, layer: int, rngs: nnx.Rngs) -> tuple[str, 'Mixer']:
    """Returns the name and the module by which a layer mixes tokens."""
    del layer
    return 'self_attn', Attention(self, rngs=rngs)

  def empty_cache(
    self,
    layer: int,
    batch: int,
    pieces: Sequence[int],
    dtype: jax.typing.DTypeLike,
  ) -> 'Cache':
    """Returns the zeroed cache of a layer; see `empty_caches`."""
    del layer
    return kv_cache.empty(
      batch, self.num_key_value_heads, self.head_dim, pieces, dtype
    )


class Context(NamedTuple):
  """What the layers know of the tokens beside their hidden states.

  Attributes:
    positions: [B, S] int32, restarting at 0 in every sequence.
    rotation: of the positions, for queries and keys.
    visible: which keys a query sees.
    segment_ids: [B, S] int32; sequences in packed rows. With a cache 1, and 0
      for tokens that are not there.
    rows: [B] int32; the row of the cache that each sequence has, or None when
      they are those of the cache in its order.
  """

  positions: jax.Array
  rotation: layers.Rotation
  visible: attention.Visible
  segment_ids: jax.Array
  rows: jax.Array | None


Cache = Any  # one layer's: a NamedTuple of arrays [B, ...]


class Mixer(Protocol):
  """The part of a layer through which tokens see each other."""

  def __call__(
    self, hidden: jax.Array, context: Context, cache: Cache | None
  ) -> tuple[jax.Array, Cache | None]:
    """Maps [B, S, D] to [B, S, D] and extends the cache, if there is one."""


class Attention(nnx.Module):
  """Causal grouped-query attention over packed rows or a cache.

  Gated, every head's output is multiplied by the sigmoid of a gate that q_proj
  gives beside the head's query.
  """

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    c = config
    self.config = config
    queries = c.num_attention_heads * c.head_dim
    gates = queries if c.gated_attention else 0
    keys = c.num_key_value_heads * c.head_dim
    self.q_proj = layers.Linear(c.hidden_size, queries + gates, rngs=rngs)
    self.k_proj = layers.Linear(c.hidden_size, keys, rngs=rngs)
    self.v_proj = layers.Linear(c.hidden_size, keys, rngs=rngs)
    self.o_proj = layers.Linear(
      queries,
      c.hidden_size,
      rngs=rngs,
      scale=(2 * c.num_hidden_layers) ** -0.5,
    )
    if c.qk_norm:
      self.q_norm = norm(c, c.head_dim)
      self.k_norm = norm(c, c.head_dim)

  def __call__(
    self, hidden: jax.Array, context: Context, cache: kv_cache.KVCache | None
  ) -> tuple[jax.Array, kv_cache.KVCache | None]:
    """Attends within the row, or to the cache after writing to it.

    Args:
      hidden: [B, S, D] float.
      context: positions are also the index in the cache; those at or above
        its length are not written.
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
    if c.gated_attention:
      both = queries.reshape(batch, length, -1, 2, c.head_dim)
      queries, gates = both[:, :, :, 0], both[:, :, :, 1]
    if c.qk_norm:
      queries, keys = self.q_norm(queries), self.k_norm(keys)
    queries = layers.rotary(queries, context.rotation)
    keys = layers.rotary(keys, context.rotation)
    if cache is None:
      attended = attention.attend(queries, keys, values, context.visible)
    else:
      cache = kv_cache.write(
        cache, keys, values, context.positions, context.rows
      )
      held = kv_cache.read(cache, context.rows)
      attended = attention.attend_cache(
        queries, held.keys, held.values, context.visible.mask
      )
    if c.gated_attention:
      attended = attended * jax.nn.sigmoid(gates)
    return self.o_proj(attended.reshape(batch, length, -1)), cache


def norm(config: DecoderConfig, features: int) -> layers.RMSNorm:
  """Returns an RMSNorm of the family's kind."""
  return layers.RMSNorm(
    features, epsilon=config.rms_norm_eps, offset=config.norm_offset
  )


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
  """Pre-norm mixing of tokens and SwiGLU, each with a residual."""

  def __init__(self, config: DecoderConfig, layer: int, *, rngs: nnx.Rngs):
    self.input_layernorm = norm(config, config.hidden_size)
    self.mixer_name, mixer = config.mixer(layer, rngs)
    setattr(self, self.mixer_name, mixer)
    self.post_attention_layernorm = norm(config, config.hidden_size)
    self.mlp = MLP(config, rngs=rngs)

  def __call__(
    self, hidden: jax.Array, context: Context, cache: Cache | None
  ) -> tuple[jax.Array, Cache | None]:
    """Applies the block; shapes as in `Mixer`."""
    mixer = getattr(self, self.mixer_name)
    mixed, cache = mixer(self.input_layernorm(hidden), context, cache)
    hidden = hidden + mixed
    hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
    return mesh.by_rows(hidden), cache


class Trunk(nnx.Module):
  """Embedding, blocks and the final norm."""

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    self.embed_tokens = layers.Embedding(
      config.vocab_size, config.hidden_size, rngs=rngs
    )
    self.layers = nnx.List(
      [Block(config, i, rngs=rngs) for i in range(config.num_hidden_layers)]
    )
    self.norm = norm(config, config.hidden_size)

  def __call__(self, tokens, context, caches=()):
    """Maps [B, S] tokens to [B, S, D] hidden states and the new caches."""
    hidden = mesh.by_rows(self.embed_tokens(tokens))
    new_caches = []
    caches = caches or (None,) * len(self.layers)
    for block, cache in zip(self.layers, caches, strict=True):
      hidden, cache = block(hidden, context, cache)
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
    context = Context(
      positions=positions,
      rotation=layers.rotation(positions, self.config.rotary_frequencies),
      visible=attention.within_segments(segment_ids),
      segment_ids=segment_ids,
      rows=None,
    )
    return self.model(tokens, context)[0]

  def extend(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    caches: tuple[Cache, ...],
    rows: jax.Array | None = None,
  ) -> tuple[jax.Array, tuple[Cache, ...]]:
    """Feeds new tokens to cached sequences.

    A sequence that is fed its position 0 starts anew, whatever its row held.

    Args:
      tokens: [B, C] int32.
      positions: [B, C] int32, rising by one; ABSENT for tokens that are not
        there, which follow those that are: they change no cache and their
        output is void.
      caches: one cache a layer, filled below each sequence's first position;
        every position that is there must be below their length.
      rows: [B] int32; the row of the caches that each sequence has, no row
        twice; None when there are as many and in their order. A row beyond the
        last is none: nothing is written.

    Returns:
      Hidden states [B, C, D] and the extended caches.
    """
    # At least one to look up, also where no layer attends.
    keys = jnp.arange(max(1, kv_cache.length(caches)))
    # Looked up: else every layer's loop over heads computes cosines anew.
    rotations = layers.rotation(keys, self.config.rotary_frequencies)
    context = Context(
      positions=positions,
      rotation=jax.tree.map(lambda table: table[positions], rotations),
      visible=attention.Visible(keys[None, None, :] <= positions[:, :, None]),
      segment_ids=(positions < ABSENT).astype(jnp.int32),
      rows=rows,
    )
    return self.model(tokens, context, caches)

  def output_matrix(self) -> jax.Array:
    """Returns W [V, D]: the logits are hidden @ W.T."""
    if self.config.tie_word_embeddings:
      return self.model.embed_tokens.weight[...]
    return self.lm_head.weight[...]

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Maps hidden states [..., D] to float32 logits [..., V]."""
    return layers.logits(hidden, self.output_matrix())


def empty_caches(
  config: DecoderConfig,
  batch: int,
  length: int,
  dtype: jax.typing.DTypeLike = jnp.float32,
  shortest_piece: int = kv_cache.SHORTEST,
) -> tuple[Cache, ...]:
  """Returns zeroed caches of the layers.

  Args:
    config: the decoder.
    batch: sequences.
    length: tokens that a sequence has at most.
    dtype: of what is kept.
    shortest_piece: positions in the first piece (see `kv_cache.ends`).
  """
  pieces = kv_cache.ends(length, shortest_piece)
  return tuple(
    config.empty_cache(layer, batch, pieces, dtype)
    for layer in range(config.num_hidden_layers)
  )
