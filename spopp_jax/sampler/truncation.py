"""Top-k, top-p, min-p: which tokens may be drawn, with what probability."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

# A mass this close below top_p has reached it: float32 sums are no closer, and
# probabilities .4, .3 and .2 must fill a top_p of .9.
_ROUNDING = 1e-6


class Truncated(NamedTuple):
  """The distribution that is sampled from.

  Attributes:
    logprobs: [B, V] float32 nats; log[pi(a) / pi(S)] for a in the kept set S,
      -inf outside.
    kept: [B, V] bool; S, never empty.
    log_mass: [B] float32 nats; log pi(S).
  """

  logprobs: jax.Array
  kept: jax.Array
  log_mass: jax.Array


def truncate(
  logits: jax.Array,
  *,
  temperature: jax.Array,
  top_k: jax.Array,
  top_p: jax.Array,
  min_p: jax.Array,
  width: int,
) -> Truncated:
  """Applies temperature, top-k, top-p, then min-p, to each row by itself.

  pi = softmax(logits / temperature). Top-k keeps the k most likely tokens.
  Top-p goes through them from the most likely on, with probabilities
  renormalised over those k, and keeps the smallest set whose mass reaches
  top_p: the token that crosses it is kept, and one token always is. Min-p
  keeps of these the tokens at least min_p times as likely as the most likely
  one. Among equal logits the lower id counts as more likely.

  Example: probabilities (.4, .3, .2, .08, .02) with top_p = .6 keep the first
  two; with top_k = 2 before it the first alone has mass 4/7 and so both stay;
  with top_p = .5 it would stay alone. With min_p = .5 the first two stay, by
  itself and after a top_p of .9.

  Args:
    logits: [B, V] float32.
    temperature: [B] float32 > 0.
    top_k: [B] int32 >= 0; 0 is off, V or more keeps all.
    top_p: [B] float32 in (0, 1]; 1 is off.
    min_p: [B] float32 in [0, 1]; 0 is off.
    width: in [1, V], static; the most tokens that a row which is not off in
      all may keep: at least its top_k, and V where it has no top_k.

  Returns:
    Log-probs, kept sets and their log mass. Rows with all off keep all and have
    the log-probs log_softmax(logits / temperature). NaN logits give NaN.
  """
  chex.assert_rank([logits, temperature], [2, 1])
  chex.assert_equal_shape([temperature, top_k, top_p, min_p])
  rows, vocabulary = logits.shape
  scaled = logits / temperature[:, None]
  # Among equals the lower index comes first, but -0.0 counts as less than 0.0.
  scaled = jnp.where(scaled == 0, 0.0, scaled)
  values, ids = jax.lax.top_k(scaled, width)
  rank = jnp.arange(width)[None, :]
  unbounded = top_k == 0
  candidate = (rank < top_k[:, None]) | unbounded[:, None]
  mass = jax.nn.softmax(jnp.where(candidate, values, -jnp.inf))
  mass_before = jnp.cumsum(mass, axis=1) - mass
  no_top_p, no_min_p = top_p >= 1, min_p <= 0
  within = (mass_before < top_p[:, None] - _ROUNDING) | no_top_p[:, None]
  below_best = values - values[:, :1]
  least = jnp.log(jnp.where(no_min_p, 1.0, min_p)) - _ROUNDING
  within &= (below_best >= least[:, None]) | no_min_p[:, None]
  chosen = candidate & (within | (rank == 0))
  kept = jnp.zeros((rows, vocabulary), bool)
  kept = kept.at[jnp.arange(rows)[:, None], ids].set(chosen)
  kept = kept | (unbounded & no_top_p & no_min_p)[:, None]
  remaining = jnp.where(kept, scaled, -jnp.inf)
  log_mass = jax.nn.logsumexp(remaining, axis=1) - jax.nn.logsumexp(
    scaled, axis=1
  )
  return Truncated(jax.nn.log_softmax(remaining), kept, log_mass)
