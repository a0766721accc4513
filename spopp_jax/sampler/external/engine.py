"""An engine whose tokens come from a server of another project.

  append --one call a slot, in its thread--> server
  step   <--------- as they finish --------- answers

Every turn of an episode is a request of its own with all ids so far; the
server's prefix cache keeps what an episode has in it.
"""

import dataclasses
import logging
import pathlib
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spopp_jax import types
from spopp_jax.models import dense, parameters
from spopp_jax.sampler import base, errors
from spopp_jax.sampler.external import (
  calls,
  handover,
  semantics,
  servers,
  sglang,
  vllm,
)

_logger = logging.getLogger(__name__)

_SERVERS: dict[
  str, Callable[[calls.Address, dense.DecoderConfig], servers.Server]
] = {
  'vllm': vllm.Vllm,
  'sglang': lambda address, _: sglang.Sglang(address),
}
# Longest wait of one step; bounds how late new requests get free slots.
_STEP_S = 0.02


@dataclasses.dataclass(eq=False)
class _Pending:
  """A turn that is being generated."""

  slot: int
  prompt: servers.Prompt
  call: calls.Call


@dataclasses.dataclass
class _Slot:
  """One episode."""

  seed: int
  sampling: types.SamplingParams
  tokens: list[int] = dataclasses.field(default_factory=list)
  pending: _Pending | None = None


