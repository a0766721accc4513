"""Trajectories as they cross the wire, and what a receiver says of them."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import strategies as st

from spopp_jax import types
from spopp_jax.sampler import codec, errors

CHECKSUM = 'ab' * 32
NUM_IDS = 2**31

samplings = st.builds(
  types.SamplingParams,
  temperature=st.floats(1e-3, 10.0),
  top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
  top_k=st.one_of(st.just(0), st.integers(0, 1000)),
  max_turn_tokens=st.integers(1, 10_000),
  max_turns=st.integers(1, 1000),
  min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


def csr(*sets, log_mass=None):
  """Returns one kept set for each action token."""
  if log_mass is not None:
    log_mass = np.array(log_mass, np.float32)
  ids = [i for kept in sets for i in kept]
  offsets = np.cumsum([0, *map(len, sets)], dtype=np.int64)
  return types.KeptIds(np.array(ids, np.int32), offsets, log_mass)


@st.composite
def kept_ids(draw, sampled):
  """Sets around sampled ids, in any order."""
  sets = []
  for token in sampled:
    others = draw(st.sets(st.integers(0, NUM_IDS - 1), max_size=4))
    sets.append(draw(st.permutations(sorted(others | {token}))))
  log_mass = None
  if draw(st.booleans()):
    log_mass = [draw(st.floats(-50, 0, width=32)) for _ in sets]
  return csr(*sets, log_mass=log_mass)


@st.composite
def trajectories(draw, min_tokens=0):
  status = draw(st.sampled_from(types.Status))
  mask = draw(st.lists(st.booleans(), min_size=min_tokens, max_size=20))
  if status == types.Status.OK:
    mask.append(True)
  logprobs = [
    draw(st.floats(-50, 0, width=32)) if action else 0.0 for action in mask
  ]
  size = len(mask)
  ids = st.lists(st.integers(0, NUM_IDS - 1), min_size=size, max_size=size)
  tokens = draw(ids)
  sampling = draw(samplings)
  kept = None
  if sampling.truncated and draw(st.booleans()):
    kept = draw(kept_ids([tokens[i] for i in np.flatnonzero(mask)]))
  is_ok = status == types.Status.OK
  return types.Trajectory(
    request_id=draw(st.text(min_size=1, max_size=40)),
    task_id=draw(st.text(max_size=40)),
    status=status,
    reward=draw(st.floats(0, 1)) if is_ok else math.nan,
    policy_version=draw(st.integers(-1, 2**62)),
    weights_checksum=CHECKSUM,
    tokens=np.array(tokens, np.int32),
    action_mask=np.array(mask, bool),
    behaviour_logprobs=np.array(logprobs, np.float32),
    num_turns=draw(st.integers(0, 1000)),
    sampling=sampling,
    seconds=draw(st.floats(0, 1e6)),
    detail=draw(st.text(max_size=40)),
    logprob_kind=draw(st.sampled_from(types.LogprobKind)),
    kept=kept,
  )


def simple(**changes):
  """Returns an OK trajectory with two actions among five tokens."""
  trajectory = types.Trajectory(
    request_id='r9',
    task_id='t',
    status=types.Status.OK,
    reward=1.0,
    policy_version=3,
    weights_checksum=CHECKSUM,
    tokens=np.array([5, 6, 7, 8, 9], np.int32),
    action_mask=np.array([0, 1, 1, 0, 0], bool),
    behaviour_logprobs=np.array([0, -0.5, -1.5, 0, 0], np.float32),
    num_turns=1,
    sampling=types.SamplingParams(),
  )
  return dataclasses.replace(trajectory, **changes)


def truncated(*sets, **changes):
  """Returns the same, drawn from {6, 2} and {7, 1, 3} or the sets given."""
  return simple(
    sampling=types.SamplingParams(top_k=3),
    kept=csr(*(sets or ([6, 2], [1, 7, 3]))),
    **changes,
  )


def decode(message, max_tokens=100, vocab_size=NUM_IDS):
  return codec.decode_trajectory(
    message, max_tokens=max_tokens, vocab_size=vocab_size
  )


def refusal(message, **limits):
  with pytest.raises(errors.InvalidMessage) as caught:
    decode(message, **limits)
  return caught.value


def assert_same(before, after, but=()):
  """Compares two records field by field, dtypes too."""
  for field in dataclasses.fields(before):
    ours, theirs = getattr(before, field.name), getattr(after, field.name)
    if isinstance(ours, types.KeptIds) and theirs is not None:
      assert_same(ours, theirs)
    elif field.name not in but:
      np.testing.assert_array_equal(ours, theirs, err_msg=field.name)
    if isinstance(ours, np.ndarray):
      assert ours.dtype == theirs.dtype
