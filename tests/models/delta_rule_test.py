"""The chunked delta rule against the recurrence, one token after another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.models import delta_rule

B, S, G, H, DK, DV = 2, 150, 2, 4, 5, 3


def recurrence(q, k, v, log_decays, rates, segment_ids, state=None):
  """The rule as it is written, in float64; with a state segment 0 is void."""
  q, k, v, log_decays, rates = (
    np.float64(x) for x in (q, k, v, log_decays, rates)
  )
  batch, length, heads, _ = v.shape
  outputs = np.zeros(v.shape)
  final = np.zeros((batch, heads, k.shape[-1], v.shape[-1]))
  for b in range(batch):
    for h in range(heads):
      kh = h // (heads // k.shape[2])
      matrix = np.zeros(final.shape[2:])
      if state is not None:
        matrix = np.float64(state[b, h])
      for t in range(length):
        if state is not None and segment_ids[b, t] == 0:
          continue
        new = t > 0 and segment_ids[b, t] != segment_ids[b, t - 1]
        if state is None and new:
          matrix = np.zeros_like(matrix)
        matrix = np.exp(log_decays[b, t, h]) * matrix
        key = k[b, t, kh]
        update = rates[b, t, h] * (v[b, t, h] - matrix.T @ key)
        matrix = matrix + np.outer(key, update)
        outputs[b, t, h] = matrix.T @ q[b, t, kh]
      final[b, h] = matrix
  return outputs, final


def inputs(seed=0, length=S, decay=1.0):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  keys = normal(B, length, G, DK)
  keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
  return {
    'queries': normal(B, length, G, DK),
    'keys': keys,
    'values': normal(B, length, H, DV),
    'log_decays': -decay * np.abs(normal(B, length, H)),
    'rates': rng.uniform(size=(B, length, H)).astype(np.float32),
  }


def by_hand(arrays, segment_ids, state=None):
  return recurrence(*arrays.values(), segment_ids, state)


def segments(*lengths):
  return np.stack(
    [np.repeat(np.arange(1, len(row) + 1), row) for row in lengths]
  )


@pytest.mark.parametrize('decay', [0.0, 0.05, 1.0, 30.0])
def test_packed_segments_are_what_the_recurrence_gives(decay):
  arrays = inputs(decay=decay)
  # A boundary within a chunk, at a chunk's end, and segments of one token.
  ids = segments([1, 62, 1, 64, 22], [150])
  outputs, state = jax.jit(delta_rule.delta_rule)(**arrays, segment_ids=ids)
  wanted, final = by_hand(arrays, ids)
  np.testing.assert_allclose(outputs, wanted, atol=2e-5)
  np.testing.assert_allclose(state, final, atol=2e-5)


@pytest.mark.parametrize('length', [1, 2, 7, 64, 65])
def test_it_goes_on_from_a_state_and_skips_what_is_not_there(length):
  arrays = inputs(1, length)
  state = np.random.default_rng(2).normal(size=(B, H, DK, DV))
  state = state.astype(np.float32)
  there = np.ones((B, length), np.int32)
  there[1, length // 2 :] = 0
  outputs, after = jax.jit(delta_rule.delta_rule)(
    **arrays, segment_ids=there, state=state
  )
  wanted, final = by_hand(arrays, there, state)
  np.testing.assert_allclose(
    np.where(there[..., None, None], outputs, 0), wanted, atol=2e-5
  )
  np.testing.assert_allclose(after, final, atol=2e-5)
  if length == 1:
    np.testing.assert_array_equal(after[1], state[1])


def test_repeated_keys_at_full_rate_keep_their_digits():
  """Where powers of the chunk's matrix would reach 10^18 and cancel."""
  arrays = inputs(3, decay=0.0)
  arrays['keys'] = np.broadcast_to(arrays['keys'][:, :1], arrays['keys'].shape)
  arrays['rates'] = np.ones_like(arrays['rates'])
  ids = np.ones((B, S), np.int32)
  outputs, _ = delta_rule.delta_rule(**arrays, segment_ids=ids)
  np.testing.assert_allclose(outputs, by_hand(arrays, ids)[0], atol=2e-5)


def test_gradients_are_those_of_the_recurrence():
  arrays = inputs(4, 70, decay=0.3)
  ids = segments([30, 40], [70])
  rng = np.random.default_rng(5)
  weights = rng.normal(size=(B, 70, H, DV)).astype(np.float32)

  def chunked(arrays):
    outputs, _ = delta_rule.delta_rule(**arrays, segment_ids=ids)
    return (outputs * weights).sum()

  gradients = jax.jit(jax.grad(chunked))(arrays)
  for name, gradient in gradients.items():
    direction = rng.normal(size=gradient.shape)
    step = 1e-6
    ends = [
      by_hand(
        arrays | {name: np.float64(arrays[name]) + move * direction}, ids
      )[0]
      for move in (-step, step)
    ]
    slope = ((ends[1] - ends[0]) * weights).sum() / (2 * step)
    np.testing.assert_allclose(
      (np.float64(gradient) * direction).sum(), slope, rtol=1e-4
    )


def test_garbage_in_another_segment_changes_nothing():
  arrays = inputs(6, 80)
  ids = segments([30, 50], [80])
  clean, _ = delta_rule.delta_rule(**arrays, segment_ids=ids)
  for name, array in arrays.items():
    if name == 'values':
      array[0, :30] = 1e30
    else:
      array[0, :30] = array[0, 30:60]
  dirty, _ = delta_rule.delta_rule(**arrays, segment_ids=ids)
  np.testing.assert_array_equal(dirty[0, 30:], clean[0, 30:])
  assert not np.array_equal(dirty[0, :30], clean[0, :30])


def test_ranks_are_checked():
  arrays = inputs(7, 8)
  arrays['rates'] = arrays['rates'][..., 0]
  with pytest.raises(AssertionError):
    delta_rule.delta_rule(**arrays, segment_ids=jnp.ones((B, 8), jnp.int32))
