"""The client against services that break the contract, or are not there."""

import concurrent.futures
import contextlib
import dataclasses
import math
import queue
import socket
import threading

import grpc
import numpy as np
import pytest
import scripted

from spopp_jax import types
from spopp_jax.sampler import (
  client,
  codec,
  errors,
  handshake,
  options,
  rollout,
  sampler_pb2,
  sampler_pb2_grpc,
)

LIMITS = options.ChannelLimits()
CHECKSUM = 'cd' * 32
WAIT_S = 20.0
INVALID = types.Status.INVALID


def trajectories(request):
  """Returns what an honest service answers, as a message to spoil."""
  driver = rollout.RolloutDriver(
    scripted.Engine(), scripted.Tasks(), scripted.Template()
  )
  driver.engine.load(scripted.params(0.5), version=0, checksum=CHECKSUM)
  driver.submit(request)
  finished = []
  while not driver.is_idle:
    finished.extend(driver.step())
  return codec.encode_trajectory(finished[0])


class Liar(sampler_pb2_grpc.SamplerServicer):
  """Shakes hands well, then answers each request with what `spoil` makes."""

  def __init__(self, spoil):
    self.spoil = spoil
    self.acknowledged = queue.SimpleQueue()
    self.description = handshake.Description(
      tokenizer_fingerprint=scripted.EXPECTED.tokenizer_fingerprint,
      model_fingerprint=scripted.EXPECTED.model_fingerprint,
      tasks_fingerprint=scripted.EXPECTED.tasks_fingerprint,
      num_tasks=len(scripted.TASK_IDS),
      max_context_tokens=100,
      num_slots=2,
      max_pending=8,
      active_policy_version=0,
      active_weights_checksum=CHECKSUM,
    )

  def Handshake(self, request, context):  # noqa: N802
    return handshake.reply(self.description, LIMITS)

  def Rollout(self, request_iterator, context):  # noqa: N802
    for message in request_iterator:
      if message.WhichOneof('part') == 'acknowledgement':
        for request_id in message.acknowledgement.request_ids:
          self.acknowledged.put(request_id)
        continue
      if message.WhichOneof('part') == 'opening':
        continue
      for request in message.requests.requests:
        honest = trajectories(codec.decode_request(request))
        for reply in self.spoil(honest):
          yield sampler_pb2.RolloutReply(trajectories=[reply])


@contextlib.contextmanager
def serving(servicer):
  server = grpc.server(
    concurrent.futures.ThreadPoolExecutor(4), options=LIMITS.server_options()
  )
  sampler_pb2_grpc.add_SamplerServicer_to_server(servicer, server)
  port = server.add_insecure_port('127.0.0.1:0')
  server.start()
  try:
    yield f'127.0.0.1:{port}'
  finally:
    server.stop(0).wait(5)


@contextlib.contextmanager
def connected(servicer, **kwargs):
  with serving(servicer) as address:
    sampler = client.SamplerClient(address, scripted.EXPECTED, **kwargs)
    try:
      yield sampler
    finally:
      sampler.close()


def spoiled(**fields):
  def spoil(message):
    for name, value in fields.items():
      setattr(message, name, value)
    return [message]

  return spoil


def cut_logprobs(message):
  message.behaviour_logprobs.length -= 1
  message.behaviour_logprobs.data = message.behaviour_logprobs.data[:-4]
  return [message]


def flip(message):
  data = bytearray(message.tokens.data)
  data[0] ^= 1
  message.tokens.data = bytes(data)
  return [message]


def leave_the_vocabulary(message):
  honest = codec.decode_trajectory(message, max_tokens=100, vocab_size=1000)
  tokens = np.append(honest.tokens[:-1], np.int32(1000))
  return [codec.encode_trajectory(dataclasses.replace(honest, tokens=tokens))]


@pytest.mark.parametrize(
  'spoil, words',
  [
    (flip, 'payload_crc32'),
    (leave_the_vocabulary, 'tokens of request r1 is [1000]'),
    (cut_logprobs, 'payload_crc32'),
    (spoiled(status=77), 'status'),
    (spoiled(reward=2.0), 'reward'),
    (spoiled(num_actions=1), 'num_actions'),
    (spoiled(schema_version=9), 'schema_version'),
    (spoiled(task_id='other'), 'task_id is other'),
    # R30: a version or snapshot that this client never activated.
    (spoiled(policy_version=7), 'policy_version is 7'),
    (
      spoiled(weights_checksum='ef' * 32),
      'weights_checksum of version 0 is ef',
    ),
  ],
)
def test_broken_replies_come_as_invalid(spoil, words):
  liar = Liar(spoil)
  with connected(liar) as sampler:
    sampler.submit([scripted.request(1)])
    result = sampler.next(WAIT_S)
    assert (result.request_id, result.status) == ('r1', INVALID)
    assert words in result.detail
    assert math.isnan(result.reward)
    assert result.num_actions == 0
    assert sampler.counts == {'invalid': 1}
    # It counts as an answer: the request can be asked again.
    assert liar.acknowledged.get(timeout=WAIT_S) == 'r1'
    liar.spoil = lambda message: [message]
    sampler.submit([scripted.request(1)])
    assert sampler.next(WAIT_S).status == types.Status.OK


def test_other_sampling_than_asked_is_invalid():
  def spoil(message):
    message.sampling.temperature = 0.5
    return [message]

  with connected(Liar(spoil)) as sampler:
    sampler.submit([scripted.request(1)])
    result = sampler.next(WAIT_S)
    assert result.status == INVALID
    assert 'temperature=0.5' in result.detail


