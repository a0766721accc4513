import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import groups

_IDS = np.array([1, 0, 1, 2, 2, 1, 0], np.int32)  # 2 is padding for G = 2
_USABLE = np.array([1, 1, 1, 1, 1, 0, 1], bool)
_VALUES = np.array([1, 2, 3, np.nan, 5, np.nan, 7], np.float32)


def test_members_are_found_by_id():
  grouped, valid = groups.to_groups(
    _VALUES, _IDS, _USABLE, num_groups=2, group_size=3
  )
  np.testing.assert_array_equal(grouped, [[2, 7, 0], [1, 3, 0]])
  np.testing.assert_array_equal(valid, [[1, 1, 0], [1, 1, 0]])


def test_an_id_without_members_leaves_an_empty_row():
  grouped, valid = groups.to_groups(
    np.array([4, 5], np.float32),
    np.array([2, 2], np.int32),
    np.ones(2, bool),
    num_groups=3,
    group_size=2,
  )
  np.testing.assert_array_equal(grouped, [[0, 0], [0, 0], [4, 5]])
  np.testing.assert_array_equal(valid, [[0, 0], [0, 0], [1, 1]])


def test_way_there_and_back_is_the_identity_on_members():
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 5, 20).astype(np.int32)
  usable = rng.random(20) < 0.8
  values = rng.normal(size=20).astype(np.float32)

  @jax.jit
  def there_and_back(values):
    grouped, _ = groups.to_groups(
      values, ids, usable, num_groups=4, group_size=20
    )
    return groups.from_groups(grouped, ids, usable)

  members = usable & (ids < 4)
  np.testing.assert_array_equal(
    there_and_back(values), np.where(members, values, 0)
  )
  gradient = jax.grad(lambda x: there_and_back(x).sum())(jnp.array(values))
  np.testing.assert_array_equal(gradient, members.astype(np.float32))


def test_members_of_a_full_group_beyond_its_size_get_nothing():
  ids, usable = np.zeros(3, np.int32), np.ones(3, bool)
  grouped, valid = groups.to_groups(
    np.array([1, 2, 3], np.float32), ids, usable, num_groups=2, group_size=2
  )
  np.testing.assert_array_equal(grouped, [[1, 2], [0, 0]])
  np.testing.assert_array_equal(valid, [[1, 1], [0, 0]])
  back = groups.from_groups(grouped, ids, usable)
  np.testing.assert_array_equal(back, [1, 2, 0])


def test_float_ids_are_refused():
  with pytest.raises(AssertionError):
    groups.to_groups(
      np.ones(2, np.float32),
      np.zeros(2, np.float32),
      np.ones(2, bool),
      num_groups=1,
      group_size=2,
    )
