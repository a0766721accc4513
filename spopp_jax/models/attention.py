"""Attention that stays inside its segment, by the device's own kernel.

On a TPU splash attention, on CUDA cuDNN's flash attention, both for packed rows
and where the shapes and dtypes allow it; else XLA's own operations, for long
rows a block of queries at a time, so that memory grows with S and not S^2; on a
CPU short rows too, without what lies after a block.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp

from spopp_jax.models import mesh as mesh_lib

Implementation = Literal['xla', 'causal', 'blocks', 'cudnn', 'splash']
_BLOCKS = (512, 256, 128)
# From here on the scores of all pairs are not held at a time.
_LONG = 1024
_CAUSAL_BLOCK = 64
_FLASH_DTYPES = (jnp.bfloat16, jnp.float16)


class Visible(NamedTuple):
  """Which keys a query sees.

  Attributes:
    mask: [B, S, K] bool; True where it does.
    segment_ids: [B, S] int32 of packed rows, where a query sees what is not
      later in its own segment; None where only the mask says so.
  """

  mask: jax.Array
  segment_ids: jax.Array | None = None


def within_segments(segment_ids: jax.Array) -> Visible:
  """Returns that of packed rows: no later token, and none of another segment.

  Args:
    segment_ids: [B, S] int32.
  """
  index = jnp.arange(segment_ids.shape[1])
  causal = index[:, None] >= index[None, :]
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  return Visible(same & causal[None], segment_ids)


def attend(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  visible: Visible,
  *,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Returns softmax(q k^T / sqrt(D)) v over the visible keys.

  Args:
    queries: [B, S, H, D] float.
    keys: [B, K, KV, D] of the same dtype; KV divides H.
    values: as keys.
    visible: at least one key for every query.
    implementation: what computes it; None is `choose`'s.

  Returns:
    [B, S, H, D] in the dtype of `queries`; the softmax is float32.
  """
  chex.assert_rank([queries, keys, values, visible.mask], [4, 4, 4, 3])
  if implementation is None:
    implementation = choose(
      _platform(),
      queries.dtype,
      length=queries.shape[1],
      head_dim=queries.shape[3],
      packed=visible.segment_ids is not None,
    )
  if implementation == 'splash':
    assert visible.segment_ids is not None
    return _splash(queries, keys, values, visible.segment_ids)
  if implementation == 'causal':
    return _causal(queries, keys, values, visible.mask)
  if implementation == 'blocks':
    assert visible.segment_ids is not None
    return _in_blocks(queries, keys, values, visible.segment_ids)
  return jax.nn.dot_product_attention(
    queries,
    keys,
    values,
    mask=visible.mask[:, None],
    implementation=implementation,
  )


def attend_cache(
  queries: jax.Array,
  keys: Sequence[jax.Array],
  values: Sequence[jax.Array],
  mask: jax.Array,
) -> jax.Array:
  """Returns softmax(q k^T / sqrt(D)) v of few queries and a cache.

  It lies as the products read it (see `kv_cache.KVCache`), so that no step of
  decoding moves it.

  Args:
    queries: [B, S, H, D] float.
    keys: pieces [B, KV, D, K_i] float of K keys; KV divides H.
    values: pieces [B, KV, K_i, D] float.
    mask: [B, S, K] bool; at least one key for every query.

  Returns:
    [B, S, H, D] in the dtype of `queries`; the softmax is float32.
  """
  chex.assert_rank([queries, *keys, *values], 4)
  chex.assert_rank(mask, 3)
  batch, length, heads, width = queries.shape
  groups = keys[0].shape[1]
  if length > 1:
    # One wide product is worth a copy.
    keys = [jnp.concatenate(keys, axis=3)]
    values = [jnp.concatenate(values, axis=2)]
  # [B, KV, R S, D]: the queries that share a head's keys.
  grouped = queries.reshape(batch, length, groups, -1, width)
  grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(batch, groups, -1, width)
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  cast = lambda piece: piece.astype(queries.dtype)
  scores = jnp.concatenate(
    [product('bgqd,bgdk->bgqk', grouped, cast(piece)) for piece in keys], axis=3
  )
  scores = scores.reshape(batch, heads, length, -1) / math.sqrt(width)
  lowest = jnp.finfo(jnp.float32).min
  scores = jnp.where(mask[:, None], scores, lowest)
  peak = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
  weights = jnp.exp(scores - peak).reshape(batch, groups, -1, mask.shape[2])
  ends = list(itertools.accumulate(piece.shape[2] for piece in values))
  shares = jnp.split(cast(weights), ends[:-1], axis=3)
  attended = functools.reduce(
    jnp.add,
    [
      product('bgqk,bgkd->bgqd', share, cast(piece))
      for share, piece in zip(shares, values, strict=True)
    ],
  )
  # Divided last: of the products there are fewer than of the weights.
  attended = cast(attended / weights.sum(axis=-1, keepdims=True))
  attended = attended.reshape(batch, groups, -1, length, width)
  return attended.transpose(0, 3, 1, 2, 4).reshape(queries.shape)


