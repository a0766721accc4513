"""What a checkpoint holds of rollouts is what they were, bit by bit."""

import dataclasses
import json

import numpy as np
import pytest
import scripted_sampler

from spopp_jax import types
from spopp_jax.runner import batcher, stored


def finished(number, *, kept=None, **changes):
  trajectory = scripted_sampler.trajectory(
    f'r{number}',
    f'task-{number}',
    tokens=range(number, number + 4),
    actions=(False, True, False, True),
    logprobs=(0, -0.1 - number, 0, -1e-7),
    version=number,
  )
  return batcher.Finished(
    scripted_sampler.ticket(number, value=1 / 3, version=number),
    dataclasses.replace(trajectory, kept=kept, **changes),
  )


def kept(*sets, log_mass=None):
  offsets = np.cumsum([0, *map(len, sets)])
  return types.KeptIds(
    np.array([i for one in sets for i in one], np.int32),
    offsets,
    None if log_mass is None else np.array(log_mass, np.float32),
  )


def assert_equal(one, other):
  assert one.ticket == other.ticket
  for field in dataclasses.fields(types.Trajectory):
    a, b = (getattr(x.trajectory, field.name) for x in (one, other))
    if field.name == 'kept' and a is not None:
      assert b is not None
      for name in ('ids', 'offsets'):
        same_bits(getattr(a, name), getattr(b, name))
      assert (a.log_mass is None) == (b.log_mass is None)
      if a.log_mass is not None:
        same_bits(a.log_mass, b.log_mass)
    elif isinstance(a, np.ndarray):
      same_bits(a, b)
    else:
      assert a == b
      assert type(a) is type(b)


def same_bits(a, b):
  assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


NONE = finished(1)
CASES = {
  'empty': [],
  'one': [NONE],
  'no tokens': [
    finished(
      2,
      tokens=np.zeros(0, np.int32),
      action_mask=np.zeros(0, bool),
      behaviour_logprobs=np.zeros(0, np.float32),
    ),
    NONE,
  ],
  'kept and not': [
    finished(1, kept=kept([1, 7, 2], [5])),
    NONE,
    finished(3, kept=kept([9], [4, 3], log_mass=[-0.1, 0])),
  ],
  'kept of no action': [finished(1, kept=kept()), finished(2, kept=kept([1]))],
  'other kinds': [
    finished(
      4,
      status=types.Status.LENGTH,
      reward=0.1 + 0.2,
      logprob_kind=types.LogprobKind.RAW,
      seconds=0.1,
      sampling=types.SamplingParams(temperature=0.7, top_k=5),
      spans=(
        types.VersionSpan(3, 'a' * 64, 1),
        types.VersionSpan(5, 'b' * 64, 1),
      ),
    )
  ],
}


@pytest.mark.parametrize('items', CASES.values(), ids=CASES)
def test_what_is_packed_comes_back(items):
  arrays, records = stored.pack(items)
  back = stored.unpack(arrays, json.loads(json.dumps(records)))
  assert len(back) == len(items)
  for one, other in zip(items, back, strict=True):
    assert_equal(one, other)


def test_the_arrays_lie_end_to_end():
  arrays, _ = stored.pack(CASES['kept and not'])
  assert arrays['tokens'].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 3, 4, 5, 6]
  assert arrays['lengths'].tolist() == [4, 4, 4]
  assert arrays['kept_ids'].tolist() == [1, 7, 2, 5, 9, 4, 3]
  assert arrays['kept_sizes'].tolist() == [3, 1, 1, 2]
  assert arrays['kept_lengths'].tolist() == [2, -1, 2]


def test_nothing_still_has_its_dtypes():
  arrays, records = stored.pack([])
  assert records == []
  assert {name: array.dtype.name for name, array in arrays.items()} == {
    'tokens': 'int32',
    'action_mask': 'bool',
    'behaviour_logprobs': 'float32',
    'lengths': 'int64',
    'rewards': 'float64',
    'kept_ids': 'int32',
    'kept_log_mass': 'float32',
    'kept_sizes': 'int64',
    'kept_lengths': 'int64',
  }


def test_what_comes_back_is_its_own():
  arrays, records = stored.pack([NONE])
  (back,) = stored.unpack(arrays, records)
  arrays['tokens'][:] = 0
  assert back.trajectory.tokens.tolist() == [1, 2, 3, 4]
