"""Finished rollouts as arrays and JSON, so that a checkpoint can hold them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spopp_jax import types
from spopp_jax.runner import batcher

_ARRAYS = ('tokens', 'action_mask', 'behaviour_logprobs')
_DTYPES = (np.int32, np.bool_, np.float32)


def pack(
  finished: Sequence[batcher.Finished],
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
  """Returns the arrays of all rollouts, end to end, and the rest of each.

  Args:
    finished: n rollouts.

  Returns:
    tokens [T] int32, action_mask [T] bool, behaviour_logprobs [T] float32,
    lengths [n] int64; kept_ids [E] int32, kept_sizes [A] int64, kept_log_mass
    [A] float32 (NaN: not told) and kept_lengths [n] int64, the sizes of the
    sets of each rollout that has them (-1: none).
    And n JSON-able records.
  """
  trajectories = [item.trajectory for item in finished]
  kept = [t.kept for t in trajectories if t.kept is not None]
  arrays = {
    name: _joined([getattr(t, name) for t in trajectories], dtype)
    for name, dtype in zip(_ARRAYS, _DTYPES, strict=True)
  }
  arrays['lengths'] = np.array([len(t.tokens) for t in trajectories], np.int64)
  arrays['rewards'] = np.array([t.reward for t in trajectories], np.float64)
  arrays['kept_ids'] = _joined([k.ids for k in kept], np.int32)
  arrays['kept_sizes'] = _joined([np.diff(k.offsets) for k in kept], np.int64)
  arrays['kept_log_mass'] = _joined(
    [
      np.full(len(k.offsets) - 1, np.nan) if k.log_mass is None else k.log_mass
      for k in kept
    ],
    np.float32,
  )
  arrays['kept_lengths'] = np.array(
    [-1 if t.kept is None else len(t.kept.offsets) - 1 for t in trajectories],
    np.int64,
  )
  return arrays, [_record(item) for item in finished]


def unpack(
  arrays: Mapping[str, np.ndarray], records: Sequence[Mapping[str, Any]]
) -> list[batcher.Finished]:
  """Returns the rollouts that `pack` was given."""
  ends = np.cumsum(arrays['lengths'])
  kept = _unpack_kept(arrays)
  finished = []
  for i, record in enumerate(records):
    span = slice(int(ends[i] - arrays['lengths'][i]), int(ends[i]))
    fields = dict(record['trajectory'])
    fields['status'] = types.Status[fields['status']]
    fields['logprob_kind'] = types.LogprobKind[fields['logprob_kind']]
    fields['sampling'] = types.SamplingParams(**fields['sampling'])
    fields['spans'] = tuple(types.VersionSpan(**s) for s in fields['spans'])
    finished.append(
      batcher.Finished(
        types.Ticket(**record['ticket']),
        types.Trajectory(
          **fields,
          tokens=np.array(arrays['tokens'][span]),
          action_mask=np.array(arrays['action_mask'][span]),
          behaviour_logprobs=np.array(arrays['behaviour_logprobs'][span]),
          reward=float(arrays['rewards'][i]),
          kept=kept[i],
        ),
      )
    )
  return finished


def _record(item: batcher.Finished) -> dict[str, Any]:
  trajectory = item.trajectory
  fields = {
    field.name: getattr(trajectory, field.name)
    for field in dataclasses.fields(trajectory)
    if field.name not in (*_ARRAYS, 'kept', 'reward')
  }
  fields['status'] = trajectory.status.name
  fields['logprob_kind'] = trajectory.logprob_kind.name
  fields['sampling'] = dataclasses.asdict(trajectory.sampling)
  fields['spans'] = [dataclasses.asdict(span) for span in trajectory.spans]
  return {'ticket': dataclasses.asdict(item.ticket), 'trajectory': fields}


def _unpack_kept(
  arrays: Mapping[str, np.ndarray],
) -> list[types.KeptIds | None]:
  kept: list[types.KeptIds | None] = []
  token = first = 0
  for count in arrays['kept_lengths'].tolist():
    if count < 0:
      kept.append(None)
      continue
    sizes = arrays['kept_sizes'][token : token + count]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    last = first + int(offsets[-1])
    mass = np.array(arrays['kept_log_mass'][token : token + count])
    kept.append(
      types.KeptIds(
        np.array(arrays['kept_ids'][first:last]),
        offsets,
        None if not count or np.isnan(mass).any() else mass,
      )
    )
    token, first = token + count, last
  return kept


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
  return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
