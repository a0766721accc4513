"""The arrays of a trajectory: layout on the wire and what is refused."""

import dataclasses
import math

import hypothesis
import messages
import numpy as np
import pytest
from hypothesis import strategies as st

from spopp_jax import types
from spopp_jax.sampler import codec, sampler_pb2


@hypothesis.given(messages.trajectories(min_tokens=1), st.data())
def test_any_changed_payload_byte_is_refused(trajectory, data):
  message = codec.encode_trajectory(trajectory)
  arrays = [message.tokens, message.action_mask, message.behaviour_logprobs]
  if message.HasField('kept'):
    arrays += [message.kept.ids, message.kept.offsets]
  array = data.draw(st.sampled_from([a for a in arrays if a.data]))
  payload = bytearray(array.data)
  index = data.draw(st.integers(0, len(payload) - 1))
  payload[index] ^= data.draw(st.integers(1, 255))
  array.data = bytes(payload)
  assert messages.refusal(message).field == 'payload_crc32'


def test_wire_layout_is_little_endian():
  message = codec.encode_trajectory(
    messages.simple(tokens=np.array([1, 258, 3, 4, 5]))
  )
  assert message.tokens.data[:8] == bytes([1, 0, 0, 0, 2, 1, 0, 0])
  assert message.action_mask.data == bytes([0, 1, 1, 0, 0])
  # -0.5 in IEEE 754 is 0xBF000000.
  assert message.behaviour_logprobs.data[4:8] == bytes([0, 0, 0, 0xBF])
  assert message.num_actions == 2


def test_lengths_are_compared_and_nothing_is_padded():
  # GRPC-03: 5 tokens, 4 actions, 4 log-probs.
  message = codec.encode_trajectory(
    messages.simple(
      action_mask=np.array([0, 1, 1, 1, 1], bool),
      behaviour_logprobs=np.array([-0.1, -0.2, -0.3, -0.4], np.float32),
    )
  )
  error = messages.refusal(message)
  assert error.field == 'behaviour_logprobs.length'
  assert error.request_id == 'r9'
  assert 'is 4; allowed: 5' in str(error)


def test_missing_logprobs_have_their_own_words():
  # GRPC-05.
  message = codec.encode_trajectory(
    messages.simple(behaviour_logprobs=np.zeros(0, np.float32))
  )
  assert 'sampler returned no log-probs' in str(messages.refusal(message))


@pytest.mark.parametrize('value', [math.nan, -math.inf, math.inf, 2e-5, 1.0])
def test_values_that_are_no_logprobs_are_refused(value):
  logprobs = np.array([0, -0.5, value, 0, 0], np.float32)
  error = messages.refusal(
    codec.encode_trajectory(messages.simple(behaviour_logprobs=logprobs))
  )
  assert error.field == 'behaviour_logprobs'
  assert 'at action 1' in str(error)


def test_rounding_above_zero_is_taken():
  logprobs = np.array([0, 1e-7, -1, 0, 0], np.float32)
  messages.decode(
    codec.encode_trajectory(messages.simple(behaviour_logprobs=logprobs))
  )


def test_logprobs_outside_the_mask_must_be_zero():
  logprobs = np.array([0, -0.5, -1.5, -0.1, 0], np.float32)
  error = messages.refusal(
    codec.encode_trajectory(messages.simple(behaviour_logprobs=logprobs))
  )
  assert error.field == 'behaviour_logprobs'


def test_arrays_are_checked_beyond_their_crc():
  cases = [
    (messages.simple(tokens=np.array([5, -6, 7, 8, 9])), 'tokens'),
    (
      messages.simple(action_mask=np.array([0, 1, 1, 0], bool)),
      'action_mask.length',
    ),
    (
      messages.simple(
        action_mask=np.zeros(5, bool),
        behaviour_logprobs=np.zeros(5, np.float32),
      ),
      'num_actions',
    ),
  ]
  for trajectory, field in cases:
    assert messages.refusal(codec.encode_trajectory(trajectory)).field == field
  message = codec.encode_trajectory(messages.simple())
  assert messages.refusal(message, max_tokens=4).field == 'tokens.length'


@pytest.mark.parametrize(
  'change, field',
  [
    (lambda m: setattr(m, 'num_actions', 3), 'action_mask'),
    (lambda m: setattr(m, 'payload_crc32', 1), 'payload_crc32'),
    (lambda m: setattr(m.tokens, 'dtype', 3), 'tokens.dtype'),
    (lambda m: setattr(m.action_mask, 'dtype', 0), 'action_mask.dtype'),
    (lambda m: setattr(m.tokens, 'length', 4), 'tokens.data'),
    (lambda m: setattr(m.kept.ids, 'dtype', 4), 'kept.ids.dtype'),
    (lambda m: setattr(m.kept.ids, 'length', 4), 'kept.ids.data'),
    (lambda m: setattr(m.kept.offsets, 'dtype', 2), 'kept.offsets.dtype'),
    (lambda m: setattr(m.kept.offsets, 'length', 6), 'kept.offsets.data'),
    # Present, but without the arrays that the crc covers.
    (lambda m: m.kept.Clear(), 'payload_crc32'),
    (lambda m: m.ClearField('kept'), 'payload_crc32'),
  ],
)
def test_each_field_is_checked(change, field):
  message = codec.encode_trajectory(messages.truncated())
  messages.decode(message)
  change(message)
  assert messages.refusal(message).field == field


