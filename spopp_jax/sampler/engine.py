"""Decodes many episodes together, each keeping its cache across turns.

One compiled call feeds every slot's queued tokens (prompt or observation) and
then samples until each slot has ended its turn. Shapes are fixed by two short
lists of buckets: how many tokens are fed, how much of the cache is read.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spopp_jax import types
from spopp_jax.models import dense, parameters
from spopp_jax.sampler import base


@dataclasses.dataclass
class _Slot:
  """Host side of one episode."""

  seed: int
  sampling: types.SamplingParams
  length: int = 0  # tokens in the cache
  queue: list[int] = dataclasses.field(default_factory=list)
  generating: bool = False


class DecodeEngine:
  """Slots of one decoder; implements `sampler.base.Engine`.

  A slot's tokens depend on its seed, its own history and the parameters, not
  on its batch mates (up to the rounding of the compiled shapes).
  """

  def __init__(
    self,
    config: dense.DecoderConfig,
    *,
    num_slots: int,
    max_context: int,
    max_turn_tokens: int,
    end_id: int,
    feed_buckets: Sequence[int] = (16, 64),
    attend_multiple: int = 64,
  ):
    """Allocates the cache.

    Args:
      config: the decoder.
      num_slots: episodes decoded together.
      max_context: tokens an episode can hold.
      max_turn_tokens: sampled tokens a turn at most, for any request.
      end_id: the token that ends a turn.
      feed_buckets: increasing numbers of tokens fed by one call; longer
        queues take several calls.
      attend_multiple: cache positions read are rounded up to this.
    """
    self.num_slots = num_slots
    self.max_context = max_context
    self.policy_version = -1
    self.weights_checksum = ''
    self._config = config
    self._max_turn_tokens = max_turn_tokens
    self._feed_buckets = tuple(feed_buckets)
    self._attend_multiple = attend_multiple
    self._slots: dict[int, _Slot] = {}
    self._parameters: dict[str, jax.Array] = {}
    self._caches = self._empty_caches()
    graphdef, _ = parameters.graph(config)
    self._advance = jax.jit(
      functools.partial(
        _advance,
        graphdef=graphdef,
        end_id=end_id,
        max_turn_tokens=max_turn_tokens,
      ),
      static_argnames=('attend_length',),
      donate_argnames=('caches',),
    )

  def load(
    self, params: Mapping[str, np.ndarray], *, version: int, checksum: str
  ) -> None:
    """Takes new parameters; RuntimeError while a slot is open.

    Caches start anew: a NaN that earlier parameters left in a cache would
    reach every later episode of its slot, since 0 * NaN is NaN.
    """
    if self._slots:
      raise RuntimeError(
        f'parameters cannot change while {len(self._slots)} episodes are open'
      )
    parameters.check(self._config, params)
    self._parameters = {k: jnp.asarray(v) for k, v in params.items()}
    self._caches = self._empty_caches()
    self.policy_version = version
    self.weights_checksum = checksum

  def open(
    self, slot: int, *, seed: int, sampling: types.SamplingParams
  ) -> None:
    """Starts an episode; ValueError on parameters the engine cannot honour."""
    if slot in self._slots:
      raise ValueError(f'slot {slot} is already open')
    if not 0 < sampling.temperature < math.inf:
      raise ValueError(
        f'temperature ({sampling.temperature}) must be positive and finite'
      )
    if sampling.top_p != 1.0 or sampling.top_k != 0:
      raise ValueError(
        f'this engine samples the whole vocabulary: top_p ({sampling.top_p}) '
        f'must be 1 and top_k ({sampling.top_k}) must be 0'
      )
    if not 1 <= sampling.max_turn_tokens <= self._max_turn_tokens:
      raise ValueError(
        f'max_turn_tokens ({sampling.max_turn_tokens}) must be in '
        f'[1, {self._max_turn_tokens}]'
      )
    self._slots[slot] = _Slot(seed=seed, sampling=sampling)

  def append(self, slot: int, tokens: np.ndarray) -> None:
    """Queues ids; ValueError when none or no room to generate is left."""
    state = self._slots[slot]
    if len(tokens) == 0:
      raise ValueError(f'slot {slot} needs at least one token to go on')
    if len(tokens) >= self.context_left(slot):
      raise ValueError(
        f'{len(tokens)} tokens leave no room in slot {slot}: '
        f'{self.context_left(slot)} of {self.max_context} are left'
      )
    state.queue.extend(int(token) for token in tokens)
    state.generating = True

  def context_left(self, slot: int) -> int:
    """Returns how many more tokens the slot can hold."""
    state = self._slots[slot]
    return self.max_context - state.length - len(state.queue)

  def close(self, slot: int) -> None:
    """Ends the episode and frees the slot."""
    del self._slots[slot]

  def step(self) -> list[base.Turn]:
    """Feeds queued tokens and samples; returns the turns that ended."""
    active = {s: v for s, v in self._slots.items() if v.generating}
    if not active:
      return []
    longest = max(len(v.queue) for v in active.values())
    width = next(
      (b for b in self._feed_buckets if b >= longest), self._feed_buckets[-1]
    )
    feed = np.zeros((self.num_slots, width), np.int32)
    fed = np.zeros(self.num_slots, np.int32)
    start = np.zeros(self.num_slots, np.int32)
    budget = np.zeros(self.num_slots, np.int32)
    seed = np.zeros(self.num_slots, np.uint32)
    temperature = np.ones(self.num_slots, np.float32)
    for slot, state in active.items():
      head = state.queue[:width]
      feed[slot, : len(head)] = head
      fed[slot], start[slot] = len(head), state.length
      seed[slot] = state.seed
      temperature[slot] = state.sampling.temperature
      del state.queue[: len(head)]
      state.length += len(head)
      if not state.queue:
        budget[slot] = min(
          state.sampling.max_turn_tokens, self.max_context - state.length
        )
    self._caches, turns = self._advance(
      self._parameters,
      self._caches,
      feed,
      start,
      fed,
      budget,
      seed,
      temperature,
      attend_length=self._attend_length(start, fed, budget),
    )
    turns = jax.device_get(turns)
    return [self._end_turn(slot, turns) for slot in active if budget[slot]]

  def _empty_caches(self) -> tuple[dense.KVCache, ...]:
    return dense.empty_caches(self._config, self.num_slots, self.max_context)

  def _attend_length(
    self, start: np.ndarray, fed: np.ndarray, budget: np.ndarray
  ) -> int:
    needed = int((start + fed + budget).max())
    rounded = -(-needed // self._attend_multiple) * self._attend_multiple
    return min(rounded, self.max_context)

  def _end_turn(self, slot: int, turns: '_Turns') -> base.Turn:
    state = self._slots[slot]
    state.generating = False
    count = int(turns.counts[slot])
    turn = base.Turn(
      slot=slot,
      tokens=np.array(turns.tokens[slot, :count]),
      logprobs=np.array(turns.logprobs[slot, :count]),
      ended=bool(turns.ended[slot]),
    )
    # The last sampled token is not in the cache yet: it leads the next feed.
    state.length += count - 1
    state.queue = [int(turn.tokens[-1])]
    return turn


class _Turns(NamedTuple):
  """What one call samples for each slot.

  Attributes:
    tokens: [B, K] int32; 0 beyond the turn.
    logprobs: [B, K] float32 nats; 0 beyond the turn.
    counts: [B] int32; tokens of the turn so far.
    ended: [B] bool; the last one is the end token.
    alive: [B] bool; more will be sampled.
  """

  tokens: jax.Array
  logprobs: jax.Array
  counts: jax.Array
  ended: jax.Array
  alive: jax.Array


def _advance(
  params: parameters.Parameters,
  caches: tuple[dense.KVCache, ...],
  feed: jax.Array,
  start: jax.Array,
  fed: jax.Array,
  budget: jax.Array,
  seed: jax.Array,
  temperature: jax.Array,
  *,
  graphdef: nnx.GraphDef,
  end_id: int,
  max_turn_tokens: int,
  attend_length: int,
) -> tuple[tuple[dense.KVCache, ...], _Turns]:
  """Feeds `feed` and samples up to `budget` tokens a slot.

  The last token of a turn is sampled but not fed: the next call feeds it.

  Args:
    params: the decoder's parameters by name.
    caches: one KVCache a layer, donated.
    feed: [B, C] int32 tokens to feed.
    start: [B] int32; position of the first fed token.
    fed: [B] int32; how many of `feed` are there.
    budget: [B] int32; tokens to sample at most; 0 samples none.
    seed: [B] uint32; each slot's own stream.
    temperature: [B] float32.
    graphdef: the decoder's structure.
    end_id: the token that ends a turn.
    max_turn_tokens: static width K of the outputs.
    attend_length: static; cache positions read.

  Returns:
    The caches and what was sampled.
  """
  decoder = parameters.bind(graphdef, params)
  logits, caches = _feed(decoder, caches, feed, start, fed, attend_length)
  first = start + fed  # where the first sampled token stands
  absent = caches[0].keys.shape[1]
  keys = jax.vmap(jax.random.key)(seed)

  def sample(step, logits, turns):
    logprobs = jax.nn.log_softmax(logits / temperature[:, None])
    step_keys = jax.vmap(jax.random.fold_in)(keys, first + step)
    token = jax.vmap(jax.random.categorical)(step_keys, logprobs)
    chosen = jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]
    return _record(turns, step, token, chosen, budget, end_id)

  def extend_and_sample(carry):
    step, turns, caches = carry
    token = jax.lax.dynamic_slice_in_dim(turns.tokens, step - 1, 1, axis=1)
    # Ended slots feed nothing: their position lies beyond the cache.
    position = jnp.where(turns.alive, first + step - 1, absent)
    hidden, caches = decoder.extend(
      token, position[:, None], caches, attend_length
    )
    turns = sample(step, decoder.logits(hidden[:, 0]), turns)
    return step + 1, turns, caches

  shape = (feed.shape[0], max_turn_tokens)
  none = _Turns(
    tokens=jnp.zeros(shape, jnp.int32),
    logprobs=jnp.zeros(shape, jnp.float32),
    counts=jnp.zeros(shape[0], jnp.int32),
    ended=jnp.zeros(shape[0], bool),
    alive=budget > 0,
  )
  _, turns, caches = jax.lax.while_loop(
    lambda carry: carry[1].alive.any(),
    extend_and_sample,
    (jnp.int32(1), sample(0, logits, none), caches),
  )
  return caches, turns


def _feed(
  decoder: dense.Decoder,
  caches: tuple[dense.KVCache, ...],
  feed: jax.Array,
  start: jax.Array,
  fed: jax.Array,
  attend_length: int,
) -> tuple[jax.Array, tuple[dense.KVCache, ...]]:
  """Feeds queued tokens; returns the logits [B, V] after the last of each."""
  absent = caches[0].keys.shape[1]
  offsets = jnp.arange(feed.shape[1])[None, :]
  positions = jnp.where(
    offsets < fed[:, None], start[:, None] + offsets, absent
  )
  hidden, caches = decoder.extend(feed, positions, caches, attend_length)
  last = jnp.maximum(fed - 1, 0)[:, None, None]
  final = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
  return decoder.logits(final), caches


def _record(
  turns: _Turns,
  step: jax.Array | int,
  token: jax.Array,
  logprob: jax.Array,
  budget: jax.Array,
  end_id: int,
) -> _Turns:
  """Adds one sampled token [B] to the turns that are alive."""
  alive = turns.alive
  ended = alive & (token == end_id)
  counts = turns.counts + alive
  return _Turns(
    tokens=turns.tokens.at[:, step].set(jnp.where(alive, token, 0)),
    logprobs=turns.logprobs.at[:, step].set(jnp.where(alive, logprob, 0.0)),
    counts=counts,
    ended=turns.ended | ended,
    alive=alive & ~ended & (counts < budget),
  )
