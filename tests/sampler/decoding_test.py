import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.sampler import decoding


@pytest.mark.parametrize('size', [3, 128, 129, 300])
def test_ids_are_drawn_as_often_as_they_are_likely(size):
  logprobs = jax.nn.log_softmax(
    2 * jax.random.normal(jax.random.key(0), (size,))
  )
  number = 40_000
  keys = jax.random.split(jax.random.key(1), number)
  drawn = jax.jit(decoding._draw)(
    keys, jnp.broadcast_to(logprobs, (number, size))
  )
  assert drawn.dtype == jnp.int32
  counts = np.bincount(drawn, minlength=size)
  expected = number * np.exp(np.float64(logprobs))
  often = expected > 5
  statistic = ((counts - expected) ** 2 / expected)[often].sum()
  freedom = often.sum() - 1
  # Beyond it lies one sample in some 30,000.
  assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 8
  assert counts[~often].sum() < 2 * expected[~often].sum() + 10


def test_the_ends_of_the_chances_are_ids_that_can_be_drawn():
  masses = jnp.array([[0.0, 0.25, 0.0, 0.75, 0.0]] * 3)
  largest = np.float32(1) - np.float32(2**-24)
  found = decoding._first_beyond(masses, jnp.array([0.0, 0.25, largest]))
  assert found.tolist() == [1, 3, 3]
  # A sum above 1, which its share by rounding could reach.
  masses = jnp.array([[0.5, 0.5 + 2**-23, 0.0]])
  assert decoding._first_beyond(masses, jnp.array([largest])).tolist() == [1]


def test_what_is_impossible_is_not_drawn_and_nan_draws_an_id():
  logprobs = jnp.log(jnp.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
  for seed in range(20):
    keys = jax.random.split(jax.random.key(seed), 2)
    np.testing.assert_array_equal(decoding._draw(keys, logprobs), [1, 2])
  (drawn,) = decoding._draw(keys[:1], jnp.full((1, 3), jnp.nan))
  assert 0 <= drawn < 3
