"""One compiled call of the engine: feeds queued tokens, then samples."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from spopp_jax import types
from spopp_jax.models import dense, parameters
from spopp_jax.sampler import truncation


class Settings(NamedTuple):
  """How one call samples for each slot.

  Attributes:
    budget: [B] int32; tokens to sample at most; 0 samples none.
    seed: [B] uint32; each slot's own stream.
    temperature: [B] float32.
    top_k: [B] int32 in [0, V]; 0 is off.
    top_p: [B] float32; 1 is off.
  """

  budget: types.Array
  seed: types.Array
  temperature: types.Array
  top_k: types.Array
  top_p: types.Array


class Turns(NamedTuple):
  """What one call samples for each slot.

  Attributes:
    tokens: [B, K] int32; 0 beyond the turn.
    logprobs: [B, K] float32 nats; 0 beyond the turn.
    kept: [B, K, V / 8] uint8; a bit an id that the token was drawn from, 0
      beyond the turn; [B, K, 0] when no slot truncates.
    counts: [B] int32; tokens of the turn so far.
    ended: [B] bool; the last one is a stop id.
    alive: [B] bool; more will be sampled.
  """

  tokens: types.Array
  logprobs: types.Array
  kept: types.Array
  counts: types.Array
  ended: types.Array
  alive: types.Array


def advance(
  params: parameters.Parameters,
  caches: tuple[dense.Cache, ...],
  feed: jax.Array,
  start: jax.Array,
  fed: jax.Array,
  settings: Settings,
  *,
  graphdef: nnx.GraphDef,
  stop_ids: tuple[int, ...],
  max_turn_tokens: int,
  attend_length: int,
  truncation_width: int,
) -> tuple[tuple[dense.Cache, ...], Turns]:
  """Feeds `feed` and samples a turn of each slot that has a budget.

  The last token of a turn is sampled but not fed: the next call feeds it.

  Args:
    params: the decoder's parameters by name.
    caches: one a layer, donated.
    feed: [B, C] int32 tokens to feed.
    start: [B] int32; position of the first fed token.
    fed: [B] int32; how many of `feed` are there.
    settings: how each slot samples.
    graphdef: the decoder's structure.
    stop_ids: static; a turn ends with the first of these.
    max_turn_tokens: static width K of the outputs.
    attend_length: static; cache positions read.
    truncation_width: static; the most tokens that a slot which truncates may
      keep; 0 when none does.

  Returns:
    The caches and what was sampled.
  """
  decoder = parameters.bind(graphdef, params)
  logits, caches = _feed(decoder, caches, feed, start, fed, attend_length)
  first = start + fed  # where the first sampled token stands
  keys = jax.vmap(jax.random.key)(settings.seed)

  def sample(step, logits, turns):
    logprobs, kept = _distribution(logits, settings, truncation_width)
    step_keys = jax.vmap(jax.random.fold_in)(keys, first + step)
    token = jax.vmap(jax.random.categorical)(step_keys, logprobs)
    chosen = jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]
    return _record(
      turns, step, (token, chosen, kept), settings.budget, stop_ids
    )

  def extend_and_sample(carry):
    step, turns, caches = carry
    token = jax.lax.dynamic_slice_in_dim(turns.tokens, step - 1, 1, axis=1)
    # Ended slots feed nothing: their position is none.
    position = jnp.where(turns.alive, first + step - 1, dense.ABSENT)
    hidden, caches = decoder.extend(
      token, position[:, None], caches, attend_length
    )
    turns = sample(step, decoder.logits(hidden[:, 0]), turns)
    return step + 1, turns, caches

  num_bytes = -(-logits.shape[1] // 8) if truncation_width else 0
  none = _no_turns(settings.budget, max_turn_tokens, num_bytes)
  _, turns, caches = jax.lax.while_loop(
    lambda carry: carry[1].alive.any(),
    extend_and_sample,
    (jnp.int32(1), sample(0, logits, none), caches),
  )
  return caches, turns


def _feed(
  decoder: dense.Decoder,
  caches: tuple[dense.Cache, ...],
  feed: jax.Array,
  start: jax.Array,
  fed: jax.Array,
  attend_length: int,
) -> tuple[jax.Array, tuple[dense.Cache, ...]]:
  """Feeds queued tokens; returns the logits [B, V] after the last of each."""
  offsets = jnp.arange(feed.shape[1])[None, :]
  positions = jnp.where(
    offsets < fed[:, None], start[:, None] + offsets, dense.ABSENT
  )
  hidden, caches = decoder.extend(feed, positions, caches, attend_length)
  last = jnp.maximum(fed - 1, 0)[:, None, None]
  final = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
  return decoder.logits(final), caches


def _distribution(
  logits: jax.Array, settings: Settings, truncation_width: int
) -> tuple[jax.Array, jax.Array]:
  """Returns log-probs [B, V] to sample from and the bits of what was kept."""
  if not truncation_width:
    temperature = settings.temperature[:, None]
    nothing = jnp.zeros((len(logits), 0), jnp.uint8)
    return jax.nn.log_softmax(logits / temperature), nothing
  logprobs, kept = truncation.truncate(
    logits,
    temperature=settings.temperature,
    top_k=settings.top_k,
    top_p=settings.top_p,
    width=truncation_width,
  )
  return logprobs, jnp.packbits(kept, axis=1)


def _no_turns(budget: jax.Array, max_turn_tokens: int, num_bytes: int) -> Turns:
  shape = (len(budget), max_turn_tokens)
  return Turns(
    tokens=jnp.zeros(shape, jnp.int32),
    logprobs=jnp.zeros(shape, jnp.float32),
    kept=jnp.zeros((*shape, num_bytes), jnp.uint8),
    counts=jnp.zeros(shape[0], jnp.int32),
    ended=jnp.zeros(shape[0], bool),
    alive=budget > 0,
  )


def _record(
  turns: Turns,
  step: jax.Array | int,
  sampled: tuple[jax.Array, jax.Array, jax.Array],
  budget: jax.Array,
  stop_ids: tuple[int, ...],
) -> Turns:
  """Adds one token a slot, its log-prob and kept bits, where it is alive."""
  token, logprob, kept = sampled
  alive = turns.alive
  ended = alive & jnp.isin(token, jnp.array(stop_ids))
  counts = turns.counts + alive
  return Turns(
    tokens=turns.tokens.at[:, step].set(jnp.where(alive, token, 0)),
    logprobs=turns.logprobs.at[:, step].set(jnp.where(alive, logprob, 0.0)),
    kept=turns.kept.at[:, step].set(jnp.where(alive[:, None], kept, 0)),
    counts=counts,
    ended=turns.ended | ended,
    alive=alive & ~ended & (counts < budget),
  )
