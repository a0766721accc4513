import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.models import kv_cache


def numbered(*shape):
  return jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) + 1


def empty(rows=2, pieces=(4,)):
  return kv_cache.empty(rows, 2, 3, pieces, jnp.float32)


def joined(cache):
  """Returns keys and values of all pieces, [B, KV, T, D] each."""
  keys = np.concatenate(cache.keys, axis=3)
  return keys.swapaxes(2, 3), np.concatenate(cache.values, axis=2)


def filled(rows, pieces):
  return jax.tree.map(lambda x: numbered(*x.shape), empty(rows, pieces))


@pytest.mark.parametrize(
  'length, shortest, expected',
  [
    (80, 128, [80]),
    (128, 128, [128]),
    (580, 128, [128, 256, 384, 512, 580]),
    (40, 4, [4, 8, 12, 16, 24, 36, 40]),
    (5, 1, [1, 2, 3, 4, 5]),
  ],
)
def test_where_pieces_end(length, shortest, expected):
  assert kv_cache.ends(length, shortest) == expected


def test_few_pieces_are_enough_and_little_is_read_in_vain():
  ends = np.array(kv_cache.ends(131_072))
  assert len(ends) == 18
  assert (ends[2:] <= 1.5 * ends[1:-1]).all()


@pytest.mark.parametrize('pieces', [(4,), (2, 4), (1, 2, 3, 4)])
def test_what_is_written_lies_by_heads_at_its_position(pieces):
  new = numbered(1, 2, 2, 3)  # one sequence, two tokens, two heads
  cache = kv_cache.write(
    empty(2, pieces), new, -new, jnp.array([[1, 2]]), jnp.array([1])
  )
  expected = np.zeros((2, 2, 4, 3))
  expected[1, :, 1:3] = [[[1, 2, 3], [7, 8, 9]], [[4, 5, 6], [10, 11, 12]]]
  keys, values = joined(cache)
  np.testing.assert_array_equal(keys, expected)
  np.testing.assert_array_equal(values, -expected)


@pytest.mark.parametrize('pieces', [(4,), (3, 4)])
def test_absent_positions_and_rows_are_not_written(pieces):
  new = numbered(2, 1, 2, 3)
  nothing = empty(2, pieces)
  absent = kv_cache.write(nothing, new, new, jnp.array([[4], [2**30]]))
  beyond = kv_cache.write(
    nothing, new, new, jnp.array([[0], [0]]), jnp.array([2, 3])
  )
  for cache in (absent, beyond):
    assert not any(leaf.any() for leaf in jax.tree.leaves(cache))


def test_reading_takes_rows():
  whole = filled(3, (2, 4))
  assert kv_cache.read(whole) is whole
  read = kv_cache.read(whole, jnp.array([2, 0]))
  for got, held in zip(joined(read), joined(whole), strict=True):
    np.testing.assert_array_equal(got, held[[2, 0]])


def test_what_becomes_of_a_part_is_put_back_and_the_rest_stays():
  whole = filled(2, (1, 3, 4))
  other = {'state': numbered(2, 5)}  # of another kind of layer
  part, same = kv_cache.below((whole, other), 3)
  assert same is other
  assert kv_cache.length((other, part)) == 3
  assert [id(x) for x in part.keys] == [id(x) for x in whole.keys[:2]]
  (new, state) = kv_cache.put_below(
    (whole, other), (jax.tree.map(lambda x: 2 * x, part), {'state': 0})
  )
  for got, held in zip(joined(new), joined(whole), strict=True):
    held[:, :, :3] *= 2
    np.testing.assert_array_equal(got, held)
  assert state == {'state': 0}
