"""Receipt-order prompt evidence with drift retention (SPO; SPO++ Eq. 2)."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from spopp_jax import types
from spopp_jax.tracker import base, drift, prompt_table

_NUM_SAMPLING = len(dataclasses.fields(types.SamplingParams))


@dataclasses.dataclass(frozen=True, eq=False)
class _Visit:
  """A prompt's last response and its log-probs right after that update."""

  trajectory: types.Trajectory
  logprobs: np.ndarray


class ReceiptOrderEvidence:
  """Evidence that each consumed outcome multiplies by a retention.

  Drift needs the last response of a prompt. What is kept of them has a cap:
  beyond it those of the prompts longest unvisited are forgotten, and the next
  visit of such a prompt is a first one again.

  Attributes:
    forgotten_responses: responses dropped to stay within the cap so far.
    stored_tokens: tokens of the responses that are kept.
  """

  def __init__(
    self,
    task_ids: Sequence[str],
    success: np.ndarray,
    failure: np.ndarray,
    *,
    drift_half_life: float = 0.06,
    retention_min: float = 0.875,
    retention_max: float = 0.96,
    drift_estimator: str = 'abs_logratio',
    drift_mask: str = 'action',
    max_stored_tokens: int = 2**25,
    directory: str | os.PathLike | None = None,
  ):
    """Starts from offline evidence.

    Args:
      task_ids: P unique keys.
      success: [P] float64 >= 0; alpha_0.
      failure: [P] float64 >= 0; beta_0; success + failure > 0.
      drift_half_life: > 0, nats; the drift at which one half is retained.
      retention_min: (0, 1]; the least that is retained.
      retention_max: [retention_min, 1]; the most; holds at a first visit.
      drift_estimator: 'abs_logratio', 'k1' or 'k3'.
      drift_mask: 'action', or 'response' to count observations too.
      max_stored_tokens: >= 0; tokens of stored responses at most, at 13 bytes
        each in memory (the default: 436 MB) and 9 in a checkpoint. 0 stores
        none, which retains retention_max always.
      directory: None to hold both arrays [P] in memory; else where they lie
        as memory-mapped files, which are overwritten.

    Raises:
      ValueError: naming the argument that is out of range.
    """
    if not (math.isfinite(drift_half_life) and drift_half_life > 0):
      raise ValueError(
        f'drift_half_life ({drift_half_life}) must be positive and finite'
      )
    if not 0 < retention_min <= retention_max <= 1:
      raise ValueError(
        f'retention_min ({retention_min}) and retention_max ({retention_max}) '
        'must satisfy 0 < retention_min <= retention_max <= 1'
      )
    for name, value, allowed in (
      ('drift_estimator', drift_estimator, drift.ESTIMATORS),
      ('drift_mask', drift_mask, drift.MASKS),
    ):
      if value not in allowed:
        raise ValueError(f'{name} ({value!r}) must be one of {allowed}')
    if max_stored_tokens < 0:
      raise ValueError(
        f'max_stored_tokens ({max_stored_tokens}) must be at least 0'
      )
    self._half_life = drift_half_life
    self._low, self._high = retention_min, retention_max
    self._estimator = drift_estimator
    self._mask_kind = drift_mask
    self._max_stored = max_stored_tokens
    self._table = prompt_table.PromptTable(
      task_ids, success, failure, directory=directory
    )
    # By row, the longest unvisited first.
    self._visits: dict[int, _Visit] = {}
    self.stored_tokens = 0
    self.forgotten_responses = 0

  @property
  def task_ids(self) -> tuple[str, ...]:
    """P keys in the order of the rows."""
    return self._table.task_ids

  def read(
    self, rows: npt.ArrayLike, policy_event: int | None = None
  ) -> np.ndarray:
    """Returns v-hat [n] float64; the policy event plays no part.

    Raises:
      ValueError: a row outside [0, P).
    """
    del policy_event
    return self._table.read(rows)

  def changed_since(self, version: int) -> tuple[np.ndarray, int]:
    """Returns the rows changed since a version, and the present version."""
    return self._table.changed_since(version)

  def values(self, task_ids: Sequence[str], policy_event: int) -> np.ndarray:
    """Returns v-hat [n] float64; the policy event plays no part."""
    return self.read(self._table.rows(task_ids), policy_event)

  def counts(
    self, task_ids: Sequence[str], policy_event: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns alpha [n] and beta [n]; the policy event plays no part."""
    del policy_event
    rows = self._table.rows(task_ids)
    return self._table.success[rows], self._table.failure[rows]

  def receive(self, outcomes: Sequence[base.Outcome]) -> None:
    """Does nothing: SPO counts an outcome once its batch was consumed."""
    del outcomes

  def consume(
    self, trajectories: Sequence[types.Trajectory], score: base.ScoreFn
  ) -> None:
    """Applies Eq. 2 to one outcome after another, in receipt order.

    Drift compares the response of a prompt's previous visit now and right
    after that visit. A second outcome of one prompt in the batch finds the
    first one as its previous visit, on which the policy has not moved since.
    `score` is called once. Nothing changes if an outcome is refused.

    Raises:
      ValueError: an unknown task, a reward outside [0, 1], or log-probs that
        are not finite.
    """
    if not trajectories:
      return
    touched = self._table.rows([t.task_id for t in trajectories])
    rewards = self._table.checked_rewards(
      touched, [t.reward for t in trajectories]
    )
    rows = touched.tolist()
    last: dict[int, types.Trajectory] = {}
    for row, trajectory in zip(rows, trajectories, strict=True):
      last.pop(row, None)  # so that the order is that of the last visits
      last[row] = _response(trajectory)
    visited = list(last)
    before = [row for row in visited if row in self._visits]
    logprobs = score(
      [self._visits[row].trajectory for row in before]
      + [last[row] for row in visited]
    )
    present = dict(zip(before, logprobs[: len(before)], strict=True))
    drifts = {
      row: self._drift(self._visits[row], present[row]) for row in before
    }
    for row, reward in zip(rows, rewards.tolist(), strict=True):
      kept = drift.retention(
        drifts.pop(row, 0.0),
        half_life=self._half_life,
        low=self._low,
        high=self._high,
      )
      self._table.success[row] = kept * self._table.success[row] + reward
      self._table.failure[row] = kept * self._table.failure[row] + 1 - reward
    self._table.mark_changed(touched)
    for row, after in zip(visited, logprobs[len(before) :], strict=True):
      self._store(row, _Visit(last[row], np.array(after, np.float32)))

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns evidence and stored responses; those lie end to end.

    `response_rows` [R] names each response's prompt, the longest unvisited
    first, and `response_offsets` [R + 1] its span in the token arrays.
    """
    visits = self._visits.values()
    stored = [visit.trajectory for visit in visits]
    lengths = [len(trajectory.tokens) for trajectory in stored]
    return {
      **self._table.state_dict(),
      'response_rows': np.array(list(self._visits), np.int64),
      'response_offsets': np.cumsum([0, *lengths], dtype=np.int64),
      'response_tokens': _joined([t.tokens for t in stored], np.int32),
      'response_actions': _joined([t.action_mask for t in stored], np.bool_),
      'response_logprobs': _joined([v.logprobs for v in visits], np.float32),
      'response_sampling': np.array(
        [dataclasses.astuple(t.sampling) for t in stored], np.float64
      ).reshape(len(stored), _NUM_SAMPLING),
      'forgotten_responses': np.array(self.forgotten_responses, np.int64),
    }

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores what `state_dict` returned; ValueError for other tasks."""
    self._table.load_state_dict(state)
    self._visits, self.stored_tokens = {}, 0
    self.forgotten_responses = int(state['forgotten_responses'])
    offsets = state['response_offsets']
    for i, row in enumerate(state['response_rows'].tolist()):
      span = slice(offsets[i], offsets[i + 1])
      trajectory = _stored_trajectory(
        self.task_ids[row],
        state['response_tokens'][span],
        state['response_actions'][span],
        _sampling(state['response_sampling'][i]),
      )
      logprobs = np.array(state['response_logprobs'][span], np.float32)
      self._store(row, _Visit(trajectory, logprobs))

  def _store(self, row: int, visit: _Visit) -> None:
    """Keeps the row's last visit; forgets the oldest ones beyond the cap."""
    self._drop(row)
    size = len(visit.trajectory.tokens)
    if size > self._max_stored:
      self.forgotten_responses += 1
      return
    # Room is made first, so that the cap holds at every moment.
    while self.stored_tokens + size > self._max_stored:
      self._drop(next(iter(self._visits)))
      self.forgotten_responses += 1
    self._visits[row] = visit
    self.stored_tokens += size

  def _drop(self, row: int) -> None:
    visit = self._visits.pop(row, None)
    if visit is not None:
      self.stored_tokens -= len(visit.trajectory.tokens)

  def _drift(self, visit: _Visit, present: np.ndarray) -> float:
    mask = drift.drift_mask(visit.trajectory.action_mask, kind=self._mask_kind)
    moved = drift.drift(
      visit.logprobs, np.asarray(present), mask, estimator=self._estimator
    )
    if not math.isfinite(moved):
      raise ValueError(
        f'drift {moved} on the stored response of task '
        f'{visit.trajectory.task_id!r}: the learner scored it with log-probs '
        'that are not finite'
      )
    return moved


def _response(trajectory: types.Trajectory) -> types.Trajectory:
  return _stored_trajectory(
    trajectory.task_id,
    trajectory.tokens,
    trajectory.action_mask,
    trajectory.sampling,
  )


def _stored_trajectory(
  task_id: str,
  tokens: np.ndarray,
  action_mask: np.ndarray,
  sampling: types.SamplingParams,
) -> types.Trajectory:
  """What scoring needs of a trajectory, so that a resumed run scores alike."""
  return types.Trajectory(
    request_id='',
    task_id=task_id,
    status=types.Status.OK,
    reward=0.0,
    policy_version=0,
    weights_checksum='',
    tokens=np.array(tokens, np.int32),
    action_mask=np.array(action_mask, np.bool_),
    behaviour_logprobs=np.zeros(len(tokens), np.float32),
    num_turns=0,
    sampling=sampling,
  )


def _sampling(row: np.ndarray) -> types.SamplingParams:
  kinds = [type(value) for value in dataclasses.astuple(types.SamplingParams())]
  return types.SamplingParams(
    *(kind(value) for kind, value in zip(kinds, row.tolist(), strict=True))
  )


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
  """Lays arrays end to end; an empty array when there are none."""
  return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
