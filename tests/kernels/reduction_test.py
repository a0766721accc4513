import jax
import jax.numpy as jnp
import numpy as np

from spopp_jax.kernels import reduction


def test_sums_in_float32_whatever_the_input():
  ones = jnp.ones(1001, jnp.bfloat16)  # bfloat16 holds 1000 and 1004
  assert reduction.global_sum(ones) == 1001
  assert reduction.global_sum(jnp.ones(7, bool)) == 7
  assert reduction.global_sum(ones).dtype == jnp.float32


def test_mapped_axis_gives_every_device_the_whole():
  values = jnp.asarray([[1.0, -5.0], [3.0, 2.0]])
  total = jax.vmap(
    lambda x: reduction.global_sum(x, axis_name='data'), axis_name='data'
  )(values)
  largest = jax.vmap(
    lambda x: reduction.global_max(x, axis_name='data'), axis_name='data'
  )(values)
  np.testing.assert_array_equal(total, [1, 1])
  np.testing.assert_array_equal(largest, [3, 3])
