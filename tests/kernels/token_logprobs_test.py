import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import token_logprobs


# Two rows of three tokens over three words; log-odds made for hand work.
@pytest.fixture(scope='module', autouse=True)
def _quick_compilation():
  """Tiny programs run as fast, and compile in less time."""
  name = 'jax_disable_most_optimizations'
  before = jax.config.values[name]
  jax.config.update(name, True)
  yield
  jax.config.update(name, before)


LOGITS = np.log(
  np.array(
    [
      [[1, 2, 1], [1, 1, 6], [9, 9, 9]],
      [[4, 4, 2], [1, 3, 4], [9, 9, 9]],
    ],
    np.float32,
  )
)
TOKENS = np.array([[2, 1, 0], [0, 2, 1]], np.int32)
MASK = np.array([[0, 1, 1], [0, 0, 1]], bool)


@functools.partial(jax.jit, static_argnames=('temperature', 'chunk_tokens'))
def score(logits, tokens=TOKENS, mask=MASK, temperature=1.0, chunk_tokens=4):
  """Scores from logits, as hidden states that the identity maps to them."""
  return token_logprobs.token_logprobs(
    logits,
    jnp.eye(logits.shape[-1], dtype=logits.dtype),
    tokens,
    mask,
    np.zeros((*tokens.shape, 0), np.int32),
    temperature=temperature,
    chunk_tokens=chunk_tokens,
    with_entropy=True,
  )


def naive(hidden, matrix, tokens, mask, kept_ids, *, temperature=1.0):
  """All logits at once; a forbidden word's logit is far below all others."""
  states = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
  logits = jnp.einsum('bsd,vd->bsv', states, matrix) / temperature
  words = jnp.arange(matrix.shape[0])[None, None, None]
  kept = (kept_ids[..., None] == words).any(axis=2)
  kept |= (kept_ids < 0).all(axis=2)[..., None]
  inside = jax.nn.log_softmax(jnp.where(kept, logits, -1e30))
  whole = jax.nn.log_softmax(logits)
  mask &= (jnp.arange(mask.shape[1]) > 0)[None]
  only = lambda values: jnp.where(mask, values, 0)
  return token_logprobs.TokenScores(
    logprobs=only(
      jnp.take_along_axis(inside, tokens[..., None], axis=2)[..., 0]
    ),
    log_kept_mass=only(jax.nn.logsumexp(jnp.where(kept, whole, -1e30), axis=2)),
    entropy=only(-(jnp.exp(inside) * inside).sum(axis=2)),
  )


chunked = functools.partial(token_logprobs.token_logprobs, with_entropy=True)


def differentiator(scores_of, **options):
  """Returns a function that gives scores, and gradients of a sum of them."""

  @jax.jit
  def run(hidden, matrix, tokens, mask, kept_ids, slopes):
    def total(hidden, matrix):
      scores = scores_of(hidden, matrix, tokens, mask, kept_ids, **options)
      return (slopes * jnp.stack(scores)).sum(), scores

    gradients, scores = jax.grad(total, argnums=(0, 1), has_aux=True)(
      hidden, matrix
    )
    return scores, gradients

  return run


def make_inputs(shape, seed=0):
  """Random arrays of [B, S, D, V, C]; about half the tokens are truncated."""
  batch, length, width, vocabulary, kept = shape
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, vocabulary, (batch, length)).astype(np.int32)
  ids = (tokens[..., None] + np.arange(kept, dtype=np.int32)) % vocabulary
  sizes = rng.integers(1, kept + 1, tokens.shape) if kept else 0 * tokens
  ids[np.arange(kept) >= sizes[..., None]] = -1
  ids[rng.random(tokens.shape) < 0.5] = -1
  return (
    rng.normal(0, 1.5, (batch, length, width)).astype(np.float32),
    rng.normal(0, 1, (vocabulary, width)).astype(np.float32),
    tokens,
    rng.permuted(ids, axis=2),
  )


