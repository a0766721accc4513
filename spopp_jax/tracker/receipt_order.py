"""Receipt-order prompt evidence with drift retention (SPO; SPO++ Eq. 2)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from spopp_jax import types
from spopp_jax.tracker import base, drift, prompt_table

_NUM_SAMPLING = len(dataclasses.fields(types.SamplingParams))


@dataclasses.dataclass(frozen=True, eq=False)
class _Visit:
  """A prompt's last response and its log-probs right after that update."""

  trajectory: types.Trajectory
  logprobs: np.ndarray


class ReceiptOrderEvidence:
  """Evidence that each consumed outcome multiplies by a retention."""

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
    self._half_life = drift_half_life
    self._low, self._high = retention_min, retention_max
    self._estimator = drift_estimator
    self._mask_kind = drift_mask
    self._table = prompt_table.PromptTable(task_ids, success, failure)
    self._visits: dict[int, _Visit] = {}

  def values(self, task_ids: Sequence[str], policy_event: int) -> np.ndarray:
    """Returns v-hat [n] float64; the policy event plays no part."""
    del policy_event
    return self._table.values(task_ids)

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
    rows = self._table.rows([t.task_id for t in trajectories]).tolist()
    rewards = [
      prompt_table.check_reward(t.task_id, t.reward) for t in trajectories
    ]
    visited = list(dict.fromkeys(rows))
    last = {
      row: _response(t) for row, t in zip(rows, trajectories, strict=True)
    }
    before = [row for row in visited if row in self._visits]
    logprobs = score(
      [self._visits[row].trajectory for row in before]
      + [last[row] for row in visited]
    )
    present = dict(zip(before, logprobs[: len(before)], strict=True))
    drifts = {
      row: self._drift(self._visits[row], present[row]) for row in before
    }
    for row, reward in zip(rows, rewards, strict=True):
      kept = drift.retention(
        drifts.pop(row, 0.0),
        half_life=self._half_life,
        low=self._low,
        high=self._high,
      )
      self._table.success[row] = kept * self._table.success[row] + reward
      self._table.failure[row] = kept * self._table.failure[row] + 1 - reward
    for row, after in zip(visited, logprobs[len(before) :], strict=True):
      self._visits[row] = _Visit(last[row], np.array(after, np.float32))

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns evidence and stored responses; those lie end to end.

    `response_rows` [R] names each response's prompt and `response_offsets`
    [R + 1] its span in the token arrays.
    """
    visits = [(row, self._visits[row]) for row in sorted(self._visits)]
    stored = [visit.trajectory for _, visit in visits]
    lengths = [len(trajectory.tokens) for trajectory in stored]
    return {
      **self._table.state_dict(),
      'response_rows': np.array([row for row, _ in visits], np.int64),
      'response_offsets': np.cumsum([0, *lengths], dtype=np.int64),
      'response_tokens': _joined([t.tokens for t in stored], np.int32),
      'response_actions': _joined([t.action_mask for t in stored], np.bool_),
      'response_logprobs': _joined([v.logprobs for _, v in visits], np.float32),
      'response_sampling': np.array(
        [dataclasses.astuple(t.sampling) for t in stored], np.float64
      ).reshape(len(stored), _NUM_SAMPLING),
    }

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores what `state_dict` returned; ValueError for other tasks."""
    self._table.load_state_dict(state)
    self._visits = {}
    offsets = state['response_offsets']
    for i, row in enumerate(state['response_rows'].tolist()):
      span = slice(offsets[i], offsets[i + 1])
      self._visits[row] = _Visit(
        _stored_trajectory(
          self._table.task_ids[row],
          state['response_tokens'][span],
          state['response_actions'][span],
          _sampling(state['response_sampling'][i]),
        ),
        np.array(state['response_logprobs'][span], np.float32),
      )

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
