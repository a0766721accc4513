"""Calls, requests and bytes that lie to a service: refused, nothing held."""

import collections
import contextlib
import dataclasses
import queue

import grpc
import hostile
import hostile_calls
import hostile_lies
import numpy as np
import pytest
import scripted

from spopp_jax import types
from spopp_jax.sampler import codec, connection, options, sampler_pb2

WAIT_S = 20.0


def call(stub, name, content):
  """Returns the status and the text that a call ends with."""
  content = iter(content) if isinstance(content, list) else content
  try:
    getattr(stub, name)(content, timeout=WAIT_S)
  except grpc.RpcError as error:
    return error.code(), error.details()
  return grpc.StatusCode.OK, ''


def ask(connection, arrivals, requests):
  """Sends requests; returns the next answer to each, in order of arrival."""
  for one in requests:
    connection.send(one)
  return [arrivals.get(timeout=WAIT_S) for _ in requests]


@contextlib.contextmanager
def stream(address):
  """Opens a rollout stream of the raw session; yields it and its arrivals."""
  arrivals = queue.SimpleQueue()
  raw = connection.Connection(address, options.ChannelLimits(), arrivals.put)
  raw.open_stream(scripted.SESSION)
  try:
    yield raw, arrivals
  finally:
    raw.close()


def encode(requests):
  return [codec.encode_request(one) for one in requests]


def assert_serves(address, stub, count):
  """The service is whole: a snapshot is switched, `count` requests run."""
  content = [*scripted.publication(hostile_calls.DATA)]
  assert call(stub, 'Publish', content)[0] == grpc.StatusCode.OK
  fields = {'policy_version': 1, 'weights_checksum': hostile_calls.CHECKSUM}
  activate = sampler_pb2.ActivateRequest(**fields, session_id=scripted.SESSION)
  assert call(stub, 'Activate', activate)[0] == grpc.StatusCode.OK
  with stream(address) as (raw, arrivals):
    honest = [scripted.request(n, version=1) for n in range(count)]
    for reply in ask(raw, arrivals, encode(honest)):
      assert reply.status == types.Status.OK
      assert reply.weights_checksum == hostile_calls.CHECKSUM
    assert arrivals.empty()


def test_service_refuses_lying_calls_and_goes_on():
  rng = np.random.default_rng(4)
  told = collections.Counter()
  with scripted.serving() as server, scripted.raw_stub(server.address) as stub:
    # What is held aside is not what any lie names.
    staged = [*scripted.publication(hostile_calls.DATA, policy_version=7)]
    assert call(stub, 'Publish', staged)[0] == grpc.StatusCode.OK
    for number in range(2_000):
      lie = hostile_calls.CALLS[number % len(hostile_calls.CALLS)]
      name, content, code, *words = lie(rng)
      got, text = call(stub, name, content)
      assert (got, lie.__name__) == (code, lie.__name__), (content, text)
      assert all(word in text for word in words), text
      assert 10 < len(text) < 1000
      told[name, got] += 1
    assert_serves(server.address, stub, 3)
    # Nothing is held aside, in whole or in part.
    for version in range(10):
      resume = sampler_pb2.ResumeRequest(
        policy_version=version,
        weights_checksum=hostile_calls.CHECKSUM,
        size_bytes=len(hostile_calls.DATA),
        session_id=scripted.SESSION,
      )
      assert stub.Resume(resume, timeout=WAIT_S).held_bytes == 0
  assert len(told) >= 8


def hostile_request(rng, number):
  """Returns a request that is refused, and as what."""
  message = codec.encode_request(scripted.request(number))
  way = rng.integers(4)
  if way == 0:
    message.task_id = ('win-9', 'win-1 ', '\u202e', 'x' * 4096)[rng.integers(4)]
    return message, types.Status.INVALID
  if way == 1:
    message.policy_version = (1, 7, 2**63 - 1)[rng.integers(3)]
    return message, types.Status.STALE
  lies = [
    lie for lie in hostile_lies.REQUEST_LIES if lie.__name__ != '_request_id'
  ]
  message, _ = hostile.tell(rng, message, lies)
  return message, types.Status.INVALID


def test_service_answers_lying_requests_and_holds_none():
  rng = np.random.default_rng(5)
  room = 16
  with (
    scripted.serving(max_pending=room) as server,
    scripted.raw_stub(server.address) as stub,
    stream(server.address) as (raw, arrivals),
  ):
    for number in range(2_000):
      message, status = hostile_request(rng, number)
      (reply,) = ask(raw, arrivals, [message])
      assert (reply.request_id, reply.status) == (message.request_id, status)
      assert reply.detail
      assert not reply.HasField('reward')
      assert reply.tokens.length == 0
      # Repeated, and of others.
      raw.acknowledge([message.request_id] * 3 + ['nobody', '', 'x' * 9000])
    one = scripted.request(1, 'win-5')
    other = dataclasses.replace(one, seed=9)
    replies = ask(raw, arrivals, encode([one, other]))
    refused = [r for r in replies if r.status == types.Status.INVALID]
    assert len(refused) == 1
    assert 'in use for' in refused[0].detail
    raw.acknowledge(['r1'])
    # As many as there is room for: the ledger is empty.
    assert_serves(server.address, stub, room)


def raw_rollout(channel, pieces):
  """Sends bytes as messages of a rollout stream; returns how it ends."""
  replies = channel.stream_stream('/spopp.sampler.v1.Sampler/Rollout')(
    iter(pieces), timeout=WAIT_S
  )
  with pytest.raises(grpc.RpcError) as caught:
    collections.deque(replies, maxlen=0)
  return caught.value


def test_service_outlives_streams_of_garbage():
  rng = np.random.default_rng(6)
  opening = scripted.OPENING.SerializeToString()
  bad_id = scripted.asking(
    sampler_pb2.Request(request_id='x' * 257)
  ).SerializeToString()
  foreign = sampler_pb2.RolloutMessage(
    opening=sampler_pb2.Opening(session_id='ab' * 16)
  ).SerializeToString()
  endings = {
    grpc.StatusCode.INVALID_ARGUMENT: (
      [b''],
      [bad_id],
      [opening, b''],
      [opening, opening],
      [opening, bad_id],
    ),
    grpc.StatusCode.ABORTED: ([foreign],),
  }
  with (
    scripted.serving() as server,
    scripted.raw_stub(server.address) as stub,
    grpc.insecure_channel(server.address) as channel,
  ):
    for _ in range(20):
      for code, streams in endings.items():
        for pieces in streams:
          error = raw_rollout(channel, pieces)
          assert error.code() == code
          assert error.details()
      noise = b'\xff' + rng.bytes(20)
      error = raw_rollout(channel, [opening, noise])
      assert error.code() != grpc.StatusCode.DEADLINE_EXCEEDED
    assert_serves(server.address, stub, 3)
