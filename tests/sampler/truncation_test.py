import jax
import numpy as np
import pytest
from truncation_by_hand import by_hand

from spopp_jax.sampler import truncation

_truncate = jax.jit(truncation.truncate, static_argnames='width')


def truncate(
  logits, temperature=1.0, top_k=0, top_p=1.0, width=None, min_p=0.0
):
  """Truncates rows [B, V]; settings are one for all or one a row."""
  logits = np.atleast_2d(np.asarray(logits, np.float32))
  each = np.ones(len(logits), np.float32)
  result = _truncate(
    logits,
    temperature=each * np.asarray(temperature, np.float32),
    top_k=(each * top_k).astype(np.int32),
    top_p=each * np.asarray(top_p, np.float32),
    min_p=each * np.asarray(min_p, np.float32),
    width=width or logits.shape[1],
  )
  whole = jax.nn.softmax(logits / np.atleast_1d(temperature)[:, None])
  mass = np.where(result.kept, whole, 0).sum(axis=1)
  if np.isfinite(mass).all():
    np.testing.assert_allclose(np.exp(result.log_mass), mass, rtol=1e-5)
  return np.asarray(result.logprobs), np.asarray(result.kept)


def ids(kept):
  return [np.flatnonzero(row).tolist() for row in np.atleast_2d(kept)]


def test_the_token_that_crosses_top_p_is_kept():
  # TRUNC-01: .4 + .3 + .2 reach .9 exactly, in whatever order they are summed.
  probabilities = np.array([0.4, 0.3, 0.2, 0.08, 0.02])
  for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3]):
    logprobs, kept = truncate(np.log(probabilities[order]), top_p=0.9)
    assert ids(kept) == [sorted(order.index(i) for i in (0, 1, 2))]
    # Sampler and learner agree once both divide by the kept mass.
    exact = np.log(probabilities[order]) - np.log(0.9) - logprobs[0]
    np.testing.assert_allclose(exact[kept[0]], 0, atol=1e-6)
    proxy = np.exp(np.log(probabilities[order]) - logprobs[0])
    np.testing.assert_allclose(proxy[kept[0]], 0.9, rtol=1e-6)


@pytest.mark.parametrize(
  'top_k, top_p, expected',
  [
    (0, 0.6, [0, 1]),
    (2, 0.6, [0, 1]),  # 4/7 of what top-k left
    (2, 0.5, [0]),
    (3, 0.4, [0]),  # .444 of what top-k left
    (3, 0.45, [0, 1]),
    (3, 0.77, [0, 1]),  # .778 of what top-k left, .7 of the whole
    (3, 1.0, [0, 1, 2]),
    (0, 1e-9, [0]),
    (1, 1.0, [0]),
    (1, 0.01, [0]),
    (9, 1.0, [0, 1, 2, 3, 4]),
    (0, 0.98, [0, 1, 2, 3]),
    (0, 0.981, [0, 1, 2, 3, 4]),
  ],
)
def test_what_is_kept(top_k, top_p, expected):
  probabilities = np.array([0.4, 0.3, 0.2, 0.08, 0.02])
  logprobs, kept = truncate(np.log(probabilities), top_k=top_k, top_p=top_p)
  assert ids(kept) == [expected]
  share = probabilities[expected] / probabilities[expected].sum()
  np.testing.assert_allclose(np.exp(logprobs[0][expected]), share, rtol=1e-5)
  assert np.isneginf(np.delete(logprobs[0], expected)).all()


@pytest.mark.parametrize(
  'min_p, more, expected',
  [
    (0.5, {}, [0, 1, 2]),  # .2 is exactly half of .4
    (0.501, {}, [0, 1]),
    (0.05, {}, [0, 1, 2, 3, 4]),
    (1.0, {}, [0]),
    (1e-9, {}, [0, 1, 2, 3, 4]),
    (0.19, {}, [0, 1, 2, 3]),
    (0.5, {'top_k': 2}, [0, 1]),
    (0.19, {'top_p': 0.8}, [0, 1, 2]),
    # Min-p ahead of it would leave top-p two tokens, the first with 4/7.
    (0.7, {'top_p': 0.5}, [0, 1]),
  ],
)
def test_what_min_p_keeps(min_p, more, expected):
  probabilities = np.array([0.4, 0.3, 0.2, 0.08, 0.02])
  logprobs, kept = truncate(np.log(probabilities), min_p=min_p, **more)
  assert ids(kept) == [expected]
  share = probabilities[expected] / probabilities[expected].sum()
  np.testing.assert_allclose(np.exp(logprobs[0][expected]), share, rtol=1e-5)


