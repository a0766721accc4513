import functools
import itertools

import hypothesis
import hypothesis.strategies as st
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


def _one_per_row(mask):
  """Ids [B, S] of one trajectory a row and their number."""
  ids = np.repeat(np.arange(len(mask), dtype=np.int32), mask.shape[1])
  return ids.reshape(mask.shape), len(mask)


def _quotient(sums):
  return sums[0] / sums[1]


def test_g01_means_over_trajectories(vectors):
  vector = vectors['G01_agg']
  loss = np.array(vector['inputs']['loss'], np.float32)
  mask = np.array(vector['inputs']['mask'], bool)
  ids, number = _one_per_row(mask)
  expected = vector['expected']
  got = aggregate.seq_mean_token_sum(loss, mask, ids, num_trajectories=number)
  assert _quotient(got) == expected['seq-mean-token-sum']
  got = aggregate.seq_mean_token_sum_norm(
    loss, mask, ids, num_trajectories=number, norm=4
  )
  assert _quotient(got) == expected['seq-mean-token-sum-norm(4)']
  got = aggregate.seq_mean_token_mean(loss, mask, ids, num_trajectories=number)
  assert _quotient(got) == expected['seq-mean-token-mean']
  np.testing.assert_allclose(
    got[0] / 3, expected['seq-mean-token-mean, denom=global_batch 3'], rtol=1e-6
  )


def test_token_sum_is_the_sum(vectors):
  vector = vectors['G01_agg']
  loss = np.array(vector['inputs']['loss'], np.float32)
  mask = np.array(vector['inputs']['mask'], bool)
  assert aggregate.token_sum(loss, mask) == (40, 1)
  assert aggregate.token_sum(loss[:1], mask[:1], total_tokens=8) == (10, 0.5)
  assert aggregate.token_sum(loss[2:], mask[2:]) == (0, 0)


def test_agg03_mean_of_means_does_not_know_the_number_of_devices(cases):
  case = cases['AGG-03']
  sequences = case['input']['global_sequences']
  mask = np.arange(7) < (1 + np.arange(sequences) % 7)[:, None]
  ids, number = _one_per_row(mask)
  for devices in (1, 2, 4, 8):
    parts = [
      aggregate.seq_mean_token_mean(
        rows.astype(np.float32), rows, part_ids, num_trajectories=number
      )
      for rows, part_ids in zip(
        np.split(mask, devices), np.split(ids, devices), strict=True
      )
    ]
    numerator, count = (sum(part) for part in zip(*parts, strict=True))
    assert numerator / count == case['expected']['loss_all_modes']
    assert count == sequences


def test_k01_means_are_of_segments_and_not_of_rows(vectors):
  vector = vectors['K01_packing']
  inputs = vector['inputs']
  segment_ids = np.array([inputs['segment_ids']], np.int32)
  got = aggregate.seq_mean_token_mean(
    np.array([inputs['logratio']], np.float32),
    np.array([inputs['mask']], bool),
    np.where(segment_ids > 0, segment_ids - 1, 3),
    num_trajectories=3,
  )
  assert got[1] == vector['expected']['n_active']
  np.testing.assert_allclose(
    _quotient(got), vector['expected']['seq_mean_token_mean'], rtol=1e-6
  )


@pytest.mark.parametrize(
  'function',
  [
    aggregate.seq_mean_token_sum,
    functools.partial(aggregate.seq_mean_token_sum_norm, norm=3.0),
    aggregate.seq_mean_token_mean,
  ],
)
def test_packed_rows_and_spanning_trajectories(function):
  values = np.array([[1, 2, 30, np.nan], [4, 5, 60, 7]], np.float32)
  mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
  ids = np.array([[0, 0, 1, 2], [1, 1, 0, 0]], np.int32)
  apart = np.array([[1, 2, 60, 7], [30, 4, 5, np.nan]], np.float32)
  apart_mask = np.isfinite(apart)
  packed = function(values, mask, ids, num_trajectories=2)
  unpacked = function(
    apart, apart_mask, _one_per_row(apart_mask)[0], num_trajectories=2
  )
  assert packed == unpacked
  empty = function(values, np.zeros_like(mask), ids, num_trajectories=2)
  assert empty == (0, 0)


_aggregations = [
  lambda v, m, i, n: aggregate.token_mean(v, m),
  lambda v, m, i, n: aggregate.token_sum(v, m, total_tokens=n),
  lambda v, m, i, n: aggregate.seq_mean_token_sum(v, m, i, num_trajectories=6),
  lambda v, m, i, n: aggregate.seq_mean_token_sum_norm(
    v, m, i, num_trajectories=6, norm=5.0
  ),
  lambda v, m, i, n: aggregate.seq_mean_token_mean(v, m, i, num_trajectories=6),
]


@pytest.mark.parametrize('aggregation', _aggregations)
@hypothesis.given(
  seed=st.integers(0, 1000), cuts=st.sets(st.integers(1, 5), max_size=4)
)
@hypothesis.settings(deadline=None, max_examples=8)
def test_sums_and_gradients_of_parts_are_the_whole(aggregation, seed, cuts):
  rng = np.random.default_rng(seed)
  values = rng.normal(size=(6, 4)).astype(np.float32)
  mask = rng.random((6, 4)) < 0.6
  ids = _one_per_row(mask)[0]
  tokens = mask.sum()

  def loss(values, rows):
    return aggregation(values, mask[rows], ids[rows], tokens)

  differentiated = jax.value_and_grad(loss, has_aux=True)
  edges = [0, *sorted(cuts), 6]
  parts = [
    differentiated(values[a:b], slice(a, b))
    for a, b in itertools.pairwise(edges)
  ]
  (numerator, count), gradient = differentiated(values, slice(0, 6))
  sums = np.sum([value for value, _ in parts], axis=0)
  np.testing.assert_allclose(sums, [numerator, count], atol=1e-5)
  np.testing.assert_allclose(
    np.concatenate([part for _, part in parts]), gradient, rtol=1e-6
  )


@pytest.mark.parametrize('garbage', [np.nan, np.inf, 1e30])
@pytest.mark.parametrize('aggregation', _aggregations)
def test_masked_slots_reach_no_aggregation(aggregation, garbage):
  mask = np.array([[True, False, True]])
  ids = np.zeros((1, 3), np.int32)
  total = lambda x: aggregation(x, mask, ids, 2)[0]
  clean, dirty = (
    jax.value_and_grad(total)(np.array([[3.0, slot, 2.0]], np.float32))
    for slot in (0.0, garbage)
  )
  assert clean[0] == dirty[0]
  np.testing.assert_array_equal(clean[1], dirty[1])


@pytest.mark.parametrize('norm', [0.0, -1.0, np.nan])
def test_a_norm_that_is_not_positive_is_refused(norm):
  mask = np.ones((1, 2), bool)
  with pytest.raises(ValueError, match='norm'):
    aggregate.seq_mean_token_sum_norm(
      np.ones((1, 2), np.float32),
      mask,
      np.zeros((1, 2), np.int32),
      num_trajectories=1,
      norm=norm,
    )