class ExternalEngine:
  """Slots in front of one server; implements `sampler.base.Engine`.

  A turn's tokens depend on its seed, its episode and the weights if the server
  keeps seeds. Nothing is generated before the first `load`: whatever weights
  the server came with are not the runner's.
  """

  def __init__(
    self,
    server: servers.Server,
    config: dense.DecoderConfig,
    *,
    num_slots: int,
    max_context: int,
    max_turn_tokens: int,
    stop_ids: tuple[int, ...],
    directory: pathlib.Path,
    turn_deadline_s: float,
    update_deadline_s: float = 600.0,
  ):
    """Asks the server what it is and measures what its log-probs speak of.

    Args:
      server: holds a model of these sizes.
      config: the decoder.
      num_slots: turns generated at a time.
      max_context: tokens an episode can hold.
      max_turn_tokens: sampled tokens a turn at most, for any request.
      stop_ids: tokens that end a turn.
      directory: weights are handed over in it; of this engine alone, and the
        server sees it under this name.
      turn_deadline_s: of a turn; one that takes longer fails.
      update_deadline_s: of taking new weights.

    Raises:
      EngineError: the server cannot be reached or is not fit for this.
      ValueError: it holds fewer tokens than `max_context`, or the directory
        cannot be used.
    """
    self.num_slots = num_slots
    self.max_context = max_context
    self.policy_version = -1
    self.weights_checksum = ''
    self._server = server
    self._config = config
    self._max_turn_tokens = max_turn_tokens
    self._stop_ids = stop_ids
    self._turn_deadline_s = turn_deadline_s
    self._handover = handover.Handover(
      server, config, directory, deadline_s=update_deadline_s
    )
    self._slots: dict[int, _Slot] = {}
    self._arrivals: queue.SimpleQueue[
      tuple[_Pending, servers.Answer | errors.EngineError]
    ] = queue.SimpleQueue()
    found = self._examine()
    self.logprob_kind = found.kind
    self._after_temperature = found.after_temperature

  def load(
    self, params: Mapping[str, np.ndarray], *, version: int, checksum: str
  ) -> None:
    """Has the server take new parameters; open episodes go on with them.

    Turns that are being generated begin anew. The version counts once the
    server has said that it has it.

    Raises:
      ValueError: the parameters do not fit, cannot be written, or the server
        did not take them and has those from before.
      EngineLost: which weights the server has is not known.
    """
    parameters.check(self._config, params)
    interrupted = [
      slot for slot, state in self._slots.items() if state.pending is not None
    ]
    for slot in interrupted:
      self._cancel(self._slots[slot])
    try:
      self._handover(params, handover.label_of(version, checksum))
      self.policy_version = version
      self.weights_checksum = checksum
    finally:
      for slot in interrupted:
        self._begin(slot)

  def open(
    self, slot: int, *, seed: int, sampling: types.SamplingParams
  ) -> None:
    """Starts an episode; ValueError on parameters that cannot be honoured."""
    if slot in self._slots:
      raise ValueError(f'slot {slot} is already open')
    base.check_sampling(sampling, max_turn_tokens=self._max_turn_tokens)
    if sampling.temperature != 1 and not self._after_temperature:
      raise ValueError(
        f'temperature ({sampling.temperature}) must be 1: the log-probs of the '
        'server come before temperature (vLLM: --logprobs-mode '
        'processed_logprobs)'
      )
    refusal = self._server.refusal(sampling)
    if refusal:
      raise ValueError(refusal)
    self._slots[slot] = _Slot(seed=seed, sampling=sampling)

  def append(self, slot: int, tokens: np.ndarray) -> None:
    """Adds ids and has the turn after them generated.

    Raises:
      ValueError: there are none, they leave no room, or one is no id of the
        model, which servers do not survive.
    """
    state = self._slots[slot]
    base.check_append(
      slot,
      tokens,
      left=self.context_left(slot),
      max_context=self.max_context,
    )
    if not 0 <= tokens.min() <= tokens.max() < self._config.vocab_size:
      raise ValueError(
        f'ids from {tokens.min()} to {tokens.max()} must be in '
        f'[0, {self._config.vocab_size})'
      )
    state.tokens.extend(int(token) for token in tokens)
    self._begin(slot)

  def context_left(self, slot: int) -> int:
    """Returns how many more tokens the slot can hold."""
    return self.max_context - len(self._slots[slot].tokens)

  def close(self, slot: int) -> None:
    """Ends the episode, tells the server so, and frees the slot."""
    self._cancel(self._slots.pop(slot))

  def step(self) -> list[base.Turn]:
    """Waits a little for turns; returns those that have ended.

    Raises:
      EngineLost: the server is gone, or has other weights than it was given.
    """
    turns: list[base.Turn] = []
    if all(state.pending is None for state in self._slots.values()):
      return turns
    timeout_s = _STEP_S
    while True:
      try:
        pending, outcome = self._arrivals.get(timeout=timeout_s)
      except queue.Empty:
        return turns
      timeout_s = 0
      state = self._slots.get(pending.slot)
      if state is not None and state.pending is pending:
        state.pending = None
        turns.append(self._turn(pending, state, outcome))

  def _examine(self) -> semantics.Semantics:
    """Refuses a server that cannot serve, and measures its log-probs."""
    facts = self._server.facts()
    if facts.max_context is not None and self.max_context > facts.max_context:
      raise ValueError(
        f'a context of {self.max_context} tokens exceeds the '
        f'{facts.max_context} of the server'
      )
    # An engine that died in an update has left it paused.
    self._server.resume()
    found = semantics.measure(self._server, vocab_size=self._config.vocab_size)
    if facts.declared_kind not in (None, found.kind):
      raise errors.EngineRefused(
        f'the server says that its log-probs are {facts.declared_kind.name}; '
        f'measured: {found.kind.name}'
      )
    if not facts.keeps_seeds:
      _logger.warning(
        'the server does not keep seeds: requests are not repeatable'
      )
    _logger.info('log-probs of the server: %s', found)
    return found

  def _begin(self, slot: int) -> None:
    """Has the next turn of an episode generated."""
    state = self._slots[slot]
    position = len(state.tokens)
    # One seed for all turns would draw the same numbers again in each.
    (seed,) = np.random.SeedSequence([state.seed, position]).generate_state(1)
    prompt = servers.Prompt(
      tokens=tuple(state.tokens),
      seed=int(seed),
      sampling=state.sampling,
      budget=min(state.sampling.max_turn_tokens, self.context_left(slot)),
      stop_ids=self._stop_ids,
      label=self._handover.label,
    )
    call = self._server.generation(prompt, deadline_s=self._turn_deadline_s)
    state.pending = _Pending(slot, prompt, call)
    threading.Thread(
      target=self._generate,
      args=(state.pending,),
      name='external-turn',
      daemon=True,
    ).start()

  def _generate(self, pending: _Pending) -> None:
    """Makes one call in its own thread."""
    outcome: servers.Answer | errors.EngineError = errors.EngineLost(
      'the thread of a call died; see the log'
    )
    try:
      outcome = self._server.read(pending.call.run(), pending.prompt)
    except errors.EngineError as error:
      outcome = error
    finally:
      self._arrivals.put((pending, outcome))

  def _cancel(self, state: _Slot) -> None:
    if state.pending is not None:
      state.pending.call.cancel()
      state.pending = None

  def _turn(
    self,
    pending: _Pending,
    state: _Slot,
    outcome: servers.Answer | errors.EngineError,
  ) -> base.Turn:
    if isinstance(outcome, errors.EngineLost):
      raise outcome
    problem = (
      str(outcome)
      if isinstance(outcome, errors.EngineError)
      else self._problem(outcome, pending.prompt)
    )
    if problem or isinstance(outcome, errors.EngineError):
      nothing = np.zeros(0, np.int32)
      return base.Turn(
        pending.slot, nothing, nothing.astype('f4'), False, problem=problem
      )
    state.tokens.extend(outcome.tokens)
    return base.Turn(
      slot=pending.slot,
      tokens=np.array(outcome.tokens, np.int32),
      logprobs=np.array(outcome.logprobs, np.float32),
      ended=outcome.tokens[-1] in self._stop_ids,
      kept=outcome.kept,
    )

  def _problem(self, answer: servers.Answer, prompt: servers.Prompt) -> str:
    """Says how an answer is no turn, or ''; raises on other weights."""
    if answer.label != self._handover.label:
      raise errors.EngineLost(
        f'the server generated with weights {answer.label!r}, not with '
        f'{self._handover.label!r}: it was restarted, or another updates it'
      )
    tokens = answer.tokens
    if not 1 <= len(tokens) <= prompt.budget:
      return f'{len(tokens)} tokens came; allowed: 1 to {prompt.budget}'
    if not 0 <= min(tokens) <= max(tokens) < self._config.vocab_size:
      return f'ids in {tokens} must be in [0, {self._config.vocab_size})'
    if any(token in self._stop_ids for token in tokens[:-1]):
      return f'{tokens} go on after one of the stop ids {self._stop_ids}'
    if len(tokens) < prompt.budget and tokens[-1] not in self._stop_ids:
      return (
        f'the turn ended after {len(tokens)} of {prompt.budget} tokens at '
        f'{tokens[-1]}, which is none of the stop ids {self._stop_ids}'
      )
    if (
      prompt.sampling.truncated
      and answer.kept is None
      and self.logprob_kind is types.LogprobKind.PROCESSED
    ):
      return 'no kept ids came with truncated sampling'
    return ''


def connect(
  address: str, config: dense.DecoderConfig, **limits: Any
) -> ExternalEngine:
  """Returns an engine in front of a server.

  Args:
    address: vllm:http://host:port or sglang:http://host:port.
    config: the decoder that it holds.
    **limits: as of ExternalEngine.

  Raises:
    ValueError: the address is none, or as of ExternalEngine.
    EngineError: as of ExternalEngine.
  """
  kind, _, url = address.partition(':')
  if kind not in _SERVERS:
    raise ValueError(
      f'engine ({address!r}) must be {" or ".join(_SERVERS)}, a colon and '
      'http://host:port'
    )
  server = _SERVERS[kind](calls.Address(url), config)
  return ExternalEngine(server, config, **limits)
