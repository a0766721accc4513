"""The service over a real channel: publication, order, bounds, health."""

import dataclasses
import socket

import grpc
import messages
import pytest
import scripted
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spopp_jax import types
from spopp_jax.sampler import (
  errors,
  options,
  rollout,
  sampler_pb2,
)

OK = types.Status.OK
WAIT_S = 20.0
serving, connected = scripted.serving, scripted.connected
raw_stub, collect = scripted.raw_stub, scripted.collect
raw_stream, wait_until = scripted.raw_stream, scripted.wait_until


def test_every_request_is_answered_in_completion_order():
  with serving() as server, connected(server) as sampler:
    task_ids = [t for t in scripted.TASK_IDS if t != 'stuck']
    sampler.submit(
      [scripted.request(n, task_id) for n, task_id in enumerate(task_ids)]
    )
    results = collect(sampler, len(task_ids))
    assert sorted(r.request_id for r in results) == sorted(
      f'r{n}' for n in range(len(task_ids))
    )
    # A 5-turn episode that starts beside a 1-turn one is overtaken by it.
    order = [r.task_id for r in results]
    assert order.index('lose-1') < order.index('win-5')
    counts = {s: [r.status for r in results].count(s) for s in types.Status}
    assert counts[OK] == 11
    assert counts[types.Status.ENV_ERROR] == 2
    assert counts[types.Status.CONTEXT_LIMIT] == 1


def test_what_arrives_is_what_an_in_process_driver_makes():
  truncated = dataclasses.replace(scripted.SAMPLING, top_k=3)
  requests = [
    scripted.request(
      n, f'win-{1 + n % 5}', sampling=(scripted.SAMPLING, truncated)[n % 2]
    )
    for n in range(20)
  ]
  driver = rollout.RolloutDriver(
    scripted.load(scripted.Engine()), scripted.Tasks(), scripted.Template()
  )
  for request in requests:
    driver.submit(request)
  expected = {}
  while not driver.is_idle:
    expected.update((r.request_id, r) for r in driver.step())
  with serving() as server, connected(server) as sampler:
    sampler.submit(requests)
    for result in collect(sampler, 20):
      ours = expected[result.request_id]
      messages.assert_same(ours, result, but=('seconds',))
      assert (result.kept is not None) == result.sampling.truncated


def test_unix_socket(tmp_path):
  with (
    serving(address=f'unix:{tmp_path}/s') as server,
    connected(server) as sampler,
  ):
    sampler.submit([scripted.request(1)])
    assert sampler.next(WAIT_S).status == OK


def test_finished_results_wait_for_a_client_that_lost_its_stream():
  engine = scripted.load(scripted.Engine())
  with serving(engine) as server:
    with raw_stub(server.address), raw_stream(server.address, 1, 2) as arrivals:
      # Both have finished here, and neither is acknowledged.
      assert arrivals.get(timeout=WAIT_S).request_id in ('r1', 'r2')
      wait_until(lambda: len(engine.histories) == 2)
      ended = list(engine.histories)
    with raw_stream(server.address, 2, 1) as arrivals:
      again = [arrivals.get(timeout=WAIT_S).request_id for _ in range(2)]
      assert again == ['r2', 'r1']
    assert engine.histories == ended


def test_reconnecting_client_gets_each_answer_once():
  engine = scripted.load(scripted.Engine(step_s=0.01))
  with serving(engine) as server, connected(server) as sampler:
    requests = [scripted.request(n, f'win-{1 + n % 5}') for n in range(10)]
    sampler.submit(requests)
    answered = [r.request_id for r in collect(sampler, 3)]
    sampler.reconnect(WAIT_S)
    sampler.submit([r for r in requests if r.request_id not in answered])
    answered += [r.request_id for r in collect(sampler, 7)]
    assert sorted(answered) == sorted(r.request_id for r in requests)
    # Nothing was run a second time.
    assert len(engine.histories) == 10
    with pytest.raises(errors.SamplerTimeout, match='nothing is outstanding'):
      sampler.next(0.1)


def test_requests_nobody_claims_are_cancelled():
  engine = scripted.load(scripted.Engine(num_slots=1, step_s=0.05))
  sampling = dataclasses.replace(scripted.SAMPLING, max_turns=10_000)
  with (
    serving(engine, orphan_grace_s=0.0) as server,
    connected(server) as sampler,
  ):
    sampler.submit(
      [scripted.request(n, 'endless', sampling=sampling) for n in (1, 2)]
    )
    wait_until(lambda: engine.num_open)
    sampler.reconnect(WAIT_S)
    sampler.submit([scripted.request(3, 'win-1')])
    assert sampler.next(WAIT_S).request_id == 'r3'
    # r2 waited for the one slot and was never begun.
    assert len(engine.histories) == 2


def test_client_refuses_more_than_the_service_takes():
  with serving(max_pending=3) as server, connected(server) as sampler:
    with pytest.raises(errors.QueueFull, match=r'max_pending \(3\)'):
      sampler.submit([scripted.request(n) for n in range(4)])
    sampler.submit([scripted.request(n) for n in range(3)])
    collect(sampler, 3)


def test_service_refuses_more_than_it_takes():
  engine = scripted.load(scripted.Engine(num_slots=3, step_s=0.05))
  with (
    serving(engine, max_pending=3) as server,
    connected(server) as sampler,
  ):
    sampler.submit([scripted.request(n, 'endless') for n in range(3)])
    wait_until(lambda: engine.num_open == 3)
    name = sampler.session_id
    with raw_stream(server.address, 9, session_id=name) as arrivals:
      ended = arrivals.get(timeout=WAIT_S)
      assert ended.code == grpc.StatusCode.RESOURCE_EXHAUSTED
      assert 'max_pending is 3' in ended.reason
    assert len(collect(sampler, 3)) == 3


