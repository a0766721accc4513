"""The compiled calls of the engine: feed prompts, copy prefixes, sample."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from spopp_jax import types
from spopp_jax.models import dense, kv_cache, parameters
from spopp_jax.sampler import truncation

Caches = tuple[dense.Cache, ...]
# Ids that a draw looks at in its second step.
_BLOCK = 128


class Settings(NamedTuple):
  """What one call of `decode` does with each slot.

  Attributes:
    token: [B] int32; fed first.
    position: [B] int32; where it stands.
    budget: [B] int32; tokens to sample at most; 0 leaves the slot alone.
    seed: [B] uint32; each slot's own stream.
    temperature: [B] float32.
    top_k: [B] int32 in [0, V]; 0 is off.
    top_p: [B] float32; 1 is off.
    min_p: [B] float32; 0 is off.
  """

  token: types.Array
  position: types.Array
  budget: types.Array
  seed: types.Array
  temperature: types.Array
  top_k: types.Array
  top_p: types.Array
  min_p: types.Array


class Sampled(NamedTuple):
  """What one call samples for each slot.

  Attributes:
    tokens: [B, K] int32; 0 beyond the count.
    logprobs: [B, K] float32 nats; 0 beyond the count.
    kept: [B, K, V / 8] uint8; a bit an id that the token was drawn from, 0
      beyond the count; [B, K, 0] when no slot truncates.
    log_mass: [B, K] float32 nats; the log-probability of what was kept, 0
      beyond the count.
    counts: [B] int32; tokens sampled.
    ended: [B] bool; the last one is a stop id.
    alive: [B] bool; more will be sampled in this call.
  """

  tokens: types.Array
  logprobs: types.Array
  kept: types.Array
  log_mass: types.Array
  counts: types.Array
  ended: types.Array
  alive: types.Array


def prefill(
  params: parameters.Parameters,
  caches: Caches,
  rows: jax.Array | None,
  tokens: jax.Array,
  positions: jax.Array,
  *,
  graphdef: nnx.GraphDef,
  attend_length: int,
) -> Caches:
  """Feeds tokens whose followers are known; returns the caches.

  Args:
    params: the decoder's parameters by name.
    caches: one a layer, donated.
    rows: [P] int32; slots that are fed; beyond the last is none. None when
      they are all, in their order.
    tokens: [P, C] int32.
    positions: [P, C] int32; dense.ABSENT for tokens that are not there.
    graphdef: the decoder's structure.
    attend_length: static; end of the last piece of the caches that is read.
  """
  decoder = parameters.bind(graphdef, params)
  read = kv_cache.below(caches, attend_length)
  extended = decoder.extend(tokens, positions, read, rows)[1]
  return kv_cache.put_below(caches, extended)


def copy_rows(caches: Caches, sources: jax.Array, targets: jax.Array) -> Caches:
  """Copies slots' caches, all read before any is written.

  Args:
    caches: one a layer, donated.
    sources: [P] int32; slots read.
    targets: [P] int32; slots written; beyond the last is none.
  """
  return jax.tree.map(
    lambda array: array.at[targets].set(array[sources], mode='drop'), caches
  )


def decode(
  params: parameters.Parameters,
  caches: Caches,
  settings: Settings,
  *,
  graphdef: nnx.GraphDef,
  stop_ids: tuple[int, ...],
  num_tokens: int,
  attend_length: int,
  truncation_width: int,
) -> tuple[Caches, Sampled]:
  """Samples up to `num_tokens` of each slot that has a budget.

  The last token is sampled but not fed: the next call feeds it.

  Args:
    params: the decoder's parameters by name.
    caches: one a layer, donated; row b is slot b.
    settings: what each slot does.
    graphdef: the decoder's structure.
    stop_ids: a turn ends with the first of these.
    num_tokens: static width K of the outputs.
    attend_length: static; end of the last piece of the caches that is read.
    truncation_width: static; the most tokens that a slot which truncates may
      keep; 0 when none does.

  Returns:
    The caches and what was sampled.
  """
  decoder = parameters.bind(graphdef, params)
  keys = jax.vmap(jax.random.key)(settings.seed)

  def advance(carry):
    step, token, sampled, caches = carry
    position = settings.position + step
    fed = jnp.where(sampled.alive, position, dense.ABSENT)
    hidden, caches = decoder.extend(token[:, None], fed[:, None], caches)
    drawn = _distribution(
      decoder.logits(hidden[:, 0]), settings, truncation_width
    )
    step_keys = jax.vmap(jax.random.fold_in)(keys, position + 1)
    token = _draw(step_keys, drawn.logprobs)
    sampled = _record(sampled, step, token, drawn, settings.budget, stop_ids)
    return step + 1, token, sampled, caches

  vocab_size = decoder.output_matrix().shape[0]
  num_bytes = -(-vocab_size // 8) if truncation_width else 0
  nothing = _nothing(settings.budget, num_tokens, num_bytes)
  _, _, sampled, extended = jax.lax.while_loop(
    lambda carry: carry[2].alive.any() & (carry[0] < num_tokens),
    advance,
    (
      jnp.int32(0),
      jnp.asarray(settings.token),
      nothing,
      kv_cache.below(caches, attend_length),
    ),
  )
  return kv_cache.put_below(caches, extended), sampled


class _Drawn(NamedTuple):
  """What a token is drawn from: [B, V], [B, V / 8] and [B]."""

  logprobs: jax.Array
  kept: jax.Array
  log_mass: jax.Array


def _distribution(
  logits: jax.Array, settings: Settings, truncation_width: int
) -> _Drawn:
  if not truncation_width:
    temperature = settings.temperature[:, None]
    return _Drawn(
      jax.nn.log_softmax(logits / temperature),
      jnp.zeros((len(logits), 0), jnp.uint8),
      jnp.zeros(len(logits)),
    )
  truncated = truncation.truncate(
    logits,
    temperature=settings.temperature,
    top_k=settings.top_k,
    top_p=settings.top_p,
    min_p=settings.min_p,
    width=truncation_width,
  )
  return _Drawn(
    truncated.logprobs,
    jnp.packbits(truncated.kept, axis=1),
    truncated.log_mass,
  )


def _draw(keys: jax.Array, logprobs: jax.Array) -> jax.Array:
  """Draws an id of each distribution: [B] int32.

  First a block of ids by the blocks' masses, then one of the block by its own,
  each by one uniform number. Noise for every id, as `jax.random.categorical`
  draws it, would cost a multiple of all else where the vocabulary is large.

  Args:
    keys: [B] of the slots' own streams.
    logprobs: [B, V] float32; -inf where an id must not be drawn.
  """
  padding = -logprobs.shape[1] % _BLOCK
  masses = jnp.exp(
    jnp.pad(logprobs, ((0, 0), (0, padding)), constant_values=-jnp.inf)
  )
  blocks = masses.reshape(len(masses), -1, _BLOCK)
  chances = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
  block = _first_beyond(blocks.sum(axis=2), chances[:, 0])
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  return block * _BLOCK + _first_beyond(inside, chances[:, 1])


def _first_beyond(masses: jax.Array, chances: jax.Array) -> jax.Array:
  """Returns where the sum of masses first exceeds a share of it: [B] int32.

  Never where a mass is 0, whatever the rounding: the sum does not rise there.
  """
  sums = jnp.cumsum(masses, axis=1)
  total = sums[:, -1]
  reached = jnp.minimum(chances * total, jnp.nextafter(total, 0.0))
  return jnp.argmax(sums > reached[:, None], axis=1).astype(jnp.int32)


def _nothing(budget: jax.Array, num_tokens: int, num_bytes: int) -> Sampled:
  shape = (len(budget), num_tokens)
  return Sampled(
    tokens=jnp.zeros(shape, jnp.int32),
    logprobs=jnp.zeros(shape, jnp.float32),
    kept=jnp.zeros((*shape, num_bytes), jnp.uint8),
    log_mass=jnp.zeros(shape, jnp.float32),
    counts=jnp.zeros(shape[0], jnp.int32),
    ended=jnp.zeros(shape[0], bool),
    alive=budget > 0,
  )


def _record(
  sampled: Sampled,
  step: jax.Array,
  token: jax.Array,
  drawn: _Drawn,
  budget: jax.Array,
  stop_ids: tuple[int, ...],
) -> Sampled:
  """Adds one token a slot and what it was drawn from, where it is alive."""
  alive = sampled.alive
  chosen = jnp.take_along_axis(drawn.logprobs, token[:, None], axis=1)[:, 0]
  ended = alive & jnp.isin(token, jnp.array(stop_ids))
  counts = sampled.counts + alive
  return Sampled(
    tokens=sampled.tokens.at[:, step].set(jnp.where(alive, token, 0)),
    logprobs=sampled.logprobs.at[:, step].set(jnp.where(alive, chosen, 0.0)),
    kept=sampled.kept.at[:, step].set(jnp.where(alive[:, None], drawn.kept, 0)),
    log_mass=sampled.log_mass.at[:, step].set(
      jnp.where(alive, drawn.log_mass, 0.0)
    ),
    counts=counts,
    ended=sampled.ended | ended,
    alive=alive & ~ended & (counts < budget),
  )
