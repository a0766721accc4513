"""Messages that break the contract or lie: refused, counted, never used."""

import collections
import contextlib
import dataclasses

import client_test
import hostile
import hostile_lies
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
  errors,
  pool,
  retries,
  sampler_pb2,
  weights,
)

EPISODES = (types.Status.OK, types.Status.CONTEXT_LIMIT, types.Status.LENGTH)


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
    lie, name = hostile.tell(rng, message, hostile_lies.LIES[kind])
    assert lie != message, name
    refusal(decode, lie, name)
    told[kind, name] += 1
  assert set(told) == {
    (kind, lie.__name__)
    for kind, lies in hostile_lies.LIES.items()
    for lie in lies
  }


def test_lying_requests_are_refused_with_a_reason():
  rng = np.random.default_rng(1)
  for number in range(10_000):
    message = codec.encode_request(hostile.request(number))
    lie, name = hostile.tell(rng, message, hostile_lies.REQUEST_LIES)
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
      for request in message.requests.requests:
        yield sampler_pb2.RolloutReply(
          trajectories=self.tell(codec.decode_request(request))
        )


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
    other, name = hostile.tell(rng, message, [hostile_lies.stranger])
    return other, name, 'stranger'
  lies = hostile_lies.LIES if way == 2 else hostile_lies.FOREIGN_LIES
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
        if honest.spans:
          free |= {'spans'}
        if honest.status != types.Status.OK:
          free |= {'status'}
        if result.status not in EPISODES:  # nothing of it is used
          free |= {'policy_version', 'weights_checksum', 'sampling', 'spans'}
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
    for lie in hostile_lies.FOREIGN_LIES[kind]
  }


class Storyteller(Liar):
  """Surrounds each answer with lies, or replaces it; counts what it tells."""

  def __init__(self, seed):
    super().__init__(self.answer)
    self.told = collections.Counter()
    self._rng = np.random.default_rng(seed)

  def answer(self, asked):
    message = codec.encode_trajectory(hostile.honest(asked, 'plain'))
    lies = hostile_lies.LIES['plain'] + hostile_lies.FOREIGN_LIES['plain']
    lie, _ = hostile.tell(self._rng, message, lies)
    is_read = lie.request_id == asked.request_id
    self.told['unreadable'] += not is_read
    other, _ = hostile.tell(self._rng, message, [hostile_lies.stranger])
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
