"""Messages that break the contract or lie: refused, counted, never used."""

import collections
import dataclasses

import client_test
import hostile
import numpy as np
import pytest
from google.protobuf import message as protobuf_message

from spopp_jax import types
from spopp_jax.sampler import base, codec, errors, sampler_pb2


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


class Liar(client_test.Liar):
  """Holds version 0 and answers each request with what `tell` makes."""

  def __init__(self, tell=lambda request: ()):
    super().__init__(None)
    self.tell = tell
    self.description = dataclasses.replace(
      self.description,
      num_slots=32,
      max_pending=64,
      active_policy_version=3,
      active_weights_checksum=hostile.CHECKSUM,
    )

  def Rollout(self, request_iterator, context):  # noqa: N802
    for message in request_iterator:
      if message.WhichOneof('part') == 'request':
        for reply in self.tell(codec.decode_request(message.request)):
          yield sampler_pb2.RolloutReply(trajectory=reply)


def assert_invalid(result, asked):
  """Nothing is left of a refused answer but who was asked, and why."""
  none = base.unanswered(asked, types.Status.INVALID, result.detail)
  assert not hostile.differences(none, result)
  assert result.detail


def hostile_answer(rng, request, message, kind):
  """Returns (what arrives, its name, what must come of it).

  What must come of it: 'invalid', 'unreadable' without a request, 'stranger',
  or 'damaged', of which only the bytes can tell.
  """
  way = rng.integers(5)
  if way == 0:
    data = hostile.damage(rng, message.SerializeToString())
    try:
      return sampler_pb2.Trajectory.FromString(data), 'damage', 'damaged'
    except protobuf_message.DecodeError:
      way = 1
  if way == 1:
    other, name = hostile.tell(rng, message, [hostile.stranger])
    return other, name, 'stranger'
  lies = hostile.LIES if way == 2 else hostile.FOREIGN_LIES
  lie, name = hostile.tell(rng, message, lies[kind])
  if lie.request_id != request.request_id:
    return lie, name, 'unreadable'
  return lie, name, 'invalid'


def receive(sampler, message):
  """Returns what a client makes of a message, and what it counts."""
  before = collections.Counter(sampler.counts)
  try:
    result = sampler.receive(message)
  except errors.InvalidMessage as error:
    result = error
  return result, dict(collections.Counter(sampler.counts) - before)


def test_client_counts_every_lie_and_passes_none_on():
  rng = np.random.default_rng(3)
  told = collections.Counter()
  with client_test.connected(Liar()) as sampler:
    # The second snapshot of those whose requests cross versions.
    sampler._snapshots[4] = hostile.LATER
    answers = hostile.answers(50)
    for number in range(8_000):
      asked, honest, message, kind = answers[number % len(answers)]
      sampler.submit([asked])
      arrives, name, fate = hostile_answer(rng, asked, message, kind)
      told[fate, name] += 1
      result, counted = receive(sampler, arrives)
      if fate == 'damaged' and arrives.request_id != asked.request_id:
        fate = 'stranger' if 1 <= len(arrives.request_id) <= 256 else fate
        fate = 'unreadable' if fate == 'damaged' else fate
      if fate == 'unreadable':
        assert isinstance(result, errors.InvalidMessage), name
        assert counted == {'invalid': 1}
      elif fate == 'stranger':
        assert result is None, name
        assert counted == {'duplicate': 1}
      elif fate == 'damaged' and not counted:
        changed = hostile.differences(honest, result)
        free = set(hostile.SENDERS_WORD)
        if kind == 'failed':  # it has neither tokens nor weights
          free |= {'policy_version', 'weights_checksum', 'sampling', 'status'}
        assert changed <= free
      else:
        assert counted == {'invalid': 1}, name
        assert_invalid(result, asked)
      if fate in ('stranger', 'unreadable'):
        result, counted = receive(sampler, message)
        assert not counted
        assert not hostile.differences(honest, result)
      result, counted = receive(sampler, message)
      assert (result, counted) == (None, {'duplicate': 1})
    with pytest.raises(errors.SamplerTimeout, match='nothing is outstanding'):
      sampler.next(0.0)
    assert sampler.lost is None
  assert {name for fate, name in told if fate == 'invalid'} >= {
    lie.__name__
    for kind in hostile.KINDS
    for lie in (*hostile.LIES[kind], *hostile.FOREIGN_LIES[kind])
  } - {'_request_id'}