@pytest.mark.parametrize('vocabulary', [3, 12, 50])
def test_a_mass_reaches_top_p_whatever_the_rounding(vocabulary):
  # Equal probabilities whose sums in float32 fall short of many a top_p.
  for count in range(1, vocabulary):
    kept = truncate(np.full(vocabulary, 1.7), top_p=count / vocabulary)[1]
    assert ids(kept) == [list(range(count))]


def test_temperature_comes_first():
  probabilities = np.array([0.4, 0.3, 0.2, 0.08, 0.02])
  logits = np.log(probabilities)
  # Squared they are .539, .303, .135, .022 and .001 of the whole.
  assert ids(truncate(logits, temperature=0.5, top_p=0.5)[1]) == [[0]]
  assert ids(truncate(logits, temperature=0.5, top_p=0.97)[1]) == [[0, 1, 2]]
  # Their square roots are .308, .267, .218, .138 and .069 of the whole.
  assert ids(truncate(logits, temperature=2.0, top_p=0.5)[1]) == [[0, 1]]
  assert len(ids(truncate(logits, temperature=2.0, top_p=0.97)[1])[0]) == 5


@pytest.mark.parametrize('zero', [0.0, -0.0])
def test_among_equals_the_lower_id_is_kept(zero):
  row = np.array([-1.0, zero, 0.0, -0.0, 0.0, 1.0])
  assert ids(truncate(row, top_k=3)[1]) == [[1, 2, 5]]
  assert ids(truncate(np.full(300, 0.5), top_k=7)[1]) == [list(range(7))]
  # Each of four has a quarter: two reach one half, the third crosses it.
  assert ids(truncate(np.zeros(4), top_p=0.5)[1]) == [[0, 1]]
  assert ids(truncate(np.zeros(4), top_p=0.51)[1]) == [[0, 1, 2]]


def random_rows(seed, rows, vocabulary):
  rng = np.random.default_rng(seed)
  # Rounded, so that rows have ties.
  logits = rng.normal(0, 2, (rows, vocabulary)).round(1)
  return (
    logits,
    rng.choice([0.3, 0.7, 1.0, 1.5], rows),
    rng.choice([0, 1, 2, 5, vocabulary, 1000], rows),
    rng.choice([1e-8, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0], rows),
  )


@pytest.mark.parametrize('vocabulary', [1, 2, 7, 60])
def test_mixed_rows_are_those_worked_by_hand(vocabulary):
  rows = random_rows(vocabulary, 200, vocabulary)
  logprobs, kept = truncate(*rows)
  for *row, logprob, mask in zip(*rows, logprobs, kept, strict=True):
    expected, values = by_hand(*row)
    assert np.flatnonzero(mask).tolist() == sorted(expected), row
    np.testing.assert_allclose(logprob[expected], values, atol=1e-5)
    assert np.isneginf(logprob[~mask]).all()
    np.testing.assert_allclose(np.exp(logprob).sum(), 1, rtol=1e-5)


def test_a_narrower_width_changes_nothing():
  logits, temperature, top_k, top_p = random_rows(3, 200, 60)
  unbounded = (top_k == 0) & (top_p < 1)
  top_k = np.where(unbounded | (top_k > 5), 5, top_k)
  assert (top_k == 0).any()  # rows with both off keep all
  settings = (logits, temperature, top_k, top_p)
  logprobs, kept = truncate(*settings)
  for width in (5, 8):
    narrow, same = truncate(*settings, width=width)
    np.testing.assert_array_equal(same, kept)
    np.testing.assert_allclose(narrow, logprobs, atol=1e-6)


def test_rows_that_are_off_keep_all():
  logits, temperature, _, _ = random_rows(4, 50, 60)
  logits, temperature = np.float32(logits), np.float32(temperature)
  top_k = np.arange(50) % 2
  logprobs, kept = truncate(logits, temperature, top_k=top_k, width=4)
  plain = jax.nn.log_softmax(logits / temperature[:, None])
  np.testing.assert_allclose(logprobs[::2], plain[::2], rtol=1e-5)
  assert kept[::2].all()
  assert (kept[1::2].sum(axis=1) == 1).all()


def test_nan_stays_nan():
  logits = np.zeros((3, 6))
  logits[0] = np.nan
  logprobs, kept = truncate(logits, top_k=[2, 2, 0], top_p=0.9)
  assert np.isnan(logprobs[0]).all()
  assert ids(kept[1:]) == [[0, 1], [0, 1, 2, 3, 4, 5]]
  np.testing.assert_allclose(np.exp(logprobs[1, :2]), 0.5, rtol=1e-6)


def test_rank_mistakes_are_refused():
  with pytest.raises(AssertionError):
    truncation.truncate(
      np.zeros(5, np.float32),
      temperature=np.ones(1, np.float32),
      top_k=np.ones(1, np.int32),
      top_p=np.ones(1, np.float32),
      min_p=np.zeros(1, np.float32),
      width=5,
    )
