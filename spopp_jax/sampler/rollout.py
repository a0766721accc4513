"""The engine x environment loop: requests in, finished trajectories out."""

import collections
import concurrent.futures
import dataclasses
import hashlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from spopp_jax import types
from spopp_jax.envs import base as envs_base
from spopp_jax.sampler import base, kept_sets, payload

_logger = logging.getLogger(__name__)

_MAX_DETAIL_CHARACTERS = 500


class Template(Protocol):
  """Turns texts into the ids around a turn, and a turn into a command."""

  @property
  def fingerprint(self) -> str:
    """A digest; equal when two sides read ids alike."""

  def prompt(self, observation: str) -> np.ndarray:
    """Returns [k] int32: the first observation and the mark of a turn."""

  def observation(self, observation: str, turn: np.ndarray) -> np.ndarray:
    """Returns [k] int32: what follows a turn, up to the mark of the next.

    Args:
      observation: what the turn led to.
      turn: [n] int32; its sampled ids. An end they lack is written first.
    """

  def action_text(self, tokens: np.ndarray) -> str:
    """Returns the command that [k] sampled ids spell, without an end token."""


@dataclasses.dataclass
class _Episode:
  """One request in a slot."""

  request: base.Request
  environment: envs_base.Environment
  policy_version: int
  weights_checksum: str
  started: float
  tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
  logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
  is_action: list[bool] = dataclasses.field(default_factory=list)
  kept: list[types.KeptIds] = dataclasses.field(default_factory=list)
  # What generated each turn: version, checksum, number of tokens.
  turns: list[tuple[int, str, int]] = dataclasses.field(default_factory=list)
  num_turns: int = 0

  def observe(self, tokens: np.ndarray) -> None:
    """Appends ids of the prompt or of an observation."""
    self._extend(tokens, np.zeros(len(tokens), np.float32), is_action=False)

  def act(self, turn: base.Turn, version: int, checksum: str) -> None:
    """Appends ids that a snapshot sampled."""
    self._extend(turn.tokens, turn.logprobs, is_action=True)
    self.turns += turn.versions or [(version, checksum, len(turn.tokens))]
    if turn.kept is not None:
      self.kept.append(turn.kept)

  def spans(self) -> tuple[types.VersionSpan, ...]:
    """Returns the versions in order if there are several, else nothing."""
    by_snapshot = itertools.groupby(self.turns, key=lambda turn: turn[:2])
    spans = tuple(
      types.VersionSpan(version, checksum, sum(turn[2] for turn in turns))
      for (version, checksum), turns in by_snapshot
    )
    return spans if len(spans) > 1 else ()

  def _extend(
    self, tokens: np.ndarray, logprobs: np.ndarray, *, is_action: bool
  ) -> None:
    self.tokens.append(np.asarray(tokens, np.int32))
    self.logprobs.append(np.asarray(logprobs, np.float32))
    self.is_action.append(is_action)