def test_more_than_the_service_takes_is_queue_full_at_the_client():
  engine = scripted.load(scripted.Engine(step_s=0.05))
  with serving(engine, max_pending=3) as server, connected(server) as sampler:
    sampler.service = dataclasses.replace(sampler.service, max_pending=99)
    sampler.submit([scripted.request(n, 'endless') for n in range(4)])
    with pytest.raises(errors.QueueFull, match=r'RESOURCE_EXHAUSTED.*is 3'):
      sampler.next(WAIT_S)


def test_one_id_for_two_requests_is_invalid():
  engine = scripted.load(scripted.Engine(step_s=0.1))
  with serving(engine) as server, connected(server) as sampler:
    sampler.submit([scripted.request(1, 'endless')])
    wait_until(lambda: engine.num_open)
    name = sampler.session_id
    with raw_stream(server.address, 1, session_id=name) as arrivals:
      reply = arrivals.get(timeout=WAIT_S)
      assert reply.status == sampler_pb2.STATUS_INVALID
      assert 'request_id of request r1 is in use' in reply.detail


def test_foreign_requests_are_checked():
  bad = scripted.asking(
    sampler_pb2.Request(request_id='q', task_id='win-1', seed=1)
  )
  nameless = scripted.asking(sampler_pb2.Request())
  with serving() as server, raw_stub(server.address) as stub:
    call = stub.Rollout(iter([scripted.OPENING, bad]), timeout=WAIT_S)
    (reply,) = next(call).trajectories
    assert reply.status == sampler_pb2.STATUS_INVALID
    assert 'sampling.temperature' in reply.detail
    absent = sampler_pb2.RolloutMessage()
    for message in (nameless, absent, scripted.OPENING):
      call = stub.Rollout(iter([scripted.OPENING, message]), timeout=WAIT_S)
      with pytest.raises(grpc.RpcError) as caught:
        next(call)
      assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as caught:
      next(stub.Rollout(iter([bad]), timeout=WAIT_S))
    assert 'allowed: opening' in caught.value.details()


def test_garbage_on_the_wire_hurts_nobody_else():
  with serving() as server, connected(server) as sampler:
    host, _, port = server.address.rpartition(':')
    with socket.create_connection((host, int(port)), timeout=5) as raw:
      raw.sendall(b'\x00\xff' * 500)
    with grpc.insecure_channel(server.address) as channel:
      # Correct HTTP/2, but no message of the contract.
      call = channel.stream_stream('/spopp.sampler.v1.Sampler/Rollout')
      with pytest.raises(grpc.RpcError):
        next(call(iter([b'\xff\xff\xff']), timeout=WAIT_S))
    sampler.submit([scripted.request(1)])
    assert sampler.next(WAIT_S).status == OK


def test_engine_failure_ends_the_service():
  engine = scripted.load(scripted.Engine(fail_after=2))
  with serving(engine) as server, connected(server) as sampler:
    sampler.submit([scripted.request(1, 'endless')])
    with pytest.raises(errors.SamplerLost, match='accelerator is on fire'):
      sampler.next(WAIT_S)
    assert 'accelerator is on fire' in server.wait(WAIT_S)
    assert health_of(server) == 'NOT_SERVING'
    with pytest.raises(errors.SamplerLost, match='restart the service'):
      sampler.reconnect(WAIT_S)


def health_of(server, name='spopp.sampler.v1.Sampler'):
  with grpc.insecure_channel(server.address) as channel:
    reply = health_pb2_grpc.HealthStub(channel).Check(
      health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S
    )
  return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def test_health_is_reported():
  with serving() as server:
    assert health_of(server) == 'SERVING'
    assert health_of(server, '') == 'SERVING'
    assert server.wait(0.0) == ''


def test_taken_port_is_refused():
  with (
    serving() as server,
    pytest.raises(errors.SamplerError, match='cannot listen at'),
    serving(address=server.address),
  ):
    pass


def test_address_and_size_are_checked_before_listening():
  with (
    pytest.raises(ValueError, match='without TLS'),
    serving(address='0.0.0.0:0'),
  ):
    pass
  limits = options.ChannelLimits(max_message_bytes=4500)
  with (
    pytest.raises(ValueError, match=r'must be at least 4996'),
    serving(limits=limits),
  ):
    pass


def test_the_longest_trajectory_fits_the_smallest_allowed_message():
  size = options.trajectory_bytes(100)
  limits = options.ChannelLimits(max_message_bytes=size)
  with (
    serving(limits=limits) as server,
    connected(server, limits=limits) as sampler,
  ):
    sampler.submit([scripted.request(1, 'endless')])
    assert sampler.next(WAIT_S).status == OK


def test_kept_sets_too_large_for_a_message_fail_their_request_alone():
  limits = options.ChannelLimits(max_message_bytes=5000)
  few, many = (
    dataclasses.replace(scripted.SAMPLING, top_k=top_k) for top_k in (3, 2000)
  )
  with (
    serving(limits=limits) as server,
    connected(server, limits=limits) as sampler,
  ):
    sampler.submit(
      [
        scripted.request(1, sampling=many),
        scripted.request(2, sampling=few),
      ]
    )
    results = {r.request_id: r for r in collect(sampler, 2)}
  refused, taken = results['r1'], results['r2']
  assert refused.status == types.Status.SAMPLER_ERROR
  assert 'a message at most 5000' in refused.detail
  assert taken.status == OK
  assert taken.kept.offsets.tolist() == [
    *range(0, 3 * taken.num_actions + 1, 3)
  ]
  sampled = taken.tokens[taken.action_mask]
  assert taken.kept.ids.reshape(-1, 3)[:, 0].tolist() == sampled.tolist()
