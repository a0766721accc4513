import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.kernels import token_logprobs

# Two rows of three tokens over three words; log-odds made for hand work.
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


def test_by_hand():
  got = token_logprobs.token_logprobs(LOGITS, TOKENS, MASK)
  # p(1 | row 0 logits at 0) = 2/4, p(0 | at 1) = 1/8, p(1 | row 1 at 1) = 3/8.
  expected = [[0, np.log(2 / 4), np.log(1 / 8)], [0, 0, np.log(3 / 8)]]
  np.testing.assert_allclose(got, expected, rtol=1e-6)
  assert got.dtype == jnp.float32


def test_temperature_divides_the_logits():
  got = token_logprobs.token_logprobs(LOGITS, TOKENS, MASK, temperature=0.5)
  # The odds are squared: 4 of 1 + 4 + 1, 1 of 1 + 1 + 36, 9 of 1 + 9 + 16.
  expected = [[0, np.log(4 / 6), np.log(1 / 38)], [0, 0, np.log(9 / 26)]]
  np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_first_token_and_the_last_logits_are_not_used():
  everything = np.ones_like(MASK)
  got = token_logprobs.token_logprobs(LOGITS, TOKENS, everything)
  np.testing.assert_array_equal(got[:, 0], 0)
  tokens, logits = TOKENS.copy(), LOGITS.copy()
  tokens[:, 0] = 1
  logits[:, -1] = 1e9
  again = token_logprobs.token_logprobs(logits, tokens, everything)
  np.testing.assert_array_equal(again, got)


def test_the_probabilities_of_all_tokens_sum_to_one():
  rng = np.random.default_rng(0)
  logits = rng.normal(0, 3, (1, 2, 5)).astype(np.float32)
  mask = np.array([[False, True]])
  total = sum(
    np.exp(
      token_logprobs.token_logprobs(
        logits, np.array([[0, token]], np.int32), mask, temperature=0.7
      )[0, 1]
    )
    for token in range(5)
  )
  np.testing.assert_allclose(total, 1, rtol=1e-6)


@pytest.mark.parametrize('shift', [-1e4, 1e4])
def test_large_logits_stay_exact(shift):
  logits = np.array([[[shift, shift + 1], [0, 0]]], np.float32)
  got = token_logprobs.token_logprobs(
    logits, np.array([[0, 0]], np.int32), np.array([[False, True]])
  )
  np.testing.assert_allclose(got, [[0, -np.log1p(np.e)]], rtol=1e-5)


def test_bfloat16_logits_are_summed_in_float32():
  logits = jnp.zeros((1, 2, 1001), jnp.bfloat16)
  got = token_logprobs.token_logprobs(
    logits, np.array([[0, 7]], np.int32), np.array([[False, True]])
  )
  np.testing.assert_allclose(got, [[0, -np.log(1001)]], rtol=1e-6)


@pytest.mark.parametrize('garbage', [np.inf, -np.inf, 1e30])
def test_masked_slots_reach_no_value(garbage):
  logits = LOGITS.copy()
  logits[1, 0] = garbage  # predicts a token outside the mask
  got = token_logprobs.token_logprobs(logits, TOKENS, MASK)
  clean = token_logprobs.token_logprobs(LOGITS, TOKENS, MASK)
  np.testing.assert_array_equal(got, clean)


def test_the_gradient_is_one_hot_minus_softmax():
  @jax.jit
  @jax.grad
  def gradient(logits):
    return token_logprobs.token_logprobs(
      logits, TOKENS, MASK, temperature=2.0
    ).sum()

  expected = np.zeros_like(LOGITS)
  for row, column in ((0, 1), (0, 2), (1, 2)):
    odds = np.exp(LOGITS[row, column - 1] / 2)
    one_hot = np.eye(3)[TOKENS[row, column]]
    expected[row, column - 1] = (one_hot - odds / odds.sum()) / 2
  np.testing.assert_allclose(gradient(jnp.asarray(LOGITS)), expected, atol=1e-6)


@pytest.mark.parametrize('temperature', [0.0, -1.0])
def test_a_temperature_must_be_positive(temperature):
  with pytest.raises(ValueError, match=rf'temperature \({temperature}\)'):
    token_logprobs.token_logprobs(LOGITS, TOKENS, MASK, temperature=temperature)


def test_shapes_must_agree():
  with pytest.raises(AssertionError):
    token_logprobs.token_logprobs(LOGITS[0], TOKENS, MASK)
  with pytest.raises(AssertionError):
    token_logprobs.token_logprobs(LOGITS, TOKENS[:, :2], MASK)
