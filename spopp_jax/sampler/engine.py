"""Decodes many episodes together, each keeping its cache across turns.

One compiled call feeds every slot's queued tokens (prompt or observation) and
then samples until each slot has ended its turn. Shapes are fixed by short lists
of buckets: how many tokens are fed, how much of the cache is read, how many
tokens truncated sampling chooses from.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spopp_jax import types
from spopp_jax.models import dense, parameters
from spopp_jax.sampler import base, decoding, kept_sets

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


class DecodeEngine:
  """Slots of one decoder; implements `sampler.base.Engine`.

  A slot's tokens depend on its seed, its own history and the parameters, not
  on its batch mates (up to the rounding of the compiled shapes).

  Logits are divided by the temperature, then top-k keeps the k most likely
  tokens, then top-p the fewest of these whose renormalised mass reaches p (see
  `truncation.truncate`). Log-probs are of the renormalised distribution that
  was sampled from. What was kept comes back as one bit an id, so that a step in
  which some slot truncates returns num_slots * max_turn_tokens * V / 8 bytes
  more, and none otherwise.
  """

  def __init__(
    self,
    config: dense.DecoderConfig,
    *,
    num_slots: int,
    max_context: int,
    max_turn_tokens: int,
    stop_ids: Sequence[int],
    feed_buckets: Sequence[int] = (16, 64),
    attend_multiple: int = 64,
  ):
    """Allocates the cache.

    Args:
      config: the decoder.
      num_slots: episodes decoded together.
      max_context: tokens an episode can hold.
      max_turn_tokens: sampled tokens a turn at most, for any request.
      stop_ids: a turn ends with the first of these.
      feed_buckets: increasing numbers of tokens fed by one call; longer
        queues take several calls.
      attend_multiple: cache positions read are rounded up to this.

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
    self._max_turn_tokens = max_turn_tokens
    self._feed_buckets = tuple(feed_buckets)
    self._attend_multiple = attend_multiple
    self._slots: dict[int, _Slot] = {}
    self._parameters: dict[str, jax.Array] = {}
    self._caches = self._empty_caches()
    graphdef, _ = parameters.graph(config)
    self._advance = jax.jit(
      functools.partial(
        decoding.advance,
        graphdef=graphdef,
        stop_ids=tuple(stop_ids),
        max_turn_tokens=max_turn_tokens,
      ),
      static_argnames=('attend_length', 'truncation_width'),
      donate_argnames=('caches',),
    )

  def load(
    self, params: Mapping[str, np.ndarray], *, version: int, checksum: str
  ) -> None:
    """Takes new parameters; open episodes go on with them.

    Caches start anew, and open episodes are fed again from their beginning: no
    token is drawn from what other parameters have left in a cache. (A NaN there
    would reach every later episode of its slot, since 0 * NaN is NaN.)
    """
    parameters.check(self._config, params)
    self._parameters = {k: jnp.asarray(v) for k, v in params.items()}
    self._caches = self._empty_caches()
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
    if len(tokens) == 0:
      raise ValueError(f'slot {slot} needs at least one token to go on')
    if len(tokens) >= self.context_left(slot):
      raise ValueError(
        f'{len(tokens)} tokens leave no room in slot {slot}: '
        f'{self.context_left(slot)} of {self.max_context} are left'
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
    """Feeds queued tokens and samples; returns the turns that ended."""
    active = {s: v for s, v in self._slots.items() if v.generating}
    if not active:
      return []
    longest = max(len(v.tokens) - v.length for v in active.values())
    width = next(
      (b for b in self._feed_buckets if b >= longest), self._feed_buckets[-1]
    )
    feed = np.zeros((self.num_slots, width), np.int32)
    fed = np.zeros(self.num_slots, np.int32)
    start = np.zeros(self.num_slots, np.int32)
    settings = decoding.Settings(
      budget=np.zeros(self.num_slots, np.int32),
      seed=np.zeros(self.num_slots, np.uint32),
      temperature=np.ones(self.num_slots, np.float32),
      top_k=np.zeros(self.num_slots, np.int32),
      top_p=np.ones(self.num_slots, np.float32),
    )
    for slot, state in active.items():
      head = state.tokens[state.length : state.length + width]
      feed[slot, : len(head)] = head
      fed[slot], start[slot] = len(head), state.length
      state.length += len(head)
      if state.length == len(state.tokens):
        self._set_turn(settings, slot, state)
    self._caches, turns = self._advance(
      self._parameters,
      self._caches,
      feed,
      start,
      fed,
      settings,
      attend_length=self._attend_length(start + fed + settings.budget),
      truncation_width=self._truncation_width(settings),
    )
    turns = jax.device_get(turns)
    return [
      self._end_turn(slot, turns) for slot in active if settings.budget[slot]
    ]

  def _empty_caches(self) -> tuple[dense.Cache, ...]:
    return dense.empty_caches(self._config, self.num_slots, self.max_context)

  def _set_turn(
    self, settings: decoding.Settings, slot: int, state: _Slot
  ) -> None:
    """Has a slot sample a turn."""
    sampling = state.sampling
    settings.budget[slot] = min(
      sampling.max_turn_tokens, self.max_context - state.length
    )
    settings.seed[slot] = state.seed
    settings.temperature[slot] = sampling.temperature
    settings.top_k[slot] = min(sampling.top_k, self._config.vocab_size)
    if sampling.top_p < 1:
      settings.top_p[slot] = min(sampling.top_p, _LARGEST_BELOW_1)

  def _attend_length(self, ends: np.ndarray) -> int:
    needed = int(ends.max())
    rounded = -(-needed // self._attend_multiple) * self._attend_multiple
    return min(rounded, self.max_context)

  def _truncation_width(self, settings: decoding.Settings) -> int:
    """Returns how many tokens a truncating slot may keep; 0 without any."""
    vocabulary = self._config.vocab_size
    if ((settings.top_k == 0) & (settings.top_p < 1)).any():
      return vocabulary
    largest = int(settings.top_k.max())
    return min(1 << (largest - 1).bit_length(), vocabulary) if largest else 0

  def _end_turn(self, slot: int, turns: decoding.Turns) -> base.Turn:
    state = self._slots[slot]
    state.generating = False
    count = int(turns.counts[slot])
    kept = None
    if state.sampling.truncated:
      kept = kept_sets.from_bits(turns.kept[slot, :count])
    turn = base.Turn(
      slot=slot,
      tokens=np.array(turns.tokens[slot, :count]),
      logprobs=np.array(turns.logprobs[slot, :count]),
      ended=bool(turns.ended[slot]),
      kept=kept,
    )
    # The last sampled token is not in the cache yet: it leads the next feed.
    state.length += count - 1
    state.tokens.extend(turn.tokens.tolist())
    return turn