def choose(
  platform: str,
  dtype: jax.typing.DTypeLike,
  *,
  length: int,
  head_dim: int,
  packed: bool,
) -> Implementation:
  """Returns which implementation fits.

  Args:
    platform: 'cpu', 'cuda', 'tpu' or another.
    dtype: of the queries.
    length: S.
    head_dim: D.
    packed: whether segments are known.
  """
  if not packed:
    return 'xla'
  if platform == 'tpu' and length % _BLOCKS[-1] == 0:
    return 'splash'
  flash = dtype in _FLASH_DTYPES and head_dim % 8 == 0 and head_dim <= 128
  if platform == 'cuda' and flash and length % 2 == 0:
    return 'cudnn'
  if length >= _LONG and not length % _BLOCKS[-1]:
    return 'blocks'
  return 'causal' if platform == 'cpu' and length < _LONG else 'xla'


def _platform() -> str:
  backend = jax.default_backend()
  if backend == 'gpu':
    version = jax.devices()[0].client.platform_version
    return 'cuda' if 'cuda' in version else 'rocm'
  return backend


def _causal(
  queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array
) -> jax.Array:
  """Attends for blocks of queries, each to the keys up to its own end.

  Half of the scores are never made, and a block's fit a CPU's cache.
  """
  keys, values = keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2)
  attended = []
  for start in range(0, queries.shape[1], _CAUSAL_BLOCK):
    end = min(start + _CAUSAL_BLOCK, queries.shape[1])
    attended.append(
      attend_cache(
        queries[:, start:end],
        [keys[..., :end]],
        [values[:, :, :end]],
        mask[:, start:end, :end],
      )
    )
  return jnp.concatenate(attended, axis=1)


def _in_blocks(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  segment_ids: jax.Array,
) -> jax.Array:
  """Attends for one block of queries after another, anew in the gradient."""
  length = queries.shape[1]
  size = next(size for size in _BLOCKS if length % size == 0)
  cut = lambda x: x.reshape(len(x), -1, size, *x.shape[2:]).swapaxes(0, 1)
  index = jnp.arange(length)

  @jax.checkpoint
  def attend_block(block):
    queries, ids, place = block
    causal = place[:, None] >= index[None, :]
    same = ids[:, :, None] == segment_ids[:, None, :]
    return jax.nn.dot_product_attention(
      queries, keys, values, mask=(same & causal[None])[:, None]
    )

  blocks = (cut(queries), cut(segment_ids), index.reshape(-1, size))
  attended = jax.lax.map(attend_block, blocks)
  return attended.swapaxes(0, 1).reshape(queries.shape)


def _splash(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  segment_ids: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Attends by the Pallas kernel, each device to its rows and heads."""
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  length = queries.shape[1]
  block = next(size for size in _BLOCKS if length % size == 0)

  def alone(queries, keys, values, segment_ids):
    heads = queries.shape[2]
    kernel = splash.make_splash_mha_single_device(
      splash.MultiHeadMask([splash.CausalMask((length, length))] * heads),
      block_sizes=splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
      ),
      interpret=interpret,
    )
    scaled = queries * math.sqrt(1 / queries.shape[3])
    attended = jax.vmap(kernel)(
      *(x.swapaxes(1, 2) for x in (scaled, keys, values)),
      splash.SegmentIds(segment_ids, segment_ids),
    )
    return attended.swapaxes(1, 2).astype(queries.dtype)

  # XLA cannot cut a kernel by itself.
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.axis_names != mesh_lib.AXES or mesh.size == 1:
    return alone(queries, keys, values, segment_ids)
  rows = mesh_lib.ROWS[0]
  heads = 'tensor' if keys.shape[2] % mesh.shape['tensor'] == 0 else None
  cut = jax.sharding.PartitionSpec(rows, None, heads)
  return jax.shard_map(
    alone,
    mesh=mesh,
    in_specs=(cut, cut, cut, jax.sharding.PartitionSpec(rows)),
    out_specs=cut,
    check_vma=False,
  )(queries, keys, values, segment_ids)
