import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import second_moment_mask


def _mask(log_ratios, advantages, mask=None, threshold=0.04, **options):
  log_ratios = np.atleast_2d(np.asarray(log_ratios, np.float32))
  if mask is None:
    mask = np.ones(log_ratios.shape, bool)
  return second_moment_mask.second_moment_mask(
    log_ratios,
    np.broadcast_to(np.asarray(advantages, np.float32), log_ratios.shape),
    mask,
    threshold=threshold,
    **options,
  )


def _loop(log_ratios, advantages, mask, threshold):
  """The published loop, one token at a time, in float64."""
  x = np.asarray(log_ratios, np.float64)
  trusted = mask & (((advantages > 0) & (x > 0)) | ((advantages < 0) & (x < 0)))
  kept = mask.copy()
  while (left := trusted & kept).any() and (x[left] ** 2).mean() > threshold:
    largest = np.argmax(np.where(left, x**2, -1))
    kept.flat[largest] = False
  return kept


def test_m01_paper(vectors):
  vector = vectors['M01_m2po']
  inputs, expected = vector['inputs'], vector['expected']
  got = _mask(inputs['log_ratio'], inputs['A'], threshold=inputs['tau'])
  np.testing.assert_array_equal(got.kept[0], expected['paper_keep'])
  np.testing.assert_allclose(got.second_moment, expected['m2_trust'], rtol=1e-6)
  np.testing.assert_allclose(
    got.kept_second_moment, expected['m2_after_paper'], rtol=1e-6
  )
  assert not got.all_masked
  terms = np.exp(inputs['log_ratio']) * np.array(inputs['A'])
  loss = -np.mean(np.where(got.kept[0], terms, 0))
  np.testing.assert_allclose(
    loss, expected['paper_loss_all_token_denominator'], rtol=1e-6
  )


def test_m01_areal_ignores_the_sign(vectors):
  vector = vectors['M01_m2po']
  got = _mask(
    vector['inputs']['log_ratio'], vector['inputs']['A'], variant='areal'
  )
  np.testing.assert_array_equal(
    got.kept[0], vector['expected']['areal_keep_all_tokens']
  )


def test_m01_official_cap_also_drops_what_it_caps_at(vectors):
  vector = vectors['M01_m2po']
  got = _mask(
    vector['inputs']['log_ratio'], vector['inputs']['A'], variant='official_cap'
  )
  np.testing.assert_array_equal(
    got.kept[0], vector['expected']['official_grad_keep']
  )


@pytest.mark.parametrize('seed', range(6))
def test_official_cap_is_the_largest_value_that_caps_within_budget(seed):
  rng = np.random.default_rng(seed)
  x = rng.choice([0.05, 0.1, 0.17, 0.23, 0.41, 0.8], 12).astype(np.float32)
  squares = np.float64(x) ** 2
  caps = [c for c in squares if np.minimum(squares, c).mean() < 0.04]
  kept = squares < max(caps, default=0)
  if squares.mean() <= 0.04:
    kept[:] = True
  got = _mask(x, 1.0, variant='official_cap')
  np.testing.assert_array_equal(got.kept[0], kept)


def test_official_cap_within_budget_or_beyond_any_cap():
  assert _mask([0.1, 0.25], 1.0, variant='official_cap').kept.all()
  got = _mask([0.3, 0.4], 1.0, variant='official_cap')
  assert got.all_masked


@pytest.mark.parametrize('variant', ['paper', 'areal'])
def test_m03_nothing_fits(vectors, variant):
  vector = vectors['M03_m2po_edge']
  got = _mask(
    vector['inputs']['log_ratio'], vector['inputs']['A'], variant=variant
  )
  np.testing.assert_array_equal(
    got.kept[0], vector['expected'][f'{variant}_keep']
  )
  assert got.all_masked == (variant == 'paper')


@pytest.mark.parametrize('row', [0, 1])
def test_m2po01_largest_first_until_the_mean_fits(cases, row):
  case = cases['M2PO-01']
  squares = np.array(case['input']['squared_log_ratio'][row])
  got = _mask(np.sqrt(squares), 1.0, threshold=case['input']['tau'])
  num_masked = case['expected']['tokens_masked'][row]
  assert (~got.kept).sum() == num_masked
  assert not got.kept[0, :num_masked].any()
  assert got.all_masked == (num_masked == squares.size)


@pytest.mark.parametrize('seed', range(4))
def test_equals_the_published_loop(seed):
  random = np.random.default_rng(seed)
  shape = (3, 17)
  log_ratios = random.normal(size=shape).astype(np.float32) * 0.4
  advantages = random.choice([-1.0, 0.0, 0.5], size=shape)
  mask = random.random(shape) < 0.8
  got = _mask(log_ratios, advantages, mask)
  want = _loop(log_ratios, advantages, mask, 0.04)
  assert 0 < (mask & ~want).sum() < mask.sum()
  np.testing.assert_array_equal(got.kept, want)
  assert got.kept_second_moment <= 0.04

  order = random.permutation(log_ratios.size)
  moved = lambda array: array.reshape(-1)[order].reshape(shape)
  permuted = _mask(moved(log_ratios), moved(advantages), moved(mask))
  np.testing.assert_array_equal(permuted.kept, moved(np.asarray(got.kept)))


def test_the_mask_is_of_the_minibatch_not_of_a_microbatch():
  # Alone the second row would lose its token; with the first it keeps it.
  log_ratios = [[0.05, 0.05, 0.05], [0.3, 0.0, 0.0]]
  assert _mask(log_ratios, 1.0).kept.all()
  assert not _mask(log_ratios[1:], 1.0).kept[0, 0]


