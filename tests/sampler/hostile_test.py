"""Messages that break the contract or lie: refused, counted, never used."""

import collections
import contextlib
import dataclasses
import queue

import client_test
import grpc
import hostile
import hostile_calls
import numpy as np
import pool_world
import pytest
import scripted
from google.protobuf import message as protobuf_message

from spopp_jax import types
from spopp_jax.runner import batcher as batcher_lib
from spopp_jax.sampler import (
  base,
  client,
  codec,
  connection,
  errors,
  options,
  pool,
  retries,
  sampler_pb2,
  weights,
)


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
  for number in range(24_000):
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
    for number in range(5_500):
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


class Storyteller(Liar):
  """Surrounds each answer with lies, or replaces it; counts what it tells."""

  def __init__(self, seed):
    super().__init__(self.answer)
    self.told = collections.Counter()
    self._rng = np.random.default_rng(seed)

  def answer(self, asked):
    message = codec.encode_trajectory(hostile.honest(asked, 'plain'))
    lies = hostile.LIES['plain'] + hostile.FOREIGN_LIES['plain']
    lie, _ = hostile.tell(self._rng, message, lies)
    is_read = lie.request_id == asked.request_id
    self.told['unreadable'] += not is_read
    other, _ = hostile.tell(self._rng, message, [hostile.stranger])
    # The first that names the request is its answer, all others are repeats.
    replies = [other, lie, message, message]
    self._rng.shuffle(replies)
    first = next(r for r in replies if r.request_id == asked.request_id)
    self.told['invalid'] += first is lie
    self.told['duplicate'] += 2 + is_read
    self.told['messages'] += 4
    return replies


def test_pool_and_batcher_use_honest_answers_alone():
  liars = [Storyteller(seed) for seed in range(2)]
  clients = []
  with contextlib.ExitStack() as stack:
    names = [stack.enter_context(client_test.serving(one)) for one in liars]

    def make_connect(name):
      def connect(deliver):
        clients.append(
          client.SamplerClient(name, scripted.EXPECTED, deliver=deliver)
        )
        return clients[-1]

      return connect

    budget = retries.RetryBudget(100)
    sampler = pool.Pool(
      lambda: names,
      make_connect,
      budget=budget,
      request_timeout_s=client_test.WAIT_S,
      recovery_timeout_s=client_test.WAIT_S,
    )
    stack.callback(sampler.close)
    sampler.start(client_test.WAIT_S)
    batcher = batcher_lib.Batcher(
      sampler,
      hostile.PLAIN,
      budget=budget,
      keep_truncated=True,
      rollout_timeout_s=client_test.WAIT_S,
    )
    asked = [hostile.request(number) for number in range(600)]
    batcher.submit(
      [
        types.Ticket(one.request_id, one.task_id, 0.5, 3, 0, one.seed)
        for one in asked
      ]
    )
    finished = batcher.drain()
    evidence = batcher.received()
    told = sum((one.told for one in liars), collections.Counter())
    scripted.wait_until(
      lambda: (
        sum(one.counts.total() for one in clients)
        == told['unreadable'] + told['invalid'] + told['duplicate']
      )
    )
  assert collections.Counter(i.ticket.seed for i in finished) == (
    collections.Counter(one.seed for one in asked)
  )
  for item in [*finished, *evidence]:
    one = hostile.request(item.ticket.seed, request_id=item.ticket.request_id)
    assert not hostile.differences(
      hostile.honest(one, 'plain'), item.trajectory
    )
  assert len(evidence) == 600
  assert told['messages'] > 3_000
  assert batcher.statuses == {
    types.Status.OK: 600,
    types.Status.INVALID: told['invalid'],
  }
  assert batcher.dispatched == 600 + told['invalid']
  assert sum((one.counts for one in clients), collections.Counter()) == {
    'invalid': told['invalid'] + told['unreadable'],
    'duplicate': told['duplicate'],
  }


def call(stub, name, content):
  """Returns the status and the text that a call ends with."""
  content = iter(content) if isinstance(content, list) else content
  try:
    getattr(stub, name)(content, timeout=client_test.WAIT_S)
  except grpc.RpcError as error:
    return error.code(), error.details()
  return grpc.StatusCode.OK, ''


def ask(connection, arrivals, requests):
  """Sends requests; returns the next answer to each, in order of arrival."""
  for one in requests:
    connection.send(one)
  return [arrivals.get(timeout=client_test.WAIT_S) for _ in requests]


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
    for number in range(2_000):
      lie = hostile_calls.CALLS[number % len(hostile_calls.CALLS)]
      name, content, code = lie(rng)
      got, text = call(stub, name, content)
      assert (got, lie.__name__) == (code, lie.__name__), (content, text)
      assert 10 < len(text) < 1000
      told[name, got] += 1
    assert_serves(server.address, stub, 3)
    # Nothing is held aside, in whole or in part.
    for version in range(3):
      resume = sampler_pb2.ResumeRequest(
        policy_version=version,
        weights_checksum=hostile_calls.CHECKSUM,
        size_bytes=len(hostile_calls.DATA),
        session_id=scripted.SESSION,
      )
      assert stub.Resume(resume, timeout=client_test.WAIT_S).held_bytes == 0
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
  lies = [lie for lie in hostile.REQUEST_LIES if lie.__name__ != '_request_id']
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
    iter(pieces), timeout=client_test.WAIT_S
  )
  with pytest.raises(grpc.RpcError) as caught:
    collections.deque(replies, maxlen=0)
  return caught.value


def test_service_outlives_streams_of_garbage():
  rng = np.random.default_rng(6)
  opening = scripted.OPENING.SerializeToString()
  bad_id = sampler_pb2.RolloutMessage(
    request=sampler_pb2.Request(request_id='x' * 257)
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


@pytest.mark.parametrize('joins_first', [True, False])
@pytest.mark.parametrize('is_ours', [True, False])
def test_pool_takes_a_version_for_its_own_by_its_weights_alone(
  joins_first, is_ours
):
  ours = weights.snapshot(pool_world.PARAMS, 3).checksum
  world = pool_world.World('a')
  claim = world.services['a'].service
  claim.active_policy_version = 3
  claim.active_weights_checksum = ours if is_ours else hostile.CHECKSUM
  if joins_first:
    world.settle()
  world.pool.publish(pool_world.PARAMS, 3)
  world.settle()
  assert world.services['a'].installed == ([] if is_ours else [3])


def test_client_keeps_to_the_weights_that_it_has_activated():
  asked, _, message, _ = hostile.answers(1)[0]
  liar = Liar()
  with client_test.connected(liar) as sampler:
    liar.description = dataclasses.replace(
      liar.description, active_weights_checksum=hostile.LATER
    )
    sampler.reconnect(client_test.WAIT_S)
    sampler.submit([asked])
    message.weights_checksum = hostile.LATER
    result, counted = receive(sampler, message)
    assert counted == {'invalid': 1}
    assert_invalid(result, asked)
