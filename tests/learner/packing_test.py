import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from spopp_jax import types
from spopp_jax.learner import packing


def make_trajectory(tokens, reward=0.0, name='r', seed=0):
  rng = np.random.default_rng(seed)
  tokens = np.asarray(tokens, np.int32)
  mask = rng.random(len(tokens)) < 0.5
  mask[:1] = False
  return types.Trajectory(
    request_id=name,
    task_id='t',
    status=types.Status.OK,
    reward=reward,
    policy_version=0,
    weights_checksum='',
    tokens=tokens,
    action_mask=mask,
    behaviour_logprobs=np.where(mask, -rng.random(len(tokens)), 0).astype('f4'),
    num_turns=1,
    sampling=types.SamplingParams(),
  )


def make_trajectories(lengths):
  """Trajectories of which no two tokens are equal."""
  starts = np.cumsum([1, *lengths])
  return [
    make_trajectory(np.arange(start, start + n), i / 8, f'r{i}', seed=i)
    for i, (start, n) in enumerate(zip(starts, lengths, strict=False))
  ]


def pack(trajectories, **options):
  n = len(trajectories)
  options = {
    'num_slots': max(n, 1),
    'minibatches': 1,
    'row_length': 10,
    'row_buckets': (1, 2, 4, 8),
    **options,
  }
  return packing.pack(trajectories, [i / 16 for i in range(n)], **options)


def test_pack01(cases):
  case = cases['PACK-01']
  inputs, expected = case['input'], case['expected']
  batch = pack(
    [make_trajectory(tokens) for tokens in inputs['sequences']],
    row_length=inputs['row_length'],
  )
  for name in ('tokens', 'segment_ids', 'positions'):
    np.testing.assert_array_equal(getattr(batch, name), [[expected[name]]])
  np.testing.assert_array_equal(batch.trajectory_ids, [[[0, 0, 0, 1, 1, 2]]])


def test_every_field_follows_its_trajectory():
  trajectories = make_trajectories([4, 7, 3])
  batch = pack(trajectories, num_slots=5)
  # First fit by decreasing length: 7 and 3 share a row, 4 has its own.
  np.testing.assert_array_equal(
    batch.trajectory_ids, [[[1] * 7 + [2] * 3, [0] * 4 + [5] * 6]]
  )
  np.testing.assert_array_equal(
    batch.segment_ids, [[[1] * 7 + [2] * 3, [1] * 4 + [0] * 6]]
  )
  np.testing.assert_array_equal(
    batch.positions, [[[*range(7), *range(3)], [*range(4)] + [0] * 6]]
  )
  a, b, c = trajectories
  np.testing.assert_array_equal(batch.tokens[0, 0], [*b.tokens, *c.tokens])
  np.testing.assert_array_equal(
    batch.action_mask[0, 0], [*b.action_mask, *c.action_mask]
  )
  np.testing.assert_array_equal(
    batch.behaviour_logprobs[0, 0],
    [*b.behaviour_logprobs, *c.behaviour_logprobs],
  )
  np.testing.assert_array_equal(batch.tokens[0, 1], [*a.tokens] + [0] * 6)
  np.testing.assert_array_equal(batch.rewards, [0, 1 / 8, 2 / 8, 0, 0])
  np.testing.assert_array_equal(batch.values, [0, 1 / 16, 2 / 16, 0, 0])
  np.testing.assert_array_equal(batch.usable, [1, 1, 1, 0, 0])
  np.testing.assert_array_equal(batch.group_ids, [0, 1, 2, 5, 5])
  assert {name: getattr(batch, name).dtype.name for name in batch._fields} == {
    'tokens': 'int32',
    'positions': 'int32',
    'segment_ids': 'int32',
    'trajectory_ids': 'int32',
    'action_mask': 'bool',
    'behaviour_logprobs': 'float32',
    'kept_ids': 'int32',
    'rewards': 'float32',
    'values': 'float32',
    'usable': 'bool',
    'group_ids': 'int32',
  }


