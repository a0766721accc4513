"""Messages that break the contract or lie: refused, counted, never used."""

import collections

import hostile
import numpy as np
from google.protobuf import message as protobuf_message

from spopp_jax.sampler import codec, errors, sampler_pb2


def decode(message):
  return codec.decode_trajectory(
    message, max_tokens=hostile.MAX_TOKENS, vocab_size=hostile.VOCAB_SIZE
  )


def refusal(read, message, name):
  """Returns why a message is refused."""
  try:
    read(message)
  except errors.InvalidMessage as caught:
    error = caught
  else:
    raise AssertionError(f'{name} passed: {str(message)[:2000]}')
  assert error.field in str(error)
  assert 'allowed: ' in str(error)
  assert len(str(error)) < 1000
  return error


def test_lies_are_refused_with_a_reason():
  rng = np.random.default_rng(0)
  told = collections.Counter()
  answers = hostile.answers(50)
  for _, trajectory, message, _ in answers:
    assert not hostile.differences(trajectory, decode(message))
  for number in range(50_000):
    _, _, message, kind = answers[number % len(answers)]
    lie, name = hostile.tell(rng, message, hostile.LIES[kind])
    assert lie != message, name
    refusal(decode, lie, name)
    told[kind, name] += 1
  assert set(told) == {
    (kind, lie.__name__) for kind, lies in hostile.LIES.items() for lie in lies
  }


def test_lying_requests_are_refused_with_a_reason():
  rng = np.random.default_rng(1)
  for number in range(10_000):
    message = codec.encode_request(hostile.request(number))
    lie, name = hostile.tell(rng, message, hostile.REQUEST_LIES)
    refusal(codec.decode_request, lie, name)


def test_damaged_bytes_are_refused_or_change_no_array():
  rng = np.random.default_rng(2)
  seen = collections.Counter()
  answers = hostile.answers(50)
  for number in range(20_000):
    _, trajectory, message, _ = answers[number % len(answers)]
    data = hostile.damage(rng, message.SerializeToString())
    try:
      result = decode(sampler_pb2.Trajectory.FromString(data))
    except (protobuf_message.DecodeError, errors.InvalidMessage) as error:
      seen[type(error)] += 1
      continue
    changed = hostile.differences(trajectory, result)
    assert changed.isdisjoint(
      {'tokens', 'action_mask', 'behaviour_logprobs', 'kept'}
    )
    seen['usable'] += 1
  assert min(seen[k] for k in (protobuf_message.DecodeError, 'usable')) > 100
