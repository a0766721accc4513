"""One runner after another at one service, and never two at a time."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import grpc
import pytest
import scripted

from spopp_jax import types
from spopp_jax.sampler import client, errors, sampler_pb2, weights

OK, STALE = types.Status.OK, types.Status.STALE
WAIT_S = 20.0
serving, connected = scripted.serving, scripted.connected
raw_stub, raw_stream = scripted.raw_stub, scripted.raw_stream
OTHER = '0a' * 16

# A runner that has unacknowledged results and a running request, for ever.
RUNNER = """
import dataclasses, scripted, sys, time
from spopp_jax.sampler import client
expected = dataclasses.replace(scripted.EXPECTED, max_context_tokens=100_000)
sampler = client.SamplerClient(sys.argv[1], expected)
sampler.publish(scripted.params(5.0), 5)
sampling = dataclasses.replace(scripted.SAMPLING, max_turns=10**6)
sampler.submit([
  scripted.request(1, 'win-1', version=5),
  scripted.request(2, 'win-1', version=5),
  scripted.request(3, 'endless', version=5, sampling=sampling),
])
print(sampler.next(20.0).request_id, flush=True)
time.sleep(100)
"""


def test_a_fresh_run_after_a_finished_one_gets_its_own_rollouts():
  engine = scripted.Engine()
  requests = [scripted.request(n, f'win-{1 + n}') for n in range(4)]
  with serving(engine) as server:
    with connected(server) as first:
      old = first.publish(scripted.params(1.0), 0)
      first.submit(requests)
      assert first.next(WAIT_S).weights_checksum == old
      scripted.wait_until(lambda: len(engine.histories) == 4)
      first.publish(scripted.params(2.0), 7)
    with connected(server) as second:
      assert second.session_id != first.session_id
      assert second.service.active_policy_version == -1
      # Nothing of the run before serves by accident, not even its snapshot.
      second.submit([scripted.request(9, version=7)])
      assert second.next(WAIT_S).status == STALE
      new = second.publish(scripted.params(3.0), 0)
      second.submit(requests)
      results = scripted.collect(second, 4)
  assert new != old
  assert {(r.status, r.policy_version) for r in results} == {(OK, 0)}
  assert {r.weights_checksum for r in results} == {new}
  assert len(engine.histories) == 8
  assert [version for version, _ in engine.loaded] == [0, 7, 0]


def test_a_run_resumed_after_kill_9_gets_answers_of_its_own_snapshot():
  here = str(pathlib.Path(__file__).parent)
  paths = [here, os.environ.get('PYTHONPATH', '')]
  engine = scripted.Engine(max_context=100_000, step_s=0.001)
  expected = dataclasses.replace(scripted.EXPECTED, max_context_tokens=100_000)
  with serving(engine) as server:
    runner = subprocess.Popen(
      [sys.executable, '-c', RUNNER, server.address],
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths)},
    )
    with runner:
      assert runner.stdout.readline().strip() in ('r1', 'r2')
      try:
        scripted.wait_until(lambda: len(engine.histories) == 2)
        scripted.wait_until(lambda: engine.num_open == 1)
      finally:
        runner.kill()
    resumed = client.SamplerClient(server.address, expected)
    scripted.wait_until(lambda: engine.num_open == 0)
    checksum = resumed.publish(scripted.params(3.0), 3)
    resumed.submit([scripted.request(n, 'win-1', version=3) for n in (1, 2, 3)])
    results = scripted.collect(resumed, 3)
    assert {(r.status, r.policy_version) for r in results} == {(OK, 3)}
    assert {r.weights_checksum for r in results} == {checksum}
    with pytest.raises(errors.SamplerTimeout, match='nothing is outstanding'):
      resumed.next(0.1)
    assert not resumed.counts
    resumed.close()


def test_a_live_runner_is_not_robbed():
  engine = scripted.load(scripted.Engine(step_s=0.02))
  requests = [scripted.request(n, 'win-5') for n in range(6)]
  with serving(engine) as server:
    with connected(server) as first:
      first.submit(requests)
      # An answer shows that the stream has been opened.
      results = [first.next(WAIT_S)]
      with pytest.raises(errors.HandshakeRefused) as caught:
        client.SamplerClient(server.address, scripted.EXPECTED)
      words = str(caught.value)
      assert f'session {first.session_id}, whose rollout stream' in words
      assert 'start a service of its own' in words
      assert 'noticed within 30 s' in words
      results += scripted.collect(first, 5)
      assert {(r.status, r.policy_version) for r in results} == {(OK, 0)}
      assert len(engine.histories) == 6
      first.publish(scripted.params(1.0), 1)
    with connected(server) as second:
      assert second.service.active_policy_version == -1


def test_the_same_session_finds_what_it_left():
  with serving() as server, connected(server) as sampler:
    sampler.publish(scripted.params(1.0), 5)
    name = sampler.session_id
    sampler.reconnect(WAIT_S)
    assert sampler.session_id == name
    assert sampler.service.active_policy_version == 5
    with pytest.raises(errors.PublicationError, match='must exceed the active'):
      sampler.publish(scripted.params(2.0), 4)
    sampler.submit([scripted.request(1, version=5)])
    assert sampler.next(WAIT_S).status == OK


def test_a_second_stream_of_the_session_is_no_other_runner():
  with serving() as server, connected(server) as sampler:
    name = sampler.session_id
    with raw_stream(server.address, 1, session_id=name) as arrivals:
      assert arrivals.get(timeout=WAIT_S).request_id == 'r1'
      sampler.reconnect(WAIT_S)
      sampler.submit([scripted.request(2)])
      assert sampler.next(WAIT_S).request_id == 'r2'


def activation(session_id, checksum):
  return sampler_pb2.ActivateRequest(
    policy_version=1, weights_checksum=checksum, session_id=session_id
  )


def test_a_session_that_was_succeeded_has_no_say():
  data = weights.to_bytes(scripted.params(1.0))
  checksum = weights.checksum(data)
  with serving() as server, raw_stub(server.address) as stub:
    stub.Publish(scripted.publication(data), timeout=WAIT_S)
    # What the old session staged is not there for the new one.
    with (
      raw_stub(server.address, OTHER) as successor,
      pytest.raises(grpc.RpcError, match='is not staged'),
    ):
      successor.Activate(activation(OTHER, checksum), timeout=WAIT_S)
    calls = (
      lambda: stub.Publish(scripted.publication(data), timeout=WAIT_S),
      lambda: stub.Activate(
        activation(scripted.SESSION, checksum), timeout=WAIT_S
      ),
      lambda: next(stub.Rollout(iter([scripted.OPENING]), timeout=WAIT_S)),
    )
    for call in calls:
      with pytest.raises(grpc.RpcError) as caught:
        call()
      assert caught.value.code() == grpc.StatusCode.ABORTED
      assert f"the service works for, '{OTHER}'" in caught.value.details()


def test_a_runner_whose_place_was_taken_is_told_so():
  with serving() as server, connected(server) as first:
    first.submit([scripted.request(1)])
    assert first.next(WAIT_S).status == OK
    first._connection._call.cancel()
    with connected(server) as second:
      second.submit([scripted.request(2)])
      assert second.next(WAIT_S).status == STALE
      with pytest.raises(errors.HandshakeRefused, match=second.session_id):
        first.publish(scripted.params(1.0), 1)
      second.publish(scripted.params(2.0), 0)
    # The other one has gone, so the place is free again.
    first.reconnect(WAIT_S)
    assert first.service.active_policy_version == -1


def test_nobody_gets_in_without_a_handshake():
  with serving() as server, grpc.insecure_channel(server.address) as channel:
    call = channel.stream_stream('/spopp.sampler.v1.Sampler/Rollout')
    for name in ('', OTHER):
      opening = sampler_pb2.Opening(session_id=name)
      first = sampler_pb2.RolloutMessage(opening=opening)
      with pytest.raises(grpc.RpcError) as caught:
        next(call(iter([first.SerializeToString()]), timeout=WAIT_S))
      assert caught.value.code() == grpc.StatusCode.ABORTED
