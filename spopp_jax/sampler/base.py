"""The two seams of the sampler: what drives an engine, what feeds a runner."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from spopp_jax import types


@dataclasses.dataclass(frozen=True)
class Request:
  """One rollout asked of the service.

  Attributes:
    request_id: idempotency key, echoed.
    task_id: which task of the service's suite.
    policy_version: version that must generate it.
    seed: seed of the request's own random stream, in [0, 2**32).
    sampling: decoding parameters and limits.
  """

  request_id: str
  task_id: str
  policy_version: int
  seed: int
  sampling: types.SamplingParams


@dataclasses.dataclass(frozen=True)
class Turn:
  """What an engine generated for one slot in one turn.

  Attributes:
    slot: the slot it belongs to.
    tokens: [k] int32 sampled ids, the end token included when it came.
    logprobs: [k] float32 nats under the distribution sampled from.
    ended: True when the last token is a stop token; False when the turn hit
      its token limit or the context is full.
    kept: what the k tokens were drawn from when sampling was truncated; None
      when it was not, and in all turns of an engine that cannot tell.
  """

  slot: int
  tokens: np.ndarray
  logprobs: np.ndarray
  ended: bool
  kept: types.KeptIds | None = None


class Engine(Protocol):
  """Decodes slots together and keeps each episode's cache across turns."""

  num_slots: int
  max_context: int
  policy_version: int
  weights_checksum: str

  def load(
    self, params: Mapping[str, np.ndarray], *, version: int, checksum: str
  ) -> None:
    """Takes new parameters; only called while no slot is open."""

  def open(
    self, slot: int, *, seed: int, sampling: types.SamplingParams
  ) -> None:
    """Starts an episode in a free slot."""

  def append(self, slot: int, tokens: np.ndarray) -> None:
    """Queues prompt or observation ids [k] int32; generation then goes on."""

  def context_left(self, slot: int) -> int:
    """Returns how many more tokens the slot can hold."""

  def step(self) -> Sequence[Turn]:
    """Advances every slot with queued work; returns the turns that ended."""

  def close(self, slot: int) -> None:
    """Ends the episode and frees the slot."""


class Sampler(Protocol):
  """What the runner asks for rollouts: the service's client or the fake."""

  def submit(self, requests: Sequence[Request]) -> None:
    """Queues requests; a known request_id is not run twice."""

  def next(self, timeout_s: float) -> types.Trajectory:
    """Returns the next finished trajectory, in completion order.

    Raises:
      SamplerLost: the service is gone; unanswered requests must be
        submitted again after `reconnect`.
      SamplerTimeout: nothing finished within `timeout_s`.
    """

  def publish(self, params: Mapping[str, np.ndarray], version: int) -> str:
    """Transfers, verifies and activates a snapshot; returns its checksum."""

  def reconnect(self, deadline_s: float) -> None:
    """Restores the connection (and an owned process); else SamplerLost.

    A service that was restarted has no snapshot: publish, then submit again.
    """

  def close(self) -> None:
    """Releases the connection and any process it owns."""
