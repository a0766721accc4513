import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.models import attention

ROWS, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 256, 4, 2, 16


def inputs(dtype=np.float32):
  rng = np.random.default_rng(0)
  states = [
    jnp.asarray(rng.normal(size=(ROWS, LENGTH, heads, WIDTH)), dtype)
    for heads in (HEADS, KV_HEADS, KV_HEADS)
  ]
  ids = np.sort(rng.integers(0, 4, (ROWS, LENGTH)), axis=1).astype(np.int32)
  return states, jnp.asarray(ids)


def by_hand(queries, keys, values, ids):
  """Attention query by query, in float64."""
  queries, keys, values = (
    np.asarray(x, np.float64) for x in (queries, keys, values)
  )
  out = np.zeros_like(queries)
  for row, place, head in np.ndindex(ROWS, LENGTH, HEADS):
    seen = [k for k in range(place + 1) if ids[row, k] == ids[row, place]]
    group = head // (HEADS // KV_HEADS)
    scores = keys[row, seen, group] @ queries[row, place, head] / WIDTH**0.5
    weights = np.exp(scores - scores.max())
    out[row, place, head] = weights @ values[row, seen, group] / weights.sum()
  return out


def attend(implementation, ids, *states):
  if implementation == 'interpreted':
    return attention._splash(*states, ids, interpret=True)
  visible = attention.within_segments(ids)
  return attention.attend(*states, visible, implementation=implementation)


@pytest.mark.parametrize(
  'implementation', [None, 'xla', 'causal', 'blocks', 'interpreted']
)
def test_tokens_see_what_is_before_them_in_their_segment(implementation):
  states, ids = inputs()
  assert len(np.unique(ids)) == 4
  got = attend(implementation, ids, *states)
  np.testing.assert_allclose(got, by_hand(*states, np.asarray(ids)), atol=2e-6)


@pytest.mark.parametrize('implementation', ['interpreted', 'causal', 'blocks'])
def test_gradients_are_those_of_xla(implementation):
  states, ids = inputs()
  slope = np.random.default_rng(1).normal(size=states[0].shape).astype('f4')

  def gradients(implementation):
    loss = lambda *states: (attend(implementation, ids, *states) * slope).sum()
    return jax.jit(jax.grad(loss, (0, 1, 2)))(*states)

  for one, other in zip(
    gradients(implementation), gradients('xla'), strict=True
  ):
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_splash_lowers_for_a_tpu(dtype):
  states, ids = inputs(dtype)
  loss = lambda *states: attend('splash', ids, *states).sum(dtype=jnp.float32)
  gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
  lowered = gradient.trace(*states).lower(lowering_platforms=('tpu',))
  # Forward, queries' gradient, keys' and values' gradient.
  assert lowered.as_text().count('tpu_custom_call') == 3


choose = functools.partial(
  attention.choose, length=LENGTH, head_dim=128, packed=True
)


@pytest.mark.parametrize(
  'platform, dtype, changes, expected',
  [
    ('tpu', jnp.bfloat16, {}, 'splash'),
    ('tpu', jnp.float32, {}, 'splash'),
    ('tpu', jnp.float32, {'length': 192}, 'xla'),
    ('tpu', jnp.float32, {'packed': False}, 'xla'),
    ('cuda', jnp.bfloat16, {}, 'cudnn'),
    ('cuda', jnp.dtype('bfloat16'), {}, 'cudnn'),
    ('cuda', jnp.float32, {}, 'xla'),
    ('cuda', jnp.bfloat16, {'length': 255}, 'xla'),
    ('cuda', jnp.bfloat16, {'head_dim': 20}, 'xla'),
    ('cuda', jnp.bfloat16, {'head_dim': 256}, 'xla'),
    ('cuda', jnp.bfloat16, {'packed': False}, 'xla'),
    ('rocm', jnp.bfloat16, {}, 'xla'),
    ('cpu', jnp.bfloat16, {}, 'causal'),
    ('cpu', jnp.float32, {'length': 193}, 'causal'),
    ('cpu', jnp.float32, {'packed': False}, 'xla'),
    ('cpu', jnp.bfloat16, {'length': 2048}, 'blocks'),
    ('cpu', jnp.bfloat16, {'length': 2000}, 'xla'),
    ('cpu', jnp.bfloat16, {'length': 2048, 'packed': False}, 'xla'),
    ('cuda', jnp.bfloat16, {'length': 2048}, 'cudnn'),
    ('cuda', jnp.bfloat16, {'length': 2048, 'head_dim': 256}, 'blocks'),
    ('tpu', jnp.bfloat16, {'length': 2048}, 'splash'),
  ],
)
def test_the_choice_of_every_device(platform, dtype, changes, expected):
  assert choose(platform, dtype, **changes) == expected


