import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spopp_jax.models import layers


def rotated(inputs, positions, frequencies):
  angles = layers.rotation(np.array(positions, np.int32), frequencies)
  return layers.rotary(inputs, angles)


def test_rotary_by_hand():
  # Half-split pairing: (x0, x2) turn by p, (x1, x3) by p * 4^(-2/4) = p / 2.
  x = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
  got = rotated(x.reshape(1, 1, 1, 4), [[3]], layers.rotary_frequencies(4, 4.0))
  expected = [
    1 * np.cos(3) - 3 * np.sin(3),
    2 * np.cos(1.5) - 4 * np.sin(1.5),
    3 * np.cos(3) + 1 * np.sin(3),
    4 * np.cos(1.5) + 2 * np.sin(1.5),
  ]
  np.testing.assert_allclose(got[0, 0, 0], expected, rtol=1e-5)


def test_scaled_frequencies_by_hand():
  # L = 16 turns f L / 2 pi times; above 4 turns kept, below 1 divided by 8.
  scaling = layers.RopeScaling(8.0, 1.0, 4.0, 16)
  plain = layers.rotary_frequencies(8, 256.0)
  np.testing.assert_allclose(plain, [1, 1 / 4, 1 / 16, 1 / 64], rtol=1e-6)
  turns = 16 / (2 * np.pi)  # 2.546 of the first, .637 of the second
  kept = (turns - 1) / 3
  expected = [kept + (1 - kept) / 8, 1 / 32, 1 / 128, 1 / 512]
  np.testing.assert_allclose(
    layers.rotary_frequencies(8, 256.0, scaling), expected, rtol=1e-6
  )
  longer = layers.RopeScaling(8.0, 1.0, 4.0, 64)  # 10.2, 2.5, .6, .2 turns
  got = layers.rotary_frequencies(8, 256.0, longer)
  np.testing.assert_allclose(got[[0, 2, 3]], [1, 1 / 128, 1 / 512], rtol=1e-6)


@pytest.mark.parametrize(
  'values, words',
  [
    ((0.0, 1.0, 4.0, 16), 'factor'),
    ((8.0, 4.0, 4.0, 16), 'high_freq_factor'),
    ((8.0, 1.0, 4.0, '16'), 'original_max_position_embeddings'),
    ((8.0, float('nan'), 4.0, 16), 'low_freq_factor'),
  ],
)
def test_a_scaling_that_is_none_is_refused(values, words):
  with pytest.raises(ValueError, match=words):
    layers.RopeScaling(*values)


def test_rotary_at_zero_is_the_identity():
  x = np.random.default_rng(0).normal(size=(1, 3, 2, 6)).astype(np.float32)
  got = rotated(x, [[0, 0, 0]], layers.rotary_frequencies(6, 10_000.0))
  np.testing.assert_array_equal(got, x)


def test_rotary_products_depend_on_the_distance_alone():
  rng = np.random.default_rng(0)
  query, key = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

  def product(at_query, at_key):
    frequencies = layers.rotary_frequencies(8, 100.0)
    turn = lambda x, at: rotated(x, [[at]], frequencies)
    return float((turn(query, at_query) * turn(key, at_key)).sum())

  np.testing.assert_allclose(product(9, 4), product(105, 100), rtol=1e-4)
  assert abs(product(9, 4) - product(9, 5)) > 1e-2
  assert abs(product(9, 4) - product(4, 9)) > 1e-2  # direction counts


def test_rotary_keeps_the_dtype_and_computes_in_float32():
  x = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
  # In bfloat16 position 1001 would round to 1000.
  got = rotated(x, [[1001]], layers.rotary_frequencies(2, 10.0))
  assert got.dtype == jnp.bfloat16
  expected = np.cos(1001.0) - np.sin(1001.0)
  np.testing.assert_allclose(np.float32(got[0, 0, 0, 0]), expected, atol=1e-2)


def test_rms_norm_by_hand():
  norm = layers.RMSNorm(2, epsilon=0.5)
  norm.weight[...] = jnp.array([2.0, -1.0])
  # mean square of (1, 3) is 5; with epsilon inside the root: sqrt(5.5).
  got = norm(jnp.array([[1.0, 3.0]]))
  root = np.sqrt(5.5)
  np.testing.assert_allclose(got, [[2 / root, -3 / root]], rtol=1e-6)


def test_rms_norm_of_large_bfloat16_is_computed_in_float32():
  norm = layers.RMSNorm(512, epsilon=1e-6)
  x = jnp.full((1, 512), 3.0, jnp.bfloat16)
  got = norm(x)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(np.float32(got), 1)


@pytest.mark.parametrize('shape', [(3,), (2, 3), (2, 4, 3)])
def test_linear_is_x_times_weight_transposed(shape):
  linear = layers.Linear(3, 5, rngs=nnx.Rngs(0))
  assert linear.weight.shape == (5, 3)
  x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
  expected = np.einsum('...i,oi->...o', x, np.asarray(linear.weight[...]))
  np.testing.assert_allclose(linear(x), expected, rtol=1e-5, atol=1e-6)


def test_a_fresh_linear_keeps_the_variance_of_its_input():
  x = jax.random.normal(jax.random.key(0), (500, 64))
  plain = layers.Linear(64, 64, rngs=nnx.Rngs(0))(x)
  scaled = layers.Linear(64, 64, rngs=nnx.Rngs(0), scale=0.5)(x)
  np.testing.assert_allclose(plain.std(), 1, rtol=0.1)
  np.testing.assert_allclose(scaled, 0.5 * plain, rtol=1e-5, atol=1e-6)


def test_embedding_looks_up_rows_and_attends_in_float32():
  embedding = layers.Embedding(7, 4, rngs=nnx.Rngs(0))
  weight = np.asarray(embedding.weight[...])
  tokens = np.array([[6, 0, 3]], np.int32)
  np.testing.assert_array_equal(embedding(tokens), weight[tokens])
  hidden = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
  np.testing.assert_allclose(
    layers.logits(hidden, embedding.weight[...]),
    hidden @ weight.T,
    rtol=1e-5,
    atol=1e-6,
  )
  half = layers.Embedding(7, 4, rngs=nnx.Rngs(0))
  half.weight[...] = half.weight[...].astype(jnp.bfloat16)
  assert (
    layers.logits(hidden.astype(jnp.bfloat16), half.weight[...]).dtype
    == jnp.float32
  )
