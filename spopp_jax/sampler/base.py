"""The two seams of the sampler: what drives an engine, what feeds a runner."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from spopp_jax import types
from spopp_jax.sampler import kept_sets


@dataclasses.dataclass(frozen=True)
class Request:
  """One rollout asked of the service.

  Attributes:
    request_id: idempotency key, echoed.
    task_id: which task of the service's suite.
    policy_version: version that must generate it.
    seed: seed of the request's own random stream, in [0, 2**32).
    sampling: decoding parameters and limits.
    crosses_versions: later versions may generate it too, and go on with it
      when they are activated meanwhile.
  """

  request_id: str
  task_id: str
  policy_version: int
  seed: int
  sampling: types.SamplingParams
  crosses_versions: bool = False


def unanswered(
  request: Request, status: types.Status, detail: str
) -> types.Trajectory:
  """Returns what stands for a request that nobody generated an answer to."""
  return types.Trajectory(
    request_id=request.request_id,
    task_id=request.task_id,
    status=status,
    reward=math.nan,
    policy_version=request.policy_version,
    weights_checksum='',
    tokens=np.zeros(0, np.int32),
    action_mask=np.zeros(0, bool),
    behaviour_logprobs=np.zeros(0, np.float32),
    num_turns=0,
    sampling=request.sampling,
    detail=detail,
  )


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
    problem: why the turn failed, which ends the episode; '' when it did not.
    versions: version and checksum of the snapshots that generated the tokens,
      and how many each, in order; nothing when the engine's own made all.
  """

  slot: int
  tokens: np.ndarray
  logprobs: np.ndarray
  ended: bool
  kept: types.KeptIds | None = None
  problem: str = ''
  versions: tuple[tuple[int, str, int], ...] = ()


def join(pieces: Sequence[Turn]) -> Turn:
  """Returns the turn that was sampled in pieces, at least one."""
  if len(pieces) == 1:
    return pieces[0]
  kept = [piece.kept for piece in pieces if piece.kept is not None]
  return dataclasses.replace(
    pieces[-1],
    tokens=np.concatenate([piece.tokens for piece in pieces]),
    logprobs=np.concatenate([piece.logprobs for piece in pieces]),
    kept=kept_sets.concatenate(kept) if kept else None,
    versions=tuple(version for piece in pieces for version in piece.versions),
  )


def check_sampling(
  sampling: types.SamplingParams, *, max_turn_tokens: int
) -> None:
  """Refuses parameters that no engine can honour.

  Args:
    sampling: of a request.
    max_turn_tokens: sampled tokens a turn at most, for any request.

  Raises:
    ValueError: naming the parameter and what is allowed.
  """
  if not 0 < sampling.temperature < math.inf:
    raise ValueError(
      f'temperature ({sampling.temperature}) must be positive and finite'
    )
  if not 0 < sampling.top_p <= 1:
    raise ValueError(f'top_p ({sampling.top_p}) must be in (0, 1]')
  if sampling.top_k < 0:
    raise ValueError(f'top_k ({sampling.top_k}) must be at least 0')
  if not 0 <= sampling.min_p <= 1:
    raise ValueError(f'min_p ({sampling.min_p}) must be in [0, 1]')
  if not 1 <= sampling.max_turn_tokens <= max_turn_tokens:
    raise ValueError(
      f'max_turn_tokens ({sampling.max_turn_tokens}) must be in '
      f'[1, {max_turn_tokens}]'
    )


def check_append(
  slot: int, tokens: np.ndarray, *, left: int, max_context: int
) -> None:
  """Refuses ids that an episode cannot go on with.

  Args:
    slot: the episode's.
    tokens: [k] ids to be queued.
    left: how many more tokens the slot can hold.
    max_context: how many it can hold in all.

  Raises:
    ValueError: there are none, or they leave no room to generate.
  """
  if len(tokens) == 0:
    raise ValueError(f'slot {slot} needs at least one token to go on')
  if len(tokens) >= left:
    raise ValueError(
      f'{len(tokens)} tokens leave no room in slot {slot}: {left} of '
      f'{max_context} are left'
    )


class Engine(Protocol):
  """Decodes slots together and keeps each episode's cache across turns.

  Attributes:
    num_slots: episodes at a time.
    max_context: tokens an episode can hold.
    logprob_kind: what the log-probs of its turns speak of.
    policy_version: of the snapshot that generates; -1 before the first.
    weights_checksum: sha256 of that snapshot's bytes; '' before the first.
  """

  num_slots: int
  max_context: int
  logprob_kind: types.LogprobKind
  policy_version: int
  weights_checksum: str

  def load(
    self, params: Mapping[str, np.ndarray], *, version: int, checksum: str
  ) -> None:
    """Takes new parameters; open episodes go on with them."""

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
  """What the runner asks for rollouts: a pool of services or the fake.

  Attributes:
    num_arrived: answers that `next` returns without waiting.
  """

  @property
  def num_arrived(self) -> int:
    """See above."""

  def submit(self, requests: Sequence[Request]) -> None:
    """Queues requests; a known request_id is not run twice."""

  def next(self, timeout_s: float) -> types.Trajectory:
    """Returns the next finished trajectory, in completion order.

    Raises:
      SamplerLost: no service is left, or none could be restored.
      SamplerTimeout: nothing finished within `timeout_s`.
    """

  def publish(
    self,
    params: Mapping[str, np.ndarray],
    version: int,
    *,
    interrupt: bool = False,
  ) -> str:
    """Has all later requests generated with a snapshot.

    Requests of the old one are finished with it, or go on with the new one
    where they are when `interrupt` is set.

    Returns:
      sha256 of the snapshot's bytes, 64 hex digits.
    """

  def close(self) -> None:
    """Releases the connections and any process it owns."""
