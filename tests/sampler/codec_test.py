"""Messages: round trips, and every way to be refused."""

import dataclasses
import math

import hypothesis
import messages
import pytest
from google.protobuf import message as protobuf_message
from hypothesis import strategies as st

from spopp_jax import types
from spopp_jax.sampler import base, codec, errors, sampler_pb2

requests = st.builds(
  base.Request,
  request_id=st.text(min_size=1, max_size=40),
  task_id=st.text(min_size=1, max_size=40),
  policy_version=st.integers(0, 2**62),
  seed=st.integers(0, 2**32 - 1),
  sampling=messages.samplings,
)


@hypothesis.given(requests)
def test_request_round_trip(request):
  data = codec.encode_request(request).SerializeToString()
  assert codec.decode_request(sampler_pb2.Request.FromString(data)) == request


@hypothesis.given(messages.trajectories())
def test_trajectory_round_trip(trajectory):
  data = codec.encode_trajectory(trajectory).SerializeToString()
  result = messages.decode(sampler_pb2.Trajectory.FromString(data))
  messages.assert_same(trajectory, result)
  assert math.isnan(result.reward) == (result.status != types.Status.OK)


@hypothesis.given(st.binary(max_size=200))
def test_random_bytes_never_pass(data):
  try:
    message = sampler_pb2.Trajectory.FromString(data)
  except protobuf_message.DecodeError:
    return
  messages.refusal(message)


@pytest.mark.parametrize(
  'change, field',
  [
    (lambda m: setattr(m, 'schema_version', 1), 'schema_version'),
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
    (lambda m: setattr(m, 'seconds', -1.0), 'seconds'),
    (lambda m: setattr(m, 'seconds', math.inf), 'seconds'),
    (lambda m: setattr(m, 'logprob_kind', 0), 'logprob_kind'),
    (lambda m: setattr(m, 'logprob_kind', 3), 'logprob_kind'),
    (lambda m: m.ClearField('logprob_kind'), 'logprob_kind'),
    (lambda m: m.ClearField('sampling'), 'sampling.temperature'),
    (lambda m: setattr(m.sampling, 'top_p', 0.0), 'sampling.top_p'),
    (lambda m: setattr(m.sampling, 'max_turns', 0), 'sampling.max_turns'),
  ],
)
def test_each_field_is_checked(change, field):
  message = codec.encode_trajectory(messages.simple())
  messages.decode(message)
  change(message)
  assert messages.refusal(message).field == field


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


def test_kept_sets_travel_with_truncated_sampling_alone():
  messages.decode(codec.encode_trajectory(messages.truncated()))
  for sampling in (
    types.SamplingParams(top_k=3, top_p=0.5),
    types.SamplingParams(top_p=0.5),
    types.SamplingParams(min_p=0.5),
  ):
    trajectory = dataclasses.replace(messages.truncated(), sampling=sampling)
    messages.decode(codec.encode_trajectory(trajectory))
  whole = dataclasses.replace(
    messages.truncated(), sampling=types.SamplingParams()
  )
  error = messages.refusal(codec.encode_trajectory(whole))
  assert error.field == 'kept'
  assert 'top_p is 1, top_k is 0 and min_p is 0' in str(error)


@pytest.mark.parametrize('kind', types.LogprobKind)
@pytest.mark.parametrize('tells', [True, False])
def test_samplers_that_tell_less_are_heard_too(kind, tells):
  # What such log-probs are good for is the learner's to say.
  changes = {} if tells else {'kept': None}
  trajectory = dataclasses.replace(
    messages.truncated(logprob_kind=kind), **changes
  )
  result = messages.decode(codec.encode_trajectory(trajectory))
  assert result.logprob_kind is kind
  assert (result.kept is not None) == tells