def test_kept_sets_are_packed_little_endian():
  message = codec.encode_trajectory(messages.truncated([6, 258], [7]))
  ids, offsets = message.kept.ids, message.kept.offsets
  assert (ids.dtype, ids.length) == (sampler_pb2.DTYPE_INT32, 3)
  assert ids.data == bytes([6, 0, 0, 0, 2, 1, 0, 0, 7, 0, 0, 0])
  assert (offsets.dtype, offsets.length) == (sampler_pb2.DTYPE_INT64, 3)
  assert offsets.data == b''.join(
    bytes([n, 0, 0, 0, 0, 0, 0, 0]) for n in (0, 2, 3)
  )


def test_kept_sets_arrive_as_they_were():
  kept = messages.decode(codec.encode_trajectory(messages.truncated())).kept
  assert kept.ids.tolist() == [6, 2, 1, 7, 3]
  assert kept.offsets.tolist() == [0, 2, 5]
  assert (kept.ids.dtype, kept.offsets.dtype) == (np.int32, np.int64)


def kept_refusal(**changes):
  """Refuses the sets {6, 2} and {1, 7, 3} of the actions 6 and 7, changed."""
  trajectory = messages.truncated()
  kept = dataclasses.replace(trajectory.kept, **changes)
  return messages.refusal(
    codec.encode_trajectory(dataclasses.replace(trajectory, kept=kept))
  )


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'offsets': np.array([0, 5])}, '2 offsets for 2 action tokens'),
    ({'offsets': np.array([0, 2, 5, 5])}, '4 offsets'),
    ({'offsets': np.zeros(0, np.int64)}, '0 offsets'),
    ({'offsets': np.array([1, 2, 5])}, 'offsets from 1 to 5 for 5 ids'),
    ({'offsets': np.array([0, 2, 4])}, 'offsets from 0 to 4 for 5 ids'),
    ({'offsets': np.array([0, 2, 6])}, 'offsets from 0 to 6 for 5 ids'),
    ({'offsets': np.array([0, 6, 5])}, 'not rise at action 1'),
    ({'offsets': np.array([0, -1, 5])}, 'not rise at action 0'),
    ({'offsets': np.array([0, 0, 5])}, 'not rise at action 0'),
    ({'offsets': np.array([0, 5, 5])}, 'not rise at action 1'),
    ({'offsets': np.array([0, 2**62, 5])}, 'not rise at action 1'),
    (
      {'ids': np.array([4, 2, 1, 7, 3])},
      'lacks 6, the token drawn at action 0',
    ),
    (
      {'ids': np.array([6, 2, 1, 6, 3])},
      'lacks 7, the token drawn at action 1',
    ),
    (
      {'ids': np.array([6, 7, 1, 4, 3])},
      'lacks 7, the token drawn at action 1',
    ),
    ({'ids': np.array([6, 6, 1, 7, 3])}, '6 twice at action 0'),
    ({'ids': np.array([6, 2, 1, 7, 1])}, '1 twice at action 1'),
    ({'ids': np.array([6, 2, 7, 1, 7])}, '7 twice at action 1'),
  ],
)
def test_sets_that_tokens_cannot_have_come_from_are_refused(changes, words):
  error = kept_refusal(**changes)
  assert error.field == 'kept'
  assert words in str(error)


def test_ids_beyond_the_vocabulary_are_refused():
  message = codec.encode_trajectory(messages.truncated([6, 9], [11, 7]))
  messages.decode(message, vocab_size=12)
  error = messages.refusal(message, vocab_size=11)
  assert error.field == 'kept.ids'
  assert '[11]; allowed: ids in [0, 11)' in str(error)
  assert kept_refusal(ids=np.array([6, -2, 1, 7, 3])).field == 'kept.ids'
  message = codec.encode_trajectory(messages.simple())
  messages.decode(message, vocab_size=10)
  assert messages.refusal(message, vocab_size=9).field == 'tokens'


def test_an_episode_without_actions_has_no_sets():
  nothing = messages.truncated(
    status=types.Status.CONTEXT_LIMIT,
    reward=math.nan,
    action_mask=np.zeros(5, bool),
    behaviour_logprobs=np.zeros(5, np.float32),
  )
  nothing = dataclasses.replace(nothing, kept=messages.csr())
  kept = messages.decode(codec.encode_trajectory(nothing)).kept
  assert (kept.ids.tolist(), kept.offsets.tolist()) == ([], [0])