def test_reply_without_a_readable_id_raises():
  with connected(Liar(spoiled(request_id=''))) as sampler:
    sampler.submit([scripted.request(1)])
    with pytest.raises(errors.InvalidMessage, match='request_id'):
      sampler.next(WAIT_S)


def test_repeats_and_strangers_are_dropped_and_counted():
  def spoil(message):
    stranger = sampler_pb2.Trajectory()
    stranger.CopyFrom(message)
    stranger.request_id = 'nobody'
    return [stranger, message, message]

  with connected(Liar(spoil)) as sampler:
    sampler.submit([scripted.request(1)])
    assert sampler.next(WAIT_S).request_id == 'r1'
    sampler.submit([scripted.request(2)])
    assert sampler.next(WAIT_S).request_id == 'r2'
    # nobody, the second r1, nobody again.
    assert sampler.counts == {'duplicate': 3}


def test_silent_service_is_a_timeout_that_names_the_requests():
  with connected(Liar(lambda message: [])) as sampler:
    sampler.submit([scripted.request(17), scripted.request(44)])
    with pytest.raises(errors.SamplerTimeout, match=r"\['r17', 'r44'\]"):
      sampler.next(0.1)


def test_service_that_closes_the_stream_is_lost():
  class Quitter(Liar):
    def Rollout(self, request_iterator, context):  # noqa: N802
      opening, _ = next(request_iterator), next(request_iterator)
      self.session_id = opening.opening.session_id
      return iter(())

  quitter = Quitter(None)
  with connected(quitter) as sampler:
    sampler.submit([scripted.request(1)])
    for _ in range(2):
      with pytest.raises(errors.SamplerLost, match='1 requests unanswered'):
        sampler.next(WAIT_S)
    assert quitter.session_id == sampler.session_id
    with pytest.raises(errors.SamplerLost):
      sampler.submit([scripted.request(2)])


def test_acknowledgement_that_a_lost_stream_took_along_is_sent_again():
  class Fainting(Liar):
    streams = 0

    def Rollout(self, request_iterator, context):  # noqa: N802
      self.streams += 1
      replies = super().Rollout(request_iterator, context)
      return replies if self.streams > 1 else iter([next(replies)])

  liar = Fainting(lambda message: [message])
  with connected(liar) as sampler:
    sampler.submit([scripted.request(1), scripted.request(2)])
    assert sampler.next(WAIT_S).request_id == 'r1'
    with pytest.raises(errors.SamplerLost):
      sampler.next(WAIT_S)
    sampler.reconnect(WAIT_S)
    assert liar.acknowledged.get(timeout=WAIT_S) == 'r1'
    sampler.submit([scripted.request(2)])
    assert sampler.next(WAIT_S).request_id == 'r2'


def free_port():
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


def test_nobody_at_the_address_is_named_within_the_deadline():
  address = f'127.0.0.1:{free_port()}'
  with pytest.raises(errors.SamplerLost) as caught:
    client.SamplerClient(address, scripted.EXPECTED, connect_deadline_s=0.5)
  assert address in str(caught.value)
  assert 'start a sampler there' in str(caught.value)


def test_garbage_instead_of_a_service_is_lost_within_the_deadline():
  listener = socket.create_server(('127.0.0.1', 0))

  def babble():
    with contextlib.suppress(OSError):
      while True:
        connection, _ = listener.accept()
        with connection:
          connection.sendall(b'HTTP/1.1 200 OK\r\n\r\n' + b'\x00\xff' * 100)

  thread = threading.Thread(target=babble, daemon=True)
  thread.start()
  address = f'127.0.0.1:{listener.getsockname()[1]}'
  with pytest.raises(errors.SamplerLost, match=address):
    client.SamplerClient(address, scripted.EXPECTED, connect_deadline_s=0.5)
  listener.shutdown(socket.SHUT_RDWR)
  listener.close()
  thread.join(5)


def test_addresses_elsewhere_are_refused_before_connecting():
  with pytest.raises(ValueError, match='without TLS'):
    client.SamplerClient('10.1.2.3:50051', scripted.EXPECTED)


def test_service_that_does_not_fit_is_refused_with_both_values():
  liar = Liar(None)
  liar.description = dataclasses.replace(
    liar.description, tokenizer_fingerprint='theirs'
  )
  with (
    serving(liar) as address,
    pytest.raises(errors.HandshakeRefused, match=r'scripted-template.*theirs'),
  ):
    client.SamplerClient(address, scripted.EXPECTED)


def test_other_channel_limits_are_refused_with_both_values():
  other = dataclasses.replace(LIMITS, max_message_bytes=999_999)
  with (
    serving(Liar(None)) as address,
    pytest.raises(errors.HandshakeRefused, match='999999 here and 16777216'),
  ):
    client.SamplerClient(address, scripted.EXPECTED, limits=other)


def test_requests_outside_the_contract_are_not_sent():
  with connected(Liar(None)) as sampler:
    sampling = types.SamplingParams(temperature=-1.0)
    with pytest.raises(errors.InvalidMessage, match=r'temperature.* is -1'):
      sampler.submit([scripted.request(1, sampling=sampling)])
    with pytest.raises(errors.SamplerTimeout, match='nothing is outstanding'):
      sampler.next(WAIT_S)
