"""Decodes many episodes together, each keeping its cache across turns.

A step feeds one chunk of every prompt or observation that waits, then samples a
few tokens of every slot that is ready, so that a long prompt holds up nobody
and a slot that has ended its turn is filled again soon. Shapes are fixed by
short lists of buckets: how many slots are fed how many tokens, how much of the
cache is read, how many tokens truncated sampling chooses from.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spopp_jax import types
from spopp_jax.models import dense, kv_cache, parameters
from spopp_jax.sampler import base, decoding, kept_sets, prefixes

# In float32, where 1 - 1e-9 would be 1 and mean that top-p is off.
_LARGEST_BELOW_1 = 1 - 2**-24


@dataclasses.dataclass
class _Slot:
  """Host side of one episode; the tokens from `length` on wait to be fed."""

  seed: int
  sampling: types.SamplingParams
  tokens: list[int] = dataclasses.field(default_factory=list)
  length: int = 0  # tokens in the cache
  generating: bool = False
  pieces: list[base.Turn] = dataclasses.field(default_factory=list)

  @property
  def num_waiting(self) -> int:
    return len(self.tokens) - self.length

  @property
  def num_sampled(self) -> int:
    return sum(len(piece.tokens) for piece in self.pieces)

  @property
  def prompt(self) -> np.ndarray:
    """What has to be in the cache before a token can be sampled."""
    return np.array(self.tokens[:-1], np.int32)


class DecodeEngine:
  """Slots of one decoder; implements `sampler.base.Engine`.

  A slot's tokens depend on its seed, its own history and the parameters, not
  on its batch mates (up to the rounding of the compiled shapes).

  Logits are divided by the temperature, then top-k keeps the k most likely
  tokens, then top-p the fewest of these whose renormalised mass reaches p, then
  min-p those at least p times as likely as the most likely one (see
  `truncation.truncate`). Log-probs are of the renormalised distribution that
  was sampled from. What was kept comes back as one bit an id, so that a step in
  which some slot truncates returns num_slots * tokens_a_step * V / 8 bytes
  more, and none otherwise.

  An episode whose prompt begins like what another slot has in its cache, or is
  being fed, takes that over instead of feeding it again. Where layers keep a
  recurrent state that is so for rollouts of one prompt that start together.
  """

  def __init__(
    self,
    config: dense.DecoderConfig,
    *,
    num_slots: int,
    max_context: int,
    max_turn_tokens: int,
    stop_ids: Sequence[int],
    compute_dtype: str = 'float32',
    tokens_a_step: int = 16,
    feed_buckets: Sequence[int] = (8, 16, 24, 32, 64, 256),
    shortest_piece: int = kv_cache.SHORTEST,
    min_shared: int = 16,
  ):
    """Allocates the cache.

    Args:
      config: the decoder.
      num_slots: episodes decoded together.
      max_context: tokens an episode can hold.
      max_turn_tokens: sampled tokens a turn at most, for any request.
      stop_ids: a turn ends with the first of these.
      compute_dtype: of parameters.COMPUTE_DTYPES, for caches too.
      tokens_a_step: tokens that a step samples of a slot at most.
      feed_buckets: increasing numbers of tokens that a step feeds a slot;
        longer queues take several steps.
      shortest_piece: cache positions that are read at least; see
        `kv_cache.ends`.
      min_shared: tokens that a prompt must share before they are copied.

    Raises:
      ValueError: no stop id, or one that is no token.
    """
    strange = [i for i in stop_ids if not 0 <= i < config.vocab_size]
    if strange or not stop_ids:
      raise ValueError(
        f'stop_ids ({tuple(stop_ids)}) must be one or more ids in '
        f'[0, {config.vocab_size})'
      )
    self.num_slots = num_slots
    self.max_context = max_context
    self.logprob_kind = types.LogprobKind.PROCESSED
    self.policy_version = -1
    self.weights_checksum = ''
    self._config = config
    self._compute_dtype = compute_dtype
    self._max_turn_tokens = max_turn_tokens
    self._tokens_a_step = min(tokens_a_step, max_turn_tokens)
    self._feed_buckets = tuple(feed_buckets)
    self._ends = kv_cache.ends(max_context, shortest_piece)
    self._empty_caches = functools.partial(
      dense.empty_caches,
      *(config, num_slots, max_context, compute_dtype, shortest_piece),
    )
    self._min_shared = min_shared
    self._slots: dict[int, _Slot] = {}
    self._parameters: dict[str, jax.Array] = {}
    self._caches = self._empty_caches()
    self._cached = prefixes.CachedTokens(
      num_slots, max_context, can_cut=config.caches_can_be_cut
    )
    self._make_programs(tuple(stop_ids))

  def _make_programs(self, stop_ids: tuple[int, ...]) -> None:
    graphdef, _ = parameters.graph(self._config)
    self._prefill = jax.jit(
      functools.partial(decoding.prefill, graphdef=graphdef),
      static_argnames=('attend_length',),
      donate_argnames=('caches',),
    )
    self._copy_rows = jax.jit(decoding.copy_rows, donate_argnums=0)
    self._decode = jax.jit(
      functools.partial(
        decoding.decode,
        graphdef=graphdef,
        stop_ids=stop_ids,
        num_tokens=self._tokens_a_step,
      ),
      static_argnames=('attend_length', 'truncation_width'),
      donate_argnames=('caches',),
    )

  def load(
    self, params: Mapping[str, np.ndarray], *, version: int, checksum: str
  ) -> None:
    """Takes new parameters; open episodes go on with them, also within a turn.

    Caches start anew, and open episodes are fed again from their beginning: no
    token is drawn from what other parameters have left in a cache. (A NaN there
    would reach every later episode of its slot, since 0 * NaN is NaN.)
    """
    parameters.check(self._config, params)
    self._parameters = jax.tree.map(
      jnp.asarray, parameters.cast(params, self._compute_dtype)
    )
    self._caches = self._empty_caches()
    self._cached.clear()
    for state in self._slots.values():
      state.length = 0
    self.policy_version = version
    self.weights_checksum = checksum

  def open(
    self, slot: int, *, seed: int, sampling: types.SamplingParams
  ) -> None:
    """Starts an episode; ValueError on parameters the engine cannot honour."""
    if slot in self._slots:
      raise ValueError(f'slot {slot} is already open')
    base.check_sampling(sampling, max_turn_tokens=self._max_turn_tokens)
    self._slots[slot] = _Slot(seed=seed, sampling=sampling)

  def append(self, slot: int, tokens: np.ndarray) -> None:
    """Queues ids; ValueError when none or no room to generate is left."""
    state = self._slots[slot]
    base.check_append(
      slot,
      tokens,
      left=self.context_left(slot),
      max_context=self.max_context,
    )
    state.tokens.extend(int(token) for token in tokens)
    state.generating = True

  def context_left(self, slot: int) -> int:
    """Returns how many more tokens the slot can hold."""
    return self.max_context - len(self._slots[slot].tokens)

  def close(self, slot: int) -> None:
    """Ends the episode and frees the slot."""
    del self._slots[slot]

  def step(self) -> list[base.Turn]:
    """Feeds a chunk, samples some tokens; returns the turns that ended."""
    active = {s: v for s, v in self._slots.items() if v.generating}
    waiting = self._share(active)
    feeding = {
      slot: state
      for slot, state in active.items()
      if state.num_waiting > 1 and slot not in waiting
    }
    for width in self._feed_buckets:
      chunk = {s: v for s, v in feeding.items() if self._width(v) == width}
      if chunk:
        self._feed(chunk, width)
    if waiting:
      # Rows that cannot be cut are only now what they wait for.
      self._share({slot: active[slot] for slot in waiting})
    ready = {s: v for s, v in active.items() if v.num_waiting == 1}
    return self._sample(ready) if ready else []

  def _share(self, active: Mapping[int, _Slot]) -> set[int]:
    """Copies prompts' beginnings that are there; returns who waits for one."""
    copies, waiting = [], set()
    fresh = {
      slot: state
      for slot, state in active.items()
      if not state.length and state.num_waiting > self._min_shared
    }
    prompts = {
      slot: state.prompt
      for slot, state in self._slots.items()
      if fresh and state.generating and state.num_waiting > 1
    }
    for slot, state in fresh.items():
      prompt = prompts[slot]
      source, length = self._cached.longest(prompt)
      ahead = [
        prompts[name]
        for name in prompts
        if (other := self._slots[name]).num_waiting > 1
        and name not in waiting
        and (other.length or name < slot)
        and name != slot
      ]
      coming = self._cached.coming(prompt, ahead)
      if coming >= max(self._min_shared, length + 1):
        waiting.add(slot)
      elif length >= self._min_shared:
        copies.append((source, slot, length))
        state.length = length
    if copies:
      self._copy(copies)
    return waiting

  def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
    """Copies rows, given as source, target and length."""
    sources = np.zeros(self._rows_bucket(len(copies)), np.int32)
    targets = np.full(len(sources), self.num_slots, np.int32)
    sources[: len(copies)] = [source for source, _, _ in copies]
    targets[: len(copies)] = [target for _, target, _ in copies]
    self._caches = self._copy_rows(self._caches, sources, targets)
    self._cached.copy(copies)

  def _feed(self, chunk: Mapping[int, _Slot], width: int) -> None:
    """Feeds up to `width` tokens of each slot, all but the last."""
    count = self._rows_bucket(len(chunk))
    rows = np.full(count, self.num_slots, np.int32)
    tokens = np.zeros((count, width), np.int32)
    positions = np.full((count, width), dense.ABSENT, np.int32)
    everyone = count == self.num_slots
    for i, (slot, state) in enumerate(chunk.items()):
      row = slot if everyone else i
      fed = min(width, state.num_waiting - 1)
      end = state.length + fed
      rows[row] = slot
      tokens[row, :fed] = state.tokens[state.length : end]
      positions[row, :fed] = np.arange(state.length, end)
      self._cached.write(slot, state.length, tokens[row, :fed])
      state.length = end
    self._caches = self._prefill(
      self._parameters,
      self._caches,
      None if everyone else rows,
      tokens,
      positions,
      attend_length=self._attend_length(
        max(state.length for state in chunk.values())
      ),
    )

  def _sample(self, ready: Mapping[int, _Slot]) -> list[base.Turn]:
    """Samples of slots that wait with one token; returns turns that ended."""
    settings = decoding.Settings(
      token=np.zeros(self.num_slots, np.int32),
      position=np.zeros(self.num_slots, np.int32),
      budget=np.zeros(self.num_slots, np.int32),
      seed=np.zeros(self.num_slots, np.uint32),
      temperature=np.ones(self.num_slots, np.float32),
      top_k=np.zeros(self.num_slots, np.int32),
      top_p=np.ones(self.num_slots, np.float32),
      min_p=np.zeros(self.num_slots, np.float32),
    )
    for slot, state in ready.items():
      self._set_slot(settings, slot, state)
    self._caches, sampled = self._decode(
      self._parameters,
      self._caches,
      settings,
      attend_length=self._attend_length(
        int((settings.position + settings.budget).max())
      ),
      truncation_width=self._truncation_width(settings),
    )
    sampled = jax.device_get(sampled)
    turns = [self._take(slot, state, sampled) for slot, state in ready.items()]
    return [turn for turn in turns if turn is not None]

  def _set_slot(
    self, settings: decoding.Settings, slot: int, state: _Slot
  ) -> None:
    sampling = state.sampling
    settings.token[slot] = state.tokens[-1]
    settings.position[slot] = state.length
    settings.budget[slot] = min(self._left(slot), self._tokens_a_step)
    settings.seed[slot] = state.seed
    settings.temperature[slot] = sampling.temperature
    settings.top_k[slot] = min(sampling.top_k, self._config.vocab_size)
    settings.min_p[slot] = sampling.min_p
    if sampling.top_p < 1:
      settings.top_p[slot] = min(sampling.top_p, _LARGEST_BELOW_1)

  def _take(
    self, slot: int, state: _Slot, sampled: decoding.Sampled
  ) -> base.Turn | None:
    """Adds what was sampled to a slot; returns the turn if it has ended."""
    count = int(sampled.counts[slot])
    kept = None
    if state.sampling.truncated:
      kept = kept_sets.from_bits(
        sampled.kept[slot, :count], np.array(sampled.log_mass[slot, :count])
      )
    piece = base.Turn(
      slot=slot,
      tokens=np.array(sampled.tokens[slot, :count]),
      logprobs=np.array(sampled.logprobs[slot, :count]),
      ended=bool(sampled.ended[slot]),
      kept=kept,
      versions=((self.policy_version, self.weights_checksum, count),),
    )
    # The last sampled token is not in the cache yet: it is the next one fed.
    fed = [state.tokens[-1], *piece.tokens[:-1].tolist()]
    self._cached.write(slot, state.length, np.array(fed, np.int32))
    state.length += count
    state.tokens.extend(piece.tokens.tolist())
    state.pieces.append(piece)
    if not piece.ended and self._left(slot):
      return None
    turn = base.join(state.pieces)
    state.pieces = []
    state.generating = False
    return turn

  def _left(self, slot: int) -> int:
    """Returns how many more tokens the turn of a slot may have."""
    state = self._slots[slot]
    left = state.sampling.max_turn_tokens - state.num_sampled
    return min(left, self.context_left(slot))

  def _width(self, state: _Slot) -> int:
    """Returns how many tokens a slot's next chunk is padded to.

    Less than half of it is padding, unless it is the smallest bucket.
    """
    needed = state.num_waiting - 1
    first, *others = self._feed_buckets
    fitting = [b for b in others if b < 2 * needed]
    enough = [b for b in (first, *fitting) if b >= needed]
    return enough[0] if enough else max((first, *fitting))

  def _rows_bucket(self, count: int) -> int:
    """Returns num_slots, or a quarter, a sixteenth, ... that is enough."""
    size = self.num_slots
    while size // 4 >= count:
      size //= 4
    return size

  def _attend_length(self, needed: int) -> int:
    return next(end for end in self._ends if end >= needed)

  def _truncation_width(self, settings: decoding.Settings) -> int:
    """Returns how many tokens a truncating slot may keep; 0 without any."""
    vocabulary = self._config.vocab_size
    by_mass = (settings.top_p < 1) | (settings.min_p > 0)
    if ((settings.top_k == 0) & by_mass).any():
      return vocabulary
    largest = int(settings.top_k.max())
    return min(1 << (largest - 1).bit_length(), vocabulary) if largest else 0
