import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import segments

# Two rows; trajectory 1 spans both, 2 has no counted token, 3 is padding.
_IDS = np.array([[0, 0, 1, 1, 3], [1, 2, 2, 3, 3]], np.int32)
_MASK = np.array([[0, 1, 1, 0, 0], [1, 0, 0, 0, 0]], bool)
_VALUES = np.array([[9, 1, 2, 9, 9], [5, 9, 9, 9, 9]], np.float32)


def test_sums_by_hand():
  sums = segments.trajectory_sums(_VALUES, _MASK, _IDS, num_trajectories=3)
  lengths = segments.trajectory_lengths(_MASK, _IDS, num_trajectories=3)
  np.testing.assert_array_equal(sums, [1, 7, 0])
  np.testing.assert_array_equal(lengths, [1, 2, 0])
  assert lengths.dtype == jnp.float32


def test_k01_packed_row(vectors):
  vector = vectors['K01_packing']
  inputs, expected = vector['inputs'], vector['expected']
  ids = np.array([inputs['segment_ids']], np.int32)
  ids = np.where(ids > 0, ids - 1, 3).astype(np.int32)
  mask = np.array([inputs['mask']], bool)
  log_ratio = np.array([inputs['logratio']], np.float32)
  sums = segments.trajectory_sums(log_ratio, mask, ids, num_trajectories=3)
  lengths = segments.trajectory_lengths(mask, ids, num_trajectories=3)
  np.testing.assert_allclose(sums, expected['sum'], rtol=1e-6)
  np.testing.assert_array_equal(lengths, expected['count'])
  mean = sums / jnp.maximum(lengths, 1)
  np.testing.assert_allclose(jnp.exp(mean), expected['seq_ratio'], rtol=1e-6)
  assert (lengths > 0).sum() == expected['n_active']


def test_membership_is_by_id_not_by_position():
  order = np.array([3, 0, 4, 2, 1])
  mixed = segments.trajectory_sums(
    _VALUES[::-1, order],
    _MASK[::-1, order],
    _IDS[::-1, order],
    num_trajectories=3,
  )
  np.testing.assert_array_equal(mixed, [1, 7, 0])


def test_padding_gives_and_receives_nothing():
  mask = np.ones_like(_MASK)
  lengths = segments.trajectory_lengths(mask, _IDS, num_trajectories=3)
  np.testing.assert_array_equal(lengths, [2, 3, 2])
  tokens = segments.to_tokens(np.array([1.0, 2, 3], np.float32), _IDS)
  np.testing.assert_array_equal(tokens, [[1, 1, 2, 2, 0], [2, 3, 3, 0, 0]])


def test_bfloat16_is_summed_in_float32():
  ones = jnp.ones((1, 1001), jnp.bfloat16)
  sums = segments.trajectory_sums(
    ones,
    jnp.ones((1, 1001), bool),
    jnp.zeros((1, 1001), jnp.int32),
    num_trajectories=1,
  )
  assert sums[0] == 1001


@pytest.mark.parametrize('garbage', [np.nan, np.inf, 1e30])
def test_masked_slots_reach_neither_value_nor_gradient(garbage):
  dirty = np.where(_MASK, _VALUES, garbage).astype(np.float32)

  @jax.jit
  @jax.value_and_grad
  def squared(values):
    sums = segments.trajectory_sums(values, _MASK, _IDS, num_trajectories=3)
    return (sums**2).sum()

  value, gradient = squared(dirty)
  assert value == 50
  np.testing.assert_array_equal(gradient, [[0, 2, 14, 0, 0], [14, 0, 0, 0, 0]])


def test_counted_tokens_drops_unusable_trajectories():
  usable = np.array([True, False, True])
  mask = segments.counted_tokens(np.ones_like(_MASK), _IDS, usable)
  np.testing.assert_array_equal(mask, [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0]])


def test_a_float_mask_is_refused():
  with pytest.raises(AssertionError):
    segments.trajectory_sums(
      _VALUES, _MASK.astype(np.float32), _IDS, num_trajectories=3
    )