@hypothesis.given(
  st.lists(st.integers(1, 10), max_size=12),
  st.integers(1, 5),
  st.none() | st.integers(0, 9),
  st.sampled_from([(), (1,), (2, 3, 5), (1, 2, 4, 8)]),
)
@hypothesis.settings(deadline=None)
def test_every_token_stands_once_and_comes_back(
  lengths, minibatches, seed, buckets
):
  trajectories = make_trajectories(lengths)
  batch = pack(
    trajectories,
    minibatches=minibatches,
    row_buckets=buckets,
    rng=None if seed is None else np.random.default_rng(seed),
  )
  n = max(len(lengths), 1)
  present = batch.trajectory_ids < n
  total = sum(lengths)
  assert sorted(batch.tokens[present]) == list(range(1, total + 1))
  # One truth about padding: nothing stands where there is no trajectory.
  np.testing.assert_array_equal(present, batch.segment_ids > 0)
  for name in ('tokens', 'positions', 'action_mask', 'behaviour_logprobs'):
    assert not getattr(batch, name)[~present].any()
  for name in ('tokens', 'action_mask', 'behaviour_logprobs'):
    back = packing.unpack(batch, getattr(batch, name), lengths)
    for trajectory, values in zip(trajectories, back, strict=True):
      np.testing.assert_array_equal(values, getattr(trajectory, name))
  # A trajectory lies in one minibatch and one row, as one segment; the rows
  # of a bucket or as many as trajectories can be.
  for i in range(len(lengths)):
    where = np.argwhere(batch.trajectory_ids == i)
    assert len(np.unique(where[:, :2], axis=0)) == 1
    np.testing.assert_array_equal(np.diff(where[:, 2]), 1)
    assert len(np.unique(batch.segment_ids[batch.trajectory_ids == i])) == 1
  assert batch.tokens.shape[1] in {*buckets, -(-n // minibatches)}


def test_trajectories_are_dealt_in_turn():
  trajectories = make_trajectories([1] * 7)
  members = lambda batch: [
    sorted({*ids[ids < 7].tolist()}) for ids in batch.trajectory_ids
  ]
  batch = pack(trajectories, minibatches=3)
  assert members(batch) == [[0, 3, 6], [1, 4], [2, 5]]
  deal = lambda seed: members(
    pack(trajectories, minibatches=3, rng=np.random.default_rng(seed))
  )
  assert deal(1) == deal(1)
  assert len({str(deal(seed)) for seed in range(5)}) > 1
  for seed in range(5):
    assert [len(share) for share in deal(seed)] == [3, 2, 2]
    assert {i for share in deal(seed) for i in share} == {*range(7)}


@pytest.mark.parametrize(
  'needed, rows', [(0, 2), (1, 2), (2, 2), (3, 4), (4, 4), (5, 9), (9, 9)]
)
def test_rows_are_those_of_the_smallest_bucket_that_fits(needed, rows):
  # Not in order; the bucket of 16 is more than can ever be needed.
  assert packing.row_count(needed, (4, 16, 2), limit=9) == rows


def test_the_fullest_minibatch_decides_the_rows():
  # Shares by turns: (9, 9, 9) needs three rows, (1, 1, 1) one.
  batch = pack(make_trajectories([9, 1, 9, 1, 9, 1]), minibatches=2)
  assert batch.tokens.shape == (2, 3, 10)
  batch = pack(make_trajectories([5, 1, 5, 1, 9, 1]), minibatches=2)
  assert batch.tokens.shape == (2, 2, 10)


def test_no_trajectory_gives_an_empty_batch():
  batch = pack([], num_slots=4, minibatches=2, row_buckets=(1, 2))
  assert batch.tokens.shape == (2, 1, 10)
  assert not batch.usable.any()
  assert not batch.action_mask.any()
  assert (batch.trajectory_ids == 4).all()
  assert packing.unpack(batch, batch.tokens, []) == []


def test_a_row_is_filled_to_the_last_token():
  batch = pack(make_trajectories([10, 6, 4]))
  assert batch.tokens.shape == (1, 2, 10)
  assert (batch.segment_ids > 0).all()


def test_what_does_not_fit_is_refused():
  with pytest.raises(ValueError, match='3 trajectories do not fit 2 slots'):
    pack(make_trajectories([1, 1, 1]), num_slots=2)
  with pytest.raises(ValueError, match=r'r1 has 11 tokens.*holds 10'):
    pack(make_trajectories([3, 11]))
  with pytest.raises(ValueError, match='2 groups do not fit 1 groups of 2'):
    pack(make_trajectories([1, 1]), groups=[0, 1], group_size=2)
  with pytest.raises(ValueError, match='has 3 members, at most 2 fit'):
    pack(make_trajectories([1] * 3), groups=[4] * 3, group_size=2, num_slots=4)


@pytest.mark.parametrize('seed', [None, 0, 1])
def test_groups_stay_whole_in_a_minibatch(seed):
  groups = [30, 10, 30, 20, 10, 40, 20, 30]
  batch = pack(
    make_trajectories([3] * 8),
    groups=groups,
    group_size=3,
    num_slots=12,
    minibatches=2,
    rng=None if seed is None else np.random.default_rng(seed),
  )
  np.testing.assert_array_equal(
    batch.group_ids, [0, 1, 0, 2, 1, 3, 2, 0, 4, 4, 4, 4]
  )
  shares = [set(ids[ids < 12].tolist()) for ids in batch.trajectory_ids]
  assert shares[0] | shares[1] == set(range(8))
  for group in set(groups):
    members = {i for i, g in enumerate(groups) if g == group}
    assert members <= shares[0] or members <= shares[1]
  if seed is None:  # groups are dealt in turn
    assert shares[0] == {0, 2, 7, 3, 6}


def test_rows_are_rounded_up_to_be_cut():
  batch = pack(make_trajectories([9] * 5), row_buckets=(1, 3), row_multiple=4)
  assert batch.tokens.shape == (1, 8, 10)


def _truncated(trajectory, sets, **sampling):
  kept = types.KeptIds(
    ids=np.concatenate(sets).astype(np.int32),
    offsets=np.cumsum([0, *map(len, sets)]),
  )
  return dataclasses.replace(
    trajectory, kept=kept, sampling=types.SamplingParams(**sampling)
  )


def test_kept_ids_stand_at_their_action_tokens():
  plain, other = make_trajectories([4, 5])
  mask = np.array([False, True, False, True])
  plain = dataclasses.replace(plain, action_mask=mask)
  batch = pack(
    [_truncated(plain, [[7, 2, 9], [5]], top_p=0.9), other], row_length=9
  )
  assert batch.kept_ids.shape == (1, 1, 9, 4)  # 3 rounded up to 4
  want = np.full((9, 4), -1)
  start = int(np.argmax(batch.trajectory_ids[0, 0] == 0))
  want[start + 1, :3], want[start + 3, :1] = [7, 2, 9], [5]
  np.testing.assert_array_equal(batch.kept_ids[0, 0], want)


def test_top_k_bounds_the_width_of_kept_ids():
  one, two = make_trajectories([4, 4])
  mask = np.array([False, True, False, False])
  one, two = (dataclasses.replace(t, action_mask=mask) for t in (one, two))
  narrow = [
    _truncated(one, [[1]], top_k=6),
    _truncated(two, [[1, 2]], top_k=3, top_p=0.5),
  ]
  assert pack(narrow).kept_ids.shape[-1] == 6
  assert pack([one, two]).kept_ids.shape[-1] == 0
  boundless = _truncated(two, [[1, 2, 3]], top_k=2**32 - 1)
  assert pack([boundless]).kept_ids.shape[-1] == 4


def test_dyn01_hosts_get_the_same_number_of_rows(cases):
  given = cases['DYN-01']['input']
  lengths = given['host0_lengths'] + given['host1_lengths']
  hosts = given['hosts']
  batch = pack(
    make_trajectories(lengths),
    row_length=given['token_budget'],
    row_multiple=hosts,
    row_buckets=(3,),
  )
  # One deal for all hosts: none has rows, or steps, that another lacks.
  shares = np.split(batch.segment_ids, hosts, axis=1)
  agreed = cases['DYN-01']['expected']['agreed']
  assert {share.shape for share in shares} == {(1, agreed, 8)}
  assert np.count_nonzero(batch.segment_ids) == sum(lengths)
  assert not batch.action_mask[batch.segment_ids == 0].any()