def make_masks(batch, length):
  rng = np.random.default_rng(1)
  ragged = rng.random((batch, length)) < np.linspace(0, 0.9, batch)[:, None]
  return {
    'none': np.zeros((batch, length), bool),
    'all': np.ones((batch, length), bool),
    'ragged': ragged,
  }


def check(got, want, **tolerance):
  leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  for a, b in leaves:
    np.testing.assert_allclose(a, b, **tolerance)


def test_by_hand():
  got = score(LOGITS).logprobs
  # p(1 | row 0 logits at 0) = 2/4, p(0 | at 1) = 1/8, p(1 | row 1 at 1) = 3/8.
  expected = [[0, np.log(2 / 4), np.log(1 / 8)], [0, 0, np.log(3 / 8)]]
  np.testing.assert_allclose(got, expected, rtol=1e-6)
  assert got.dtype == jnp.float32


def test_temperature_divides_the_logits():
  got = score(LOGITS, temperature=0.5).logprobs
  # The odds are squared: 4 of 1 + 4 + 1, 1 of 1 + 1 + 36, 9 of 1 + 9 + 16.
  expected = [[0, np.log(4 / 6), np.log(1 / 38)], [0, 0, np.log(9 / 26)]]
  np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_entropy_by_hand():
  got = score(LOGITS, temperature=0.5).entropy
  entropy = lambda *odds: sum(
    -x / sum(odds) * np.log(x / sum(odds)) for x in odds
  )
  expected = [
    [0, entropy(1, 4, 1), entropy(1, 1, 36)],
    [0, 0, entropy(1, 9, 16)],
  ]
  np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_first_token_and_the_last_logits_are_not_used():
  everything = np.ones_like(MASK)
  got = score(LOGITS, mask=everything).logprobs
  np.testing.assert_array_equal(got[:, 0], 0)
  tokens, logits = TOKENS.copy(), LOGITS.copy()
  tokens[:, 0] = 1
  logits[:, -1] = 1e9
  again = score(logits, tokens, everything).logprobs
  np.testing.assert_array_equal(again, got)


def test_the_probabilities_of_all_tokens_sum_to_one():
  rng = np.random.default_rng(0)
  logits = rng.normal(0, 3, (5, 2, 5)).astype(np.float32)
  logits[:] = logits[0]
  tokens = np.array([[0, token] for token in range(5)], np.int32)
  mask = np.broadcast_to([[False, True]], (5, 2))
  got = score(logits, tokens, mask, temperature=0.7).logprobs
  np.testing.assert_allclose(np.exp(got[:, 1]).sum(), 1, rtol=1e-6)


@pytest.mark.parametrize('shift', [-1e4, 1e4])
def test_large_logits_stay_exact(shift):
  logits = np.array([[[shift, shift + 1], [0, 0]]], np.float32)
  tokens, mask = np.array([[0, 0]], np.int32), np.array([[False, True]])
  got = score(logits, tokens, mask).logprobs
  np.testing.assert_allclose(got, [[0, -np.log1p(np.e)]], rtol=1e-5)


@pytest.mark.parametrize(
  'shape, chunks',
  [
    ((3, 7, 5, 11, 0), (1, 7, 15)),
    ((4, 16, 8, 33, 5), (4, 20, 1000)),
    ((1, 2, 3, 5, 2), (1,)),
  ],
)
def test_values_and_gradients_equal_the_naive_ones(shape, chunks):
  hidden, matrix, tokens, ids = make_inputs(shape)
  rng = np.random.default_rng(2)
  slopes = rng.normal(0, 1, (3, *tokens.shape)).astype(np.float32)
  reference = differentiator(naive, temperature=0.7)
  for chunk_tokens in chunks:
    run = differentiator(chunked, temperature=0.7, chunk_tokens=chunk_tokens)
    for name, mask in make_masks(*tokens.shape).items():
      inputs = (hidden, matrix, tokens, mask, ids, slopes)
      got, want = run(*inputs), reference(*inputs)
      check(got, want, rtol=1e-5, atol=1e-5, err_msg=f'{chunk_tokens} {name}')
      moved = jax.tree.map(lambda x: np.abs(x).max(), want)
      if name == 'none':
        assert not any(jax.tree.leaves(moved))
      elif shape[-1] > 2:
        assert all(x > 1e-2 for x in jax.tree.leaves(moved))


