import jax
import jax.numpy as jnp
import numpy as np

from spopp_jax.models import kv_cache


def numbered(*shape):
  return jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) + 1


def empty(rows=2, length=4):
  return kv_cache.empty(rows, 2, length, 3, jnp.float32)


def filled(rows):
  values = numbered(rows, 2, 4, 3)
  return kv_cache.KVCache(-values.swapaxes(2, 3), values)


def test_what_is_written_lies_by_heads_at_its_position():
  new = numbered(1, 2, 2, 3)  # one sequence, two tokens, two heads
  cache = kv_cache.write(
    empty(), new, -new, jnp.array([[1, 2]]), jnp.array([1])
  )
  keys = np.zeros((2, 2, 4, 3))
  keys[1, :, 1:3] = [[[1, 2, 3], [7, 8, 9]], [[4, 5, 6], [10, 11, 12]]]
  np.testing.assert_array_equal(cache.keys, keys.swapaxes(2, 3))
  np.testing.assert_array_equal(cache.values, -keys)


def test_absent_positions_and_rows_are_not_written():
  new = numbered(2, 1, 2, 3)
  absent = kv_cache.write(empty(), new, new, jnp.array([[4], [2**30]]))
  np.testing.assert_array_equal(absent.keys, empty().keys)
  beyond = kv_cache.write(
    empty(), new, new, jnp.array([[0], [0]]), jnp.array([2, 3])
  )
  np.testing.assert_array_equal(beyond.values, empty().values)


def test_reading_takes_rows_below_a_position():
  whole = filled(3)
  keys, values = np.asarray(whole.keys), np.asarray(whole.values)
  read = kv_cache.read(whole, 2)
  np.testing.assert_array_equal(read.keys, keys[..., :2])
  np.testing.assert_array_equal(read.values, values[:, :, :2])
  read = kv_cache.read(whole, 3, jnp.array([2, 0]))
  np.testing.assert_array_equal(read.keys, keys[[2, 0], ..., :3])
  np.testing.assert_array_equal(read.values, values[[2, 0], :, :3])


def test_what_becomes_of_a_part_is_put_back_and_the_rest_stays():
  whole = filled(2)
  other = {'state': numbered(2, 5)}  # of another kind of layer
  part, same = kv_cache.below((whole, other), 3)
  assert part.values.shape == (2, 2, 3, 3)
  assert same is other
  new, state = kv_cache.put_below(
    (whole, other), (jax.tree.map(lambda x: 2 * x, part), {'state': 0})
  )
  values = np.array(whole.values)
  values[:, :, :3] *= 2
  np.testing.assert_array_equal(new.keys, -values.swapaxes(2, 3))
  np.testing.assert_array_equal(new.values, values)
  assert state == {'state': 0}
