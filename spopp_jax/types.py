"""Records shared by every package; axes are named here once; no logic.

Axes: B rows, S tokens, N trajectories, M optimizer minibatches, G groups, K
members a group, C ids that truncated decoding kept. All per-token arrays are
aligned on the token itself: entry `s` speaks of token `s`, so the
log-probability at `s` is log p(token_s | tokens before s in its segment).
"""

import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import numpy as np

Array = Any  # numpy or jax array; shapes and dtypes stand in the docstrings.


class Status(enum.IntEnum):
  """How a request ended (closed; the values cross the wire)."""

  OK = 1
  ENV_ERROR = 2
  TOOL_TIMEOUT = 3
  VERIFIER_TIMEOUT = 4
  CONTEXT_LIMIT = 5
  LENGTH = 6
  SAMPLER_ERROR = 7
  STALE = 8
  DUPLICATE = 9
  MIXED_VERSIONS = 10
  INVALID = 11
  CANCELLED = 12


class LogprobKind(enum.IntEnum):
  """Which distribution behaviour log-probs speak of (values cross the wire).

  Both come after temperature. PROCESSED is the one that was sampled from,
  after top-k and top-p; RAW is the one before them. Without truncation they
  are the same.
  """

  PROCESSED = 1
  RAW = 2


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How the sampler turns logits into tokens.

  Attributes:
    temperature: > 0; logits are divided by it.
    top_p: (0, 1]; 1 is off.
    top_k: >= 0; 0 is off.
    min_p: in [0, 1]; 0 is off.
    max_turn_tokens: sampled tokens a turn at most, the end token included.
    max_turns: environment interactions an episode at most.
  """

  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  max_turn_tokens: int = 16
  max_turns: int = 50
  min_p: float = 0.0

  @property
  def truncated(self) -> bool:
    """Whether top-k, top-p or min-p may forbid tokens."""
    return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclasses.dataclass(frozen=True)
class Ticket:
  """One dispatched request with the baseline frozen at dispatch.

  Attributes:
    request_id: idempotency key; a re-dispatch keeps it.
    task_id: key of the repeatable task in the evidence.
    value: v-hat read at dispatch (SPO++ Eq. 1/3), in [0, 1].
    policy_version: version of the snapshot asked to generate.
    step: learner step whose collection the request was dispatched for.
    seed: seed of the request's own random stream, in [0, 2**32).
    group_id: the prompt group it was dispatched in; -1 is a group of its own.
  """

  request_id: str
  task_id: str
  value: float
  policy_version: int
  step: int
  seed: int
  group_id: int = -1


@dataclasses.dataclass(frozen=True, eq=False)
class KeptIds:
  """Token ids that truncated decoding left to choose from (host arrays, CSR).

  Action token k of a trajectory was drawn from ids[offsets[k]:offsets[k + 1]],
  its own id among them.

  Attributes:
    ids: [E] int32; distinct within one action token.
    offsets: [L + 1] int64; rising from 0 to E, L action tokens.
    log_mass: [L] float32 nats; log-probability of each token's set before the
      truncation; None of a sampler that cannot tell.
  """

  ids: np.ndarray
  offsets: np.ndarray
  log_mass: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class VersionSpan:
  """Action tokens in a row that one snapshot generated.

  Attributes:
    policy_version: version of the snapshot.
    weights_checksum: sha256 hex of its bytes.
    num_actions: how many action tokens, at least 1.
  """

  policy_version: int
  weights_checksum: str
  num_actions: int


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
  """One finished request as the sampler reports it (host arrays).

  Attributes:
    request_id: echoes the ticket.
    task_id: echoes the ticket.
    status: how it ended.
    reward: terminal outcome in [0, 1]; NaN unless status is OK.
    policy_version: version of the snapshot that generated every action token,
      or with `spans` the first.
    weights_checksum: sha256 hex of that snapshot's bytes.
    tokens: [T] int32; prompt, actions and observations in order.
    action_mask: [T] bool; True where the policy sampled the token.
    behaviour_logprobs: [T] float32 nats of the distribution that logprob_kind
      names; 0 where action_mask is False.
    num_turns: environment interactions.
    sampling: parameters that were used.
    seconds: wall time from start of generation to the end, in s.
    detail: reason in words when status is not OK; else ''.
    logprob_kind: what behaviour_logprobs speak of.
    kept: what truncated decoding kept; None if decoding was not truncated or
      the sampler does not say.
    spans: versions of the action tokens in order when there are several; else
      empty.
  """

  request_id: str
  task_id: str
  status: Status
  reward: float
  policy_version: int
  weights_checksum: str
  tokens: np.ndarray
  action_mask: np.ndarray
  behaviour_logprobs: np.ndarray
  num_turns: int
  sampling: SamplingParams
  seconds: float = 0.0
  detail: str = ''
  logprob_kind: LogprobKind = LogprobKind.PROCESSED
  kept: KeptIds | None = None
  spans: tuple[VersionSpan, ...] = ()

  @property
  def token_versions(self) -> np.ndarray:
    """[T] int64; version that generated each action token, -1 elsewhere."""
    versions = np.full(len(self.tokens), -1, np.int64)
    versions[self.action_mask] = np.repeat(
      [span.policy_version for span in self.spans] or self.policy_version,
      [span.num_actions for span in self.spans] or self.num_actions,
    )
    return versions

  @functools.cached_property
  def num_actions(self) -> int:
    """L_i, the action tokens of the trajectory."""
    return int(np.count_nonzero(self.action_mask))


class PackedBatch(NamedTuple):
  """Trajectories packed into rows: segments side by side, a device pytree.

  Padding slots have segment_ids 0, trajectory_ids N and action_mask False.

  Attributes:
    tokens: [B, S] int32.
    positions: [B, S] int32; restart at 0 in every segment.
    segment_ids: [B, S] int32; 1.. within a row, 0 padding.
    trajectory_ids: [B, S] int32 in [0, N); N is padding.
    action_mask: [B, S] bool; the one mask that lengths, statistics and loss
      read.
    behaviour_logprobs: [B, S] float32 nats; 0 where action_mask is False.
    kept_ids: [B, S, C] int32; ids that decoding could choose from, -1 in free
      slots; none at all means the whole vocabulary. C = 0 for batches that
      were not truncated.
    rewards: [N] float32.
    values: [N] float32; v-hat frozen at dispatch.
    usable: [N] bool; False for padded trajectory slots.
    group_ids: [N] int32; trajectories of one prompt group share it. With K
      members a group they lie in [0, N // K); others are padding.
  """

  tokens: Array
  positions: Array
  segment_ids: Array
  trajectory_ids: Array
  action_mask: Array
  behaviour_logprobs: Array
  kept_ids: Array
  rewards: Array
  values: Array
  usable: Array
  group_ids: Array