def test_blocks_hold_a_part_of_the_scores():
  states, _ = inputs()
  longer = [jnp.tile(x, (1, 8, 1, 1)) for x in states]
  ids = jnp.ones((ROWS, 8 * LENGTH), jnp.int32)

  def held(implementation):
    loss = lambda *states: attend(implementation, ids, *states).sum()
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    analysis = gradient.lower(*longer).compile().memory_analysis()
    return analysis.temp_size_in_bytes

  assert held('blocks') < 0.6 * held('xla')


@pytest.mark.gpu
def test_cudnn_computes_what_xla_does():
  states, ids = inputs(jnp.bfloat16)
  got, want = (
    np.asarray(attend(name, ids, *states), np.float32)
    for name in ('cudnn', 'xla')
  )
  np.testing.assert_allclose(got, want, atol=0.02)


@pytest.mark.tpu
def test_splash_computes_what_xla_does():
  states, ids = inputs(jnp.bfloat16)
  got, want = (
    np.asarray(attend(name, ids, *states), np.float32)
    for name in ('splash', 'xla')
  )
  np.testing.assert_allclose(got, want, atol=0.02)


@pytest.mark.parametrize(
  'dtype, error', [('float32', 1e-6), ('bfloat16', 2e-2)]
)
@pytest.mark.parametrize('cut', [[(0, 5)], [(0, 2), (2, 3), (3, 5)]])
def test_a_cache_is_attended_as_rows_are(dtype, error, cut):
  keys = jax.random.split(jax.random.key(0), 3)
  draw = lambda key, *shape: jax.random.normal(key, shape).astype(dtype)
  queries = draw(keys[0], 2, 3, 4, 8)
  held, values = draw(keys[1], 2, 5, 2, 8), draw(keys[2], 2, 5, 2, 8)
  # Queries at 2, 3, 4; another sequence's at 0, 1, 2.
  positions = jnp.array([[2, 3, 4], [0, 1, 2]])
  mask = jnp.arange(5)[None, None] <= positions[:, :, None]
  pieces = lambda x: [x[:, start:end] for start, end in cut]
  attended = attention.attend_cache(
    queries,
    [piece.transpose(0, 2, 3, 1) for piece in pieces(held)],
    [piece.swapaxes(1, 2) for piece in pieces(values)],
    mask,
  )
  assert attended.dtype == dtype
  expected = attention.attend(
    queries, held, values, attention.Visible(mask), implementation='xla'
  )
  np.testing.assert_allclose(
    np.float32(attended), np.float32(expected), atol=error
  )
  # Alone, a query is multiplied with piece by piece.
  alone = attention.attend_cache(
    queries[:, :1],
    [piece.transpose(0, 2, 3, 1) for piece in pieces(held)],
    [piece.swapaxes(1, 2) for piece in pieces(values)],
    mask[:, :1],
  )
  np.testing.assert_allclose(
    np.float32(alone), np.float32(expected[:, :1]), atol=error
  )
  # A query that sees one key takes its value, by its own group of heads.
  np.testing.assert_allclose(
    np.float32(attended[1, 0]),
    np.repeat(np.float32(values[1, 0]), 2, axis=0),
    rtol=1e-6,
  )


def test_the_last_block_of_queries_may_be_short():
  states, ids = inputs()
  states, ids = [x[:, :150] for x in states], ids[:, :150]
  np.testing.assert_allclose(
    attend('causal', ids, *states), attend('xla', ids, *states), atol=2e-6
  )