class RolloutDriver:
  """Runs requests through the slots of one engine, one thread at a time.

  Sampled ids stay as they are: they are decoded for the environment but never
  encoded again, and ids are only ever appended. The result depends on the
  requests and their order alone, not on time.

  An episode ends with OK when the environment is done or `max_turns` is
  reached; its reward is 1 when the goal holds, else 0. A turn cut at
  `max_turn_tokens` is no end: its text goes to the environment as it is.
  CONTEXT_LIMIT: the next observation and a full turn do not fit. ENV_ERROR:
  the environment raised, or took more than `env_timeout_s`. Only OK has a
  reward; all others have NaN.
  """

  def __init__(
    self,
    engine: base.Engine,
    tasks: envs_base.TaskSuite,
    template: Template,
    *,
    env_timeout_s: float = 30.0,
  ):
    self.engine = engine
    self.tasks = tasks
    self.template = template
    self._env_timeout_s = env_timeout_s
    self._task_ids = frozenset(tasks.task_ids)
    self._queue: collections.deque[base.Request] = collections.deque()
    self._episodes: dict[int, _Episode] = {}
    self._pool = _new_pool()

  @property
  def num_open(self) -> int:
    """Episodes that hold a slot."""
    return len(self._episodes)

  @property
  def is_idle(self) -> bool:
    """True when no request is queued or open."""
    return not self._episodes and not self._queue

  def submit(self, request: base.Request) -> None:
    """Queues a request; it runs when a slot is free, first come first served.

    Args:
      request: its id must not be queued or open.
    """
    self._queue.append(request)

  def cancel(self, request_id: str) -> None:
    """Forgets a queued or open request; it does not finish."""
    self._queue = collections.deque(
      request for request in self._queue if request.request_id != request_id
    )
    for slot, episode in list(self._episodes.items()):
      if episode.request.request_id == request_id:
        self._close(slot)

  def forget(self) -> None:
    """Drops all requests and the snapshot: everything is stale until `load`."""
    self._queue.clear()
    for slot in list(self._episodes):
      self._close(slot)
    self.engine.policy_version = -1
    self.engine.weights_checksum = ''

  def step(self) -> list[types.Trajectory]:
    """Fills free slots, advances the engine once, and plays ended turns.

    Returns:
      What finished, in the order in which it did; often nothing.
    """
    finished = self._fill_slots()
    if self._episodes:
      for turn in self.engine.step():
        trajectory = self._play(turn)
        if trajectory is not None:
          finished.append(trajectory)
    return finished

  def load(
    self, params: dict[str, np.ndarray], *, version: int, checksum: str
  ) -> None:
    """Hands the engine a new snapshot.

    An open episode goes on under it if its request crosses versions; else it
    ends as MIXED_VERSIONS, and a queued one as STALE.

    Raises:
      ValueError: the engine refuses the parameters.
    """
    self.engine.load(params, version=version, checksum=checksum)

  def answer(
    self, request: base.Request, status: types.Status, detail: str
  ) -> types.Trajectory:
    """Returns the trajectory of a request that was not run."""
    return dataclasses.replace(
      base.unanswered(request, status, detail),
      policy_version=self.engine.policy_version,
      weights_checksum=self.engine.weights_checksum,
    )

  def _fill_slots(self) -> list[types.Trajectory]:
    finished = []
    free = [
      slot
      for slot in range(self.engine.num_slots)
      if slot not in self._episodes
    ]
    while free and self._queue:
      refusal = self._open(free[0], self._queue.popleft())
      if refusal is None:
        free.pop(0)
      else:
        finished.append(refusal)
    return finished

  def _open(self, slot: int, request: base.Request) -> types.Trajectory | None:
    """Starts a request, or returns why it cannot start."""
    version = self.engine.policy_version
    newer = request.crosses_versions and version > request.policy_version
    if version != request.policy_version and not newer:
      return self.answer(
        request,
        types.Status.STALE,
        f'asked for version {request.policy_version}; the active one is '
        f'{self.engine.policy_version}',
      )
    if request.task_id not in self._task_ids:
      return self.answer(
        request,
        types.Status.INVALID,
        f'task_id {request.task_id!r} is not one of the '
        f'{len(self._task_ids)} tasks of this service',
      )
    environment, error = self._call(self.tasks.make, request.task_id)
    if not error:
      observation, error = self._call(environment.reset)
    if error:
      return self.answer(request, types.Status.ENV_ERROR, error)
    prompt = self.template.prompt(observation)
    needed = len(prompt) + request.sampling.max_turn_tokens
    if needed > self.engine.max_context:
      return self.answer(
        request,
        types.Status.CONTEXT_LIMIT,
        f'the prompt of {len(prompt)} tokens and a turn of '
        f'{request.sampling.max_turn_tokens} exceed the context of '
        f'{self.engine.max_context}',
      )
    try:
      self.engine.open(slot, seed=request.seed, sampling=request.sampling)
    except ValueError as refusal:
      return self.answer(request, types.Status.INVALID, str(refusal))
    self.engine.append(slot, prompt)
    episode = _Episode(
      request=request,
      environment=environment,
      policy_version=self.engine.policy_version,
      weights_checksum=self.engine.weights_checksum,
      started=time.monotonic(),
    )
    episode.observe(prompt)
    self._episodes[slot] = episode
    return None

  def _play(self, turn: base.Turn) -> types.Trajectory | None:
    """Gives an ended turn to its environment; returns what then finished."""
    episode = self._episodes[turn.slot]
    problem = _turn_problem(turn, episode)
    if problem is not None:
      return self._finish(turn.slot, types.Status.SAMPLER_ERROR, problem)
    version = self.engine.policy_version
    if episode.request.crosses_versions and not episode.turns:
      # Nothing may have been generated under the version at the opening.
      first = (version, self.engine.weights_checksum, len(turn.tokens))
      episode.policy_version, episode.weights_checksum, _ = (
        turn.versions or (first,)
      )[0]
    episode.act(turn, version, self.engine.weights_checksum)
    if (
      version != episode.policy_version and not episode.request.crosses_versions
    ):
      return self._finish(
        turn.slot,
        types.Status.MIXED_VERSIONS,
        f'began with version {episode.policy_version}; the engine now has '
        f'{version}',
      )
    action = self.template.action_text(turn.tokens)
    result, error = self._call(episode.environment.step, action)
    if error:
      return self._finish(
        turn.slot,
        types.Status.ENV_ERROR,
        f'turn {episode.num_turns + 1}, action {action!r}: {error}',
      )
    episode.num_turns += 1
    sampling = episode.request.sampling
    if result.done or episode.num_turns >= sampling.max_turns:
      return self._finish(
        turn.slot, types.Status.OK, reward=float(result.success)
      )
    observation = self.template.observation(result.observation, turn.tokens)
    left = self.engine.context_left(turn.slot)
    if len(observation) + sampling.max_turn_tokens > left:
      return self._finish(
        turn.slot,
        types.Status.CONTEXT_LIMIT,
        f'the observation of {len(observation)} tokens and a turn of '
        f'{sampling.max_turn_tokens} exceed the {left} tokens left',
      )
    self.engine.append(turn.slot, observation)
    episode.observe(observation)
    return None

  def _finish(
    self,
    slot: int,
    status: types.Status,
    detail: str = '',
    *,
    reward: float = math.nan,
  ) -> types.Trajectory:
    episode = self._episodes[slot]
    self._close(slot)
    lengths = [len(piece) for piece in episode.tokens]
    return types.Trajectory(
      request_id=episode.request.request_id,
      task_id=episode.request.task_id,
      status=status,
      reward=reward,
      policy_version=episode.policy_version,
      weights_checksum=episode.weights_checksum,
      tokens=np.concatenate(episode.tokens),
      action_mask=np.repeat(np.array(episode.is_action), lengths),
      behaviour_logprobs=np.concatenate(episode.logprobs),
      num_turns=episode.num_turns,
      sampling=episode.request.sampling,
      seconds=time.monotonic() - episode.started,
      detail=detail,
      logprob_kind=self.engine.logprob_kind,
      kept=kept_sets.concatenate(episode.kept) if episode.kept else None,
      spans=episode.spans(),
    )

  def _close(self, slot: int) -> None:
    del self._episodes[slot]
    self.engine.close(slot)

  def _call(self, function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Runs environment code; returns its result and what went wrong, or ''."""
    future = self._pool.submit(function, *args)
    try:
      error = future.exception(timeout=self._env_timeout_s)
    except TimeoutError:
      # The thread cannot be stopped; a new one serves the other episodes.
      self._pool.shutdown(wait=False)
      self._pool = _new_pool()
      return None, f'no answer within {self._env_timeout_s} s'
    if error is not None:
      _logger.error('an environment raised', exc_info=error)
      return None, f'{type(error).__name__}: {error}'[:_MAX_DETAIL_CHARACTERS]
    return future.result(), ''


def tasks_fingerprint(task_ids: Sequence[str]) -> str:
  """Returns the sha256 over the ids in their order, 64 hex digits."""
  return hashlib.sha256('\n'.join(task_ids).encode()).hexdigest()


def _new_pool() -> concurrent.futures.ThreadPoolExecutor:
  return concurrent.futures.ThreadPoolExecutor(
    max_workers=1, thread_name_prefix='environment'
  )


def _turn_problem(turn: base.Turn, episode: _Episode) -> str | None:
  """Says why a turn failed or breaks the engine's contract, or None."""
  if turn.problem:
    return f'the engine failed: {turn.problem}'[:_MAX_DETAIL_CHARACTERS]
  if len(turn.tokens) == 0:
    return 'the engine ended a turn without a token'
  if len(turn.logprobs) != len(turn.tokens):
    return (
      f'the engine gave {len(turn.logprobs)} log-probs for '
      f'{len(turn.tokens)} tokens'
    )
  problem = payload.logprob_problem(np.asarray(turn.logprobs))
  if problem is not None:
    return f'the engine gave log-prob {problem}'
  return _kept_problem(turn, episode)


def _kept_problem(turn: base.Turn, episode: _Episode) -> str | None:
  if turn.kept is None:
    return (
      'the engine gave no kept sets but did before' if episode.kept else None
    )
  if not episode.request.sampling.truncated:
    return 'the engine gave kept sets though sampling is not truncated'
  if episode.num_turns and not episode.kept:
    return 'the engine gave kept sets but did not before'
  problem = kept_sets.problem(turn.kept, turn.tokens)
  return problem and f'a kept set of the engine {problem}'
