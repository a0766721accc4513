import jax
import jax.numpy as jnp
import numpy as np

from spopp_jax.sampler import decoding


def test_the_draw_is_that_of_jax():
  logprobs = jax.nn.log_softmax(
    2 * jax.random.normal(jax.random.key(0), (500, 7))
  )
  keys = jax.random.split(jax.random.key(1), 500)
  drawn = jax.jit(decoding._draw)(keys, logprobs)
  assert drawn.dtype == jnp.int32
  expected = jax.vmap(jax.random.categorical)(keys, logprobs)
  np.testing.assert_array_equal(drawn, expected)
  assert len(set(drawn.tolist())) == 7


def test_what_is_impossible_is_not_drawn_and_nan_draws_an_id():
  logprobs = jnp.log(jnp.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
  for seed in range(20):
    keys = jax.random.split(jax.random.key(seed), 2)
    np.testing.assert_array_equal(decoding._draw(keys, logprobs), [1, 2])
  (drawn,) = decoding._draw(keys[:1], jnp.full((1, 3), jnp.nan))
  assert 0 <= drawn < 3