def test_masked_slots_reach_nothing():
  shape = (4, 16, 8, 33, 5)
  hidden, matrix, tokens, ids = make_inputs(shape)
  mask = make_masks(*tokens.shape)['ragged']
  slopes = np.ones((3, *mask.shape), np.float32)
  run = differentiator(chunked, chunk_tokens=12)
  want = run(hidden, matrix, tokens, mask, ids, slopes)
  # State s predicts token s + 1; the last one and column 0 are never used.
  unused = ~np.roll(mask, -1, axis=1)
  unused[:, -1] = True
  mask[:, 0] = False
  for garbage in (np.nan, np.inf, 1e30):
    dirty = np.where(unused[..., None], np.float32(garbage), hidden)
    got = run(
      dirty,
      matrix,
      np.where(mask, tokens, -7),
      mask,
      np.where(mask[..., None], ids, 10**6),
      np.where(mask, slopes, np.float32(garbage)),
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
  assert unused.sum() > 20
  np.testing.assert_array_equal(want[1][0][unused], 0)


def test_the_gradient_is_one_hot_minus_softmax():
  gradient = jax.jit(
    jax.grad(lambda logits: score(logits, temperature=2.0).logprobs.sum())
  )
  expected = np.zeros_like(LOGITS)
  for row, column in ((0, 1), (0, 2), (1, 2)):
    odds = np.exp(LOGITS[row, column - 1] / 2)
    one_hot = np.eye(3)[TOKENS[row, column]]
    expected[row, column - 1] = (one_hot - odds / odds.sum()) / 2
  np.testing.assert_allclose(gradient(jnp.asarray(LOGITS)), expected, atol=1e-6)


def test_rows_may_be_reordered():
  shape = (4, 16, 8, 33, 5)
  hidden, matrix, tokens, ids = make_inputs(shape)
  mask = make_masks(*tokens.shape)['ragged']
  slopes = np.ones((3, *mask.shape), np.float32)
  run = differentiator(chunked, chunk_tokens=12)
  scores, (by_hidden, by_matrix) = run(
    hidden, matrix, tokens, mask, ids, slopes
  )
  order = np.array([2, 0, 3, 1])
  rows = (x[order] for x in (tokens, mask, ids))
  got = run(hidden[order], matrix, *rows, slopes)
  scores, by_hidden = jax.tree.map(lambda x: x[order], (scores, by_hidden))
  check(got, (scores, (by_hidden, by_matrix)), rtol=1e-5, atol=1e-6)


def test_vmap_equals_one_after_another():
  inputs = [make_inputs((2, 9, 4, 6, 3), seed) for seed in range(3)]
  hidden, _, tokens, ids = (np.stack(x) for x in zip(*inputs, strict=True))
  matrix = inputs[0][1]
  masks = np.stack(list(make_masks(2, 9).values()))
  slopes = np.ones((3, 2, 9), np.float32)
  run = differentiator(chunked, chunk_tokens=4)
  mapped = jax.vmap(run, in_axes=(0, None, 0, 0, 0, None))
  got = mapped(hidden, matrix, tokens, masks, ids, slopes)
  for i in range(3):
    want = run(hidden[i], matrix, tokens[i], masks[i], ids[i], slopes)
    check(jax.tree.map(lambda x, i=i: x[i], got), want, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_summed_in_float32():
  hidden, matrix, tokens, ids = make_inputs((4, 16, 8, 33, 5))
  hidden, matrix = (jnp.asarray(x, jnp.bfloat16) for x in (hidden, matrix))
  rest = (tokens, make_masks(4, 16)['ragged'], ids, np.ones((3, 4, 16)))
  run = differentiator(chunked, chunk_tokens=12)
  scores, gradients = run(hidden, matrix, *rest)
  exact = [jnp.asarray(x, jnp.float32) for x in (hidden, matrix)]
  want_scores, want_gradients = differentiator(naive)(*exact, *rest)
  check(scores, want_scores, rtol=1e-5, atol=1e-5)
  for got, want in zip(gradients, want_gradients, strict=True):
    assert got.dtype == jnp.bfloat16
    got = np.asarray(got, np.float32)
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


def test_many_chunks_of_a_bfloat16_gradient_lose_nothing():
  # In bfloat16 a running sum of equal terms stops at 256 of them.
  length = 1025
  run = differentiator(chunked, chunk_tokens=1)
  _, (_, gradient) = run(
    jnp.ones((1, length, 1), jnp.bfloat16),
    jnp.zeros((2, 1), jnp.bfloat16),
    np.zeros((1, length), np.int32),
    np.ones((1, length), bool),
    np.zeros((1, length, 0), np.int32),
    np.ones((3, 1, length), np.float32),
  )
  np.testing.assert_array_equal(np.asarray(gradient, 'f4'), [[512], [-512]])


def temporary_bytes(scores_of, length, **options):
  """Memory that the compiled value and gradient need besides arguments."""
  batch, width, vocabulary = 4, 8, 4096
  shape = (batch, length)
  arguments = [
    jax.ShapeDtypeStruct(*x)
    for x in (
      ((*shape, width), jnp.float32),
      ((vocabulary, width), jnp.float32),
      (shape, jnp.int32),
      (shape, bool),
      ((*shape, 2), jnp.int32),
      ((3, *shape), jnp.float32),
    )
  ]
  compiled = differentiator(scores_of, **options).lower(*arguments).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_tokens_times_vocabulary():
  short, long, batch, width, vocabulary = 32, 512, 4, 8, 4096
  growth = lambda scores_of, **options: (
    temporary_bytes(scores_of, long, **options)
    - temporary_bytes(scores_of, short, **options)
  )
  more_tokens = (long - short) * batch
  assert growth(chunked, chunk_tokens=64) < 4 * more_tokens * 4 * width
  assert growth(naive) > 4 * more_tokens * vocabulary


def test_only_counted_tokens_cost(monkeypatch):
  shapes = []
  logits_of = token_logprobs._logits

  def counted(chunk, output_matrix):
    jax.debug.callback(lambda: shapes.append(chunk.hidden.shape))
    return logits_of(chunk, output_matrix)

  monkeypatch.setattr(token_logprobs, '_logits', counted)
  hidden, matrix, tokens, ids = make_inputs((2, 16, 4, 6, 3))
  run = differentiator(chunked, chunk_tokens=8)
  slopes = np.ones((3, 2, 16), np.float32)
  rng = np.random.default_rng(0)
  for counts, chunks in (
    ((0, 0), 0),
    ((3, 1), 1),
    ((4, 7), 2),
    ((8, 15), 4),
  ):
    mask = np.zeros((2, 16), bool)
    for row, count in enumerate(counts):
      mask[row, 1 + rng.permutation(15)[:count]] = True
    jax.block_until_ready(run(hidden, matrix, tokens, mask, ids, slopes))
    jax.effects_barrier()
    # Once forward, once backward.
    assert shapes == [(8, 4)] * (2 * chunks)
    shapes.clear()


@pytest.mark.parametrize('temperature', [0.0, -1.0])
def test_a_temperature_must_be_positive(temperature):
  with pytest.raises(ValueError, match=rf'temperature \({temperature}\)'):
    score(LOGITS, temperature=temperature)


def test_a_chunk_holds_a_token_at_least():
  with pytest.raises(ValueError, match=r'chunk_tokens \(0\)'):
    score(LOGITS, chunk_tokens=0)


def test_shapes_must_agree():
  with pytest.raises(AssertionError):
    score(LOGITS[0])
  with pytest.raises(AssertionError):
    score(LOGITS, TOKENS[:, :2])
  with pytest.raises(AssertionError):
    score(LOGITS, mask=MASK.astype(int))
