"""Packs trajectories of different lengths into rows of one static shape."""

from collections.abc import Iterable, Sequence

import numpy as np

from spopp_jax import types
from spopp_jax.learner import logprob_contract

# A larger top_k may exceed the vocabulary: it is no width to reserve.
WIDEST_TOP_K = 1024


def row_count(needed: int, buckets: Sequence[int], limit: int) -> int:
  """Returns the smallest bucket of at least `needed` rows, or `limit`."""
  fitting = [b for b in buckets if needed <= b < limit]
  return min(fitting, default=limit)


def pack(
  trajectories: Sequence[types.Trajectory],
  values: Sequence[float],
  *,
  groups: Sequence[int] | None = None,
  group_size: int = 1,
  num_slots: int,
  minibatches: int,
  row_length: int,
  row_buckets: Sequence[int],
  row_multiple: int = 1,
  rng: np.random.Generator | None = None,
) -> types.PackedBatch:
  """Packs a collected batch, cut into optimizer minibatches.

  Whole groups are dealt to minibatches in a random order (in the given order
  without `rng`), then trajectories are laid first-fit by decreasing length
  into rows. Rows are padded to the smallest bucket that fits every minibatch,
  so that a run compiles once a bucket.

  Args:
    trajectories: n <= num_slots trajectories of at most row_length tokens.
    values: n frozen baselines, in [0, 1].
    groups: n keys; trajectories of one prompt group share one. None makes
      every trajectory a group of its own.
    group_size: K; members of a group at most.
    num_slots: N, static; slots beyond n are not usable.
    minibatches: M.
    row_length: S.
    row_buckets: allowed numbers of rows; one row a trajectory always fits.
    row_multiple: rows are rounded up to it, so that they can be cut.
    rng: deals groups to minibatches.

  Returns:
    A PackedBatch of numpy arrays; those per token are [M, B, S].

  Raises:
    ValueError: too many trajectories or groups, one longer than a row, or a
      group with more than K members.
  """
  n = len(trajectories)
  if n > num_slots:
    raise ValueError(f'{n} trajectories do not fit {num_slots} slots')
  for trajectory in trajectories:
    if len(trajectory.tokens) > row_length:
      raise ValueError(
        f'trajectory {trajectory.request_id} has {len(trajectory.tokens)} '
        f'tokens, a row holds {row_length}: raise learner.row_length'
      )
  num_groups = num_slots // group_size
  members = _members(range(n) if groups is None else groups)
  _check_groups(members, num_groups, group_size)
  order = np.arange(len(members))
  if rng is not None:
    order = rng.permutation(len(members))
  shares = [
    [i for g in order[m::minibatches] for i in members[g]]
    for m in range(minibatches)
  ]
  layouts = [_first_fit(share, trajectories, row_length) for share in shares]
  rows = row_count(
    max(len(layout) for layout in layouts),
    row_buckets,
    limit=-(-num_groups // minibatches) * group_size,
  )
  rows = -(-rows // row_multiple) * row_multiple
  group_ids = np.full(num_slots, num_groups, np.int32)
  for group, indices in enumerate(members):
    group_ids[indices] = group
  shape = (minibatches, rows, row_length)
  batch = padding(shape, num_slots, _kept_width(trajectories))._replace(
    rewards=_padded([t.reward for t in trajectories], num_slots),
    values=_padded(values, num_slots),
    usable=np.arange(num_slots) < n,
    group_ids=group_ids,
  )
  for m, layout in enumerate(layouts):
    for row, in_row in enumerate(layout):
      _fill_row(batch, (m, row), in_row, trajectories)
  return batch


def padding(
  shape: tuple[int, int, int], num_slots: int, kept_width: int
) -> types.PackedBatch:
  """Returns a batch of padding alone.

  Args:
    shape: [M, B, S] of arrays per token.
    num_slots: N.
    kept_width: C, ids kept a token at most.
  """
  return types.PackedBatch(
    tokens=np.zeros(shape, np.int32),
    positions=np.zeros(shape, np.int32),
    segment_ids=np.zeros(shape, np.int32),
    trajectory_ids=np.full(shape, num_slots, np.int32),
    action_mask=np.zeros(shape, bool),
    behaviour_logprobs=np.zeros(shape, np.float32),
    kept_ids=np.full((*shape, kept_width), -1, np.int32),
    rewards=np.zeros(num_slots, np.float32),
    values=np.zeros(num_slots, np.float32),
    usable=np.zeros(num_slots, bool),
    group_ids=np.arange(num_slots, dtype=np.int32),
  )


def unpack(
  batch: types.PackedBatch, per_token: np.ndarray, lengths: Sequence[int]
) -> list[np.ndarray]:
  """Returns per-token values [M, B, S] as one [T_i] array a trajectory."""
  ids, positions = np.asarray(batch.trajectory_ids), np.asarray(batch.positions)
  outputs = [np.zeros(length, per_token.dtype) for length in lengths]
  for i, output in enumerate(outputs):
    where = ids == i
    output[positions[where]] = per_token[where]
  return outputs


def _members(groups: Iterable[int]) -> list[list[int]]:
  """Returns each group's trajectories; groups in order of appearance."""
  members: dict[int, list[int]] = {}
  for i, group in enumerate(groups):
    members.setdefault(group, []).append(i)
  return list(members.values())


def _check_groups(
  members: Sequence[Sequence[int]], num_groups: int, group_size: int
) -> None:
  if len(members) > num_groups:
    raise ValueError(
      f'{len(members)} groups do not fit {num_groups} groups of {group_size}'
    )
  largest = max(map(len, members), default=0)
  if largest > group_size:
    raise ValueError(f'a group has {largest} members, at most {group_size} fit')


def _kept_width(trajectories: Sequence[types.Trajectory]) -> int:
  """Returns C: top_k where it bounds every set well, else a power of two."""
  kept = [(t, kept) for t in trajectories if (kept := _exact_kept(t))]
  if all(0 < t.sampling.top_k <= WIDEST_TOP_K for t, _ in kept):
    return max((t.sampling.top_k for t, _ in kept), default=0)
  sizes = [_kept_sizes(k) for _, k in kept]
  largest = max(int(size.max(initial=1)) for size in sizes)
  return 1 << (largest - 1).bit_length()


def _exact_kept(trajectory: types.Trajectory) -> types.KeptIds | None:
  """Returns the kept ids that the log-probs were renormalised over."""
  return trajectory.kept if logprob_contract.is_exact(trajectory) else None


def _kept_sizes(kept: types.KeptIds) -> np.ndarray:
  return np.diff(kept.offsets)


def _first_fit(
  share: Sequence[int],
  trajectories: Sequence[types.Trajectory],
  row_length: int,
) -> list[list[int]]:
  rows: list[list[int]] = []
  free: list[int] = []
  for i in sorted(share, key=lambda i: -len(trajectories[i].tokens)):
    length = len(trajectories[i].tokens)
    fit = next((r for r, space in enumerate(free) if space >= length), None)
    if fit is None:
      rows.append([])
      free.append(row_length)
      fit = len(rows) - 1
    rows[fit].append(i)
    free[fit] -= length
  return rows


def _fill_row(
  batch: types.PackedBatch,
  at: tuple[int, int],
  members: Sequence[int],
  trajectories: Sequence[types.Trajectory],
) -> None:
  start = 0
  for segment, i in enumerate(members, start=1):
    t = trajectories[i]
    span = (*at, slice(start, start + len(t.tokens)))
    batch.tokens[span] = t.tokens
    batch.positions[span] = np.arange(len(t.tokens))
    batch.segment_ids[span] = segment
    batch.trajectory_ids[span] = i
    batch.action_mask[span] = t.action_mask
    batch.behaviour_logprobs[span] = t.behaviour_logprobs
    if (kept := _exact_kept(t)) is not None:
      width = batch.kept_ids.shape[-1]
      batch.kept_ids[span][t.action_mask] = _kept_rows(kept, width)
    start += len(t.tokens)


def _kept_rows(kept: types.KeptIds, width: int) -> np.ndarray:
  """Returns the kept ids as [L, width] int32, -1 in free slots."""
  filled = np.arange(width) < _kept_sizes(kept)[:, None]
  rows = np.full(filled.shape, -1, np.int32)
  rows[filled] = kept.ids
  return rows


def _padded(values: Sequence[float], size: int) -> np.ndarray:
  out = np.zeros(size, np.float32)
  out[: len(values)] = values
  return out