def test_tokens_outside_the_trust_region_are_never_masked():
  got = _mask([9.0, -9.0, 9.0, 0.0, 0.5], [-1.0, 1.0, 0.0, 1.0, 1.0])
  np.testing.assert_array_equal(got.kept, [[1, 1, 1, 1, 0]])
  assert got.all_masked
  np.testing.assert_allclose(got.second_moment, 0.25)


def test_of_equal_tokens_no_more_go_than_must():
  # Mean 0.06; without one of the two 0.03 fits.
  got = _mask(np.sqrt([0.09, 0.09, 0.0001, 0.0001]), 1.0, threshold=0.0301)
  np.testing.assert_array_equal(got.kept, [[0, 1, 1, 1]])


@pytest.mark.parametrize('variant', ['paper', 'official_cap', 'areal'])
@pytest.mark.parametrize('garbage', [np.nan, np.inf, -np.inf, 1e30])
def test_masked_slots_change_nothing(garbage, variant):
  x, advantages = [0.1, 0.5, garbage], [1.0, 1.0, garbage]
  mask = np.array([[True, True, False]])
  got = _mask(x, advantages, mask, variant=variant)
  if variant == 'official_cap':  # 0.01 caps, and is dropped with what it caps
    np.testing.assert_array_equal(got.kept, [[0, 0, 0]])
    return
  np.testing.assert_array_equal(got.kept, [[1, 0, 0]])
  np.testing.assert_allclose(got.second_moment, 0.13, rtol=1e-6)
  np.testing.assert_allclose(got.kept_second_moment, 0.01, rtol=1e-6)


@pytest.mark.parametrize('variant', ['paper', 'official_cap', 'areal'])
def test_nothing_counted(variant):
  got = _mask([0.5, 0.5], 1.0, np.zeros((1, 2), bool), variant=variant)
  assert not got.kept.any()
  assert not got.all_masked
  assert (got.second_moment, got.kept_second_moment) == (0, 0)


def test_far_off_policy_tokens_go_first():
  got = _mask([1e4, 0.1, -1e4], 1.0)
  np.testing.assert_array_equal(got.kept, [[0, 1, 1]])
  assert np.isfinite(got.second_moment)


def test_jit_vmap_and_gradient():
  function = lambda x: second_moment_mask.second_moment_mask(
    x, jnp.ones_like(x), jnp.ones(x.shape, bool), threshold=0.04
  )
  x = jnp.asarray([[0.1, 0.5, 0.2], [0.1, 0.15, 0.1]])
  np.testing.assert_array_equal(jax.jit(function)(x).kept, function(x).kept)
  each = jax.vmap(function)(x[:, None])
  np.testing.assert_array_equal(each.kept[:, 0], [[1, 0, 1], [1, 1, 1]])
  gradient = jax.grad(
    lambda x: (
      jnp.where(function(x).kept, x, 0).sum() + function(x).second_moment
    )
  )(x)
  np.testing.assert_array_equal(gradient, [[1, 0, 1], [1, 1, 1]])


def test_a_mapped_axis_gives_the_mask_of_all_rows():
  log_ratios = jnp.asarray([[0.3, 0.3, 0.05], [0.3, 0.1, -9.0]])
  whole = _mask(log_ratios, 1.0)
  mapped = jax.vmap(
    lambda x: second_moment_mask.second_moment_mask(
      x,
      jnp.ones_like(x),
      jnp.ones(x.shape, bool),
      threshold=0.04,
      axis_name='rows',
    ),
    axis_name='rows',
  )(log_ratios[:, None])
  np.testing.assert_array_equal(whole.kept, [[0, 0, 1], [1, 1, 1]])
  np.testing.assert_array_equal(mapped.kept[:, 0], whole.kept)
  np.testing.assert_allclose(
    mapped.kept_second_moment, [whole.kept_second_moment] * 2
  )


def test_misuse_is_refused():
  with pytest.raises(ValueError, match=r'threshold \(0\) must exceed 0'):
    _mask([0.1], 1.0, threshold=0)
  with pytest.raises(ValueError, match="'official' must be one of"):
    _mask([0.1], 1.0, variant='official')
  with pytest.raises(AssertionError):
    _mask([0.1], 1.0, mask=np.ones((1, 1), np.float32))


@pytest.mark.parametrize('nan', [np.nan, -np.nan])
def test_nan_of_either_sign_counts_as_the_largest(nan):
  got = _mask([0.1, nan, 0.1], 1.0, variant='areal')
  np.testing.assert_array_equal(got.kept[0], [True, False, True])


@pytest.mark.parametrize('steps', range(8))
def test_neighbouring_values_are_told_apart(steps):
  bits = np.float32(0.7072).view(np.int32) + np.array([steps, steps + 1])
  x = bits.astype(np.int32).view(np.float32)
  squares = x * x
  assert squares[1] > squares[0]
  got = _mask(x, 1.0, threshold=float(squares[0]))
  np.testing.assert_array_equal(got.kept[0], [True, False])


def test_official_cap_stays_below_the_threshold():
  # Capped at .5^2 the mean is the threshold itself, so .25^2 is the cap.
  threshold = (0.25**2 + 2 * 0.5**2) / 3
  got = _mask([0.25, 0.5, 1], 1.0, threshold=threshold, variant='official_cap')
  assert not got.kept.any()
