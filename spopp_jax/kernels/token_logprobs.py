"""Log-probabilities of given tokens from logits."""

import chex
import jax
import jax.numpy as jnp


def token_logprobs(
  logits: jax.Array,
  tokens: jax.Array,
  mask: jax.Array,
  *,
  temperature: float = 1.0,
) -> jax.Array:
  """Returns log p(token_s | earlier tokens), aligned on the token itself.

  The first token of a row has no predecessor and gets 0. A mask that is set
  only inside segments, never on a segment's first token, keeps one segment's
  last state from scoring the next segment's first token.

  Args:
    logits: [B, S, V] float; entry `s` predicts token `s + 1`.
    tokens: [B, S] int32.
    mask: [B, S] bool; True where a log-probability is wanted.
    temperature: > 0; logits are divided by it, as the sampler did.

  Returns:
    [B, S] float32 nats; 0 where the mask is False.

  Raises:
    ValueError: temperature is not positive.
  """
  chex.assert_rank([logits, tokens, mask], [3, 2, 2])
  chex.assert_equal_shape_prefix([logits, tokens, mask], 2)
  if temperature <= 0:
    raise ValueError(f'temperature ({temperature}) must be positive')
  scaled = jnp.asarray(logits[:, :-1], jnp.float32) / temperature
  # Shifted first: a difference of large numbers would lose its digits.
  top = jax.lax.stop_gradient(scaled.max(axis=-1, keepdims=True))
  shifted = scaled - top
  chosen = jnp.take_along_axis(shifted, tokens[:, 1:, None], axis=-1)[..., 0]
  logprobs = chosen - jnp.log(jnp.exp(shifted).sum(axis=-1))
  logprobs = jnp.pad(logprobs, ((0, 0), (1, 0)))
  return jnp.where(mask, logprobs, 0.0)
