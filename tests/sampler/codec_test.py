"""Messages: round trips, and every way to be refused."""

import dataclasses
import math

import hypothesis
import numpy as np
import pytest
from google.protobuf import message as protobuf_message
from hypothesis import strategies as st

from spopp_jax import types
from spopp_jax.sampler import base, codec, errors, sampler_pb2

CHECKSUM = 'ab' * 32

samplings = st.builds(
  types.SamplingParams,
  temperature=st.floats(1e-3, 10.0),
  top_p=st.floats(0.01, 1.0),
  top_k=st.integers(0, 1000),
  max_turn_tokens=st.integers(1, 10_000),
  max_turns=st.integers(1, 1000),
)
requests = st.builds(
  base.Request,
  request_id=st.text(min_size=1, max_size=40),
  task_id=st.text(min_size=1, max_size=40),
  policy_version=st.integers(0, 2**62),
  seed=st.integers(0, 2**32 - 1),
  sampling=samplings,
)


@st.composite
def trajectories(draw, min_tokens=0):
  status = draw(st.sampled_from(types.Status))
  mask = draw(st.lists(st.booleans(), min_size=min_tokens, max_size=40))
  if status == types.Status.OK:
    mask.append(True)
  logprobs = [
    draw(st.floats(-50, 0, width=32)) if action else 0.0 for action in mask
  ]
  size = len(mask)
  ids = st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)
  is_ok = status == types.Status.OK
  return types.Trajectory(
    request_id=draw(st.text(min_size=1, max_size=40)),
    task_id=draw(st.text(max_size=40)),
    status=status,
    reward=draw(st.floats(0, 1)) if is_ok else math.nan,
    policy_version=draw(st.integers(-1, 2**62)),
    weights_checksum=CHECKSUM,
    tokens=np.array(draw(ids), np.int32),
    action_mask=np.array(mask, bool),
    behaviour_logprobs=np.array(logprobs, np.float32),
    num_turns=draw(st.integers(0, 1000)),
    sampling=draw(samplings),
    seconds=draw(st.floats(0, 1e6)),
    detail=draw(st.text(max_size=40)),
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


def decode(message, max_tokens=100):
  return codec.decode_trajectory(message, max_tokens=max_tokens)


def refusal(message, max_tokens=100):
  with pytest.raises(errors.InvalidMessage) as caught:
    decode(message, max_tokens)
  return caught.value


@hypothesis.given(requests)
def test_request_round_trip(request):
  data = codec.encode_request(request).SerializeToString()
  assert codec.decode_request(sampler_pb2.Request.FromString(data)) == request


@hypothesis.given(trajectories())
def test_trajectory_round_trip(trajectory):
  data = codec.encode_trajectory(trajectory).SerializeToString()
  result = decode(sampler_pb2.Trajectory.FromString(data))
  for field in dataclasses.fields(trajectory):
    before = getattr(trajectory, field.name)
    after = getattr(result, field.name)
    np.testing.assert_array_equal(before, after, err_msg=field.name)
    if isinstance(before, np.ndarray):
      assert before.dtype == after.dtype
  assert math.isnan(result.reward) == (result.status != types.Status.OK)


@hypothesis.given(trajectories(min_tokens=1), st.data())
def test_any_changed_payload_byte_is_refused(trajectory, data):
  message = codec.encode_trajectory(trajectory)
  name = data.draw(
    st.sampled_from(['tokens', 'action_mask', 'behaviour_logprobs'])
  )
  array = getattr(message, name)
  payload = bytearray(array.data)
  index = data.draw(st.integers(0, len(payload) - 1))
  payload[index] ^= data.draw(st.integers(1, 255))
  array.data = bytes(payload)
  assert refusal(message).field == 'payload_crc32'


@hypothesis.given(st.binary(max_size=200))
def test_random_bytes_never_pass(data):
  try:
    message = sampler_pb2.Trajectory.FromString(data)
  except protobuf_message.DecodeError:
    return
  refusal(message)


def test_wire_layout_is_little_endian():
  message = codec.encode_trajectory(simple(tokens=np.array([1, 258, 3, 4, 5])))
  assert message.tokens.data[:8] == bytes([1, 0, 0, 0, 2, 1, 0, 0])
  assert message.action_mask.data == bytes([0, 1, 1, 0, 0])
  # -0.5 in IEEE 754 is 0xBF000000.
  assert message.behaviour_logprobs.data[4:8] == bytes([0, 0, 0, 0xBF])
  assert message.num_actions == 2


def test_lengths_are_compared_and_nothing_is_padded():
  # GRPC-03: 5 tokens, 4 actions, 4 log-probs.
  message = codec.encode_trajectory(
    simple(
      action_mask=np.array([0, 1, 1, 1, 1], bool),
      behaviour_logprobs=np.array([-0.1, -0.2, -0.3, -0.4], np.float32),
    )
  )
  error = refusal(message)
  assert error.field == 'behaviour_logprobs.length'
  assert error.request_id == 'r9'
  assert 'is 4; allowed: 5' in str(error)


def test_missing_logprobs_have_their_own_words():
  # GRPC-05.
  message = codec.encode_trajectory(
    simple(behaviour_logprobs=np.zeros(0, np.float32))
  )
  assert 'sampler returned no log-probs' in str(refusal(message))


@pytest.mark.parametrize('value', [math.nan, -math.inf, math.inf, 2e-5, 1.0])
def test_values_that_are_no_logprobs_are_refused(value):
  logprobs = np.array([0, -0.5, value, 0, 0], np.float32)
  error = refusal(codec.encode_trajectory(simple(behaviour_logprobs=logprobs)))
  assert error.field == 'behaviour_logprobs'
  assert 'at action 1' in str(error)


def test_rounding_above_zero_is_taken():
  logprobs = np.array([0, 1e-7, -1, 0, 0], np.float32)
  decode(codec.encode_trajectory(simple(behaviour_logprobs=logprobs)))


def test_logprobs_outside_the_mask_must_be_zero():
  logprobs = np.array([0, -0.5, -1.5, -0.1, 0], np.float32)
  error = refusal(codec.encode_trajectory(simple(behaviour_logprobs=logprobs)))
  assert error.field == 'behaviour_logprobs'


@pytest.mark.parametrize(
  'change, field',
  [
    (lambda m: setattr(m, 'schema_version', 2), 'schema_version'),
    (lambda m: setattr(m, 'request_id', ''), 'request_id'),
    (lambda m: setattr(m, 'request_id', 'x' * 257), 'request_id'),
    (lambda m: setattr(m, 'status', 0), 'status'),
    (lambda m: setattr(m, 'status', 13), 'status'),
    (lambda m: setattr(m, 'reward', 1.5), 'reward'),
    (lambda m: setattr(m, 'reward', -0.1), 'reward'),
    (lambda m: setattr(m, 'reward', math.nan), 'reward'),
    (lambda m: m.ClearField('reward'), 'reward'),
    (lambda m: setattr(m, 'status', 2), 'reward'),
    (lambda m: setattr(m, 'weights_checksum', 'AB' * 32), 'weights_checksum'),
    (lambda m: setattr(m, 'weights_checksum', ''), 'weights_checksum'),
    (lambda m: setattr(m, 'num_actions', 3), 'action_mask'),
    (lambda m: setattr(m, 'payload_crc32', 1), 'payload_crc32'),
    (lambda m: setattr(m.tokens, 'dtype', 3), 'tokens.dtype'),
    (lambda m: setattr(m.action_mask, 'dtype', 0), 'action_mask.dtype'),
    (lambda m: setattr(m.tokens, 'length', 4), 'tokens.data'),
    (lambda m: setattr(m, 'seconds', -1.0), 'seconds'),
    (lambda m: setattr(m, 'seconds', math.inf), 'seconds'),
    (lambda m: m.ClearField('sampling'), 'sampling.temperature'),
    (lambda m: setattr(m.sampling, 'top_p', 0.0), 'sampling.top_p'),
    (lambda m: setattr(m.sampling, 'max_turns', 0), 'sampling.max_turns'),
  ],
)
def test_each_field_is_checked(change, field):
  message = codec.encode_trajectory(simple())
  decode(message)
  change(message)
  assert refusal(message).field == field


def test_arrays_are_checked_beyond_their_crc():
  cases = [
    (simple(tokens=np.array([5, -6, 7, 8, 9])), 'tokens'),
    (simple(action_mask=np.array([0, 1, 1, 0], bool)), 'action_mask.length'),
    (
      simple(
        action_mask=np.zeros(5, bool),
        behaviour_logprobs=np.zeros(5, np.float32),
      ),
      'num_actions',
    ),
  ]
  for trajectory, field in cases:
    assert refusal(codec.encode_trajectory(trajectory)).field == field
  assert refusal(codec.encode_trajectory(simple()), 4).field == 'tokens.length'


@pytest.mark.parametrize(
  'field, value',
  [
    ('request_id', ''),
    ('request_id', 'x' * 257),
    ('task_id', ''),
    ('policy_version', -1),
    ('seed', -1),
    ('seed', 2**32),
    ('sampling', types.SamplingParams(temperature=0.0)),
    ('sampling', types.SamplingParams(temperature=math.inf)),
    ('sampling', types.SamplingParams(top_p=1.5)),
    ('sampling', types.SamplingParams(top_k=-1)),
    ('sampling', types.SamplingParams(max_turn_tokens=0)),
    ('sampling', types.SamplingParams(max_turns=0)),
  ],
)
def test_requests_are_checked_before_they_are_sent(field, value):
  good = base.Request('r', 't', 0, 0, types.SamplingParams())
  codec.encode_request(good)
  with pytest.raises(errors.InvalidMessage):
    codec.encode_request(dataclasses.replace(good, **{field: value}))
