import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import aggregate


def test_g01_token_mean(vectors):
  vector = vectors['G01_agg']
  numerator, count = aggregate.token_mean(
    np.array(vector['inputs']['loss'], np.float32),
    np.array(vector['inputs']['mask'], bool),
  )
  np.testing.assert_allclose(
    numerator / count, vector['expected']['token-mean'], rtol=1e-6
  )


def test_g03_sums_of_parts_are_the_whole(vectors):
  vector = vectors['G03_dp']
  loss = np.array(vector['inputs']['loss'], np.float32)
  mask = np.array(vector['inputs']['mask'], bool)
  parts = [
    aggregate.token_mean(loss[i : i + 1], mask[i : i + 1]) for i in range(2)
  ]
  numerator, count = (sum(part) for part in zip(*parts, strict=True))
  np.testing.assert_allclose(
    numerator / count, vector['expected']['mean'], rtol=1e-6
  )
  # The mean of the parts' means is another number.
  assert abs(np.mean([n / c for n, c in parts]) - numerator / count) > 1e-2


@pytest.mark.parametrize('devices', [1, 2, 4, 8])
def test_agg03_loss_does_not_know_the_number_of_devices(cases, devices):
  case = cases['AGG-03']
  sequences = case['input']['global_sequences']
  lengths = 1 + np.arange(sequences) % 7
  mask = np.arange(7) < lengths[:, None]
  parts = [
    aggregate.token_mean(rows.astype(np.float32), rows)
    for rows in np.split(mask, devices)
  ]
  numerator, count = (sum(part) for part in zip(*parts, strict=True))
  assert numerator / count == case['expected']['loss_all_modes']
  assert count == lengths.sum()


@pytest.mark.parametrize('garbage', [np.nan, np.inf, 1e30])
def test_masked_slots_reach_neither_value_nor_gradient(garbage):
  mask = np.array([[True, False]])
  total = lambda x: aggregate.token_mean(x**2, mask)[0]
  value, gradient = jax.value_and_grad(total)(
    np.array([[3.0, 0.0]], np.float32)
  )
  assert value == 9
  np.testing.assert_array_equal(gradient, [[6, 0]])
  dirty = np.array([[3.0, garbage]], np.float32)
  assert aggregate.token_mean(dirty, mask)[0] == 3


def test_nothing_counted_gives_zeros():
  sums = aggregate.token_mean(
    np.ones((2, 3), np.float32), np.zeros((2, 3), bool)
  )
  assert sums == (0, 0)


def test_bfloat16_is_summed_in_float32():
  numerator, count = aggregate.token_mean(
    jnp.ones((1, 1001), jnp.bfloat16), np.ones((1, 1001), bool)
  )
  assert (numerator, count) == (1001, 1001)


def test_a_float_mask_is_refused():
  with pytest.raises(AssertionError):
    aggregate.token_mean(np.ones((1, 1)), np.ones((1, 1)))
