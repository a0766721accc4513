"""Publication over a real channel: transfer, refusals, the switch."""

import grpc
import numpy as np
import pytest
import scripted

from spopp_jax import types
from spopp_jax.sampler import (
  errors,
  sampler_pb2,
  transfer,
  weights,
)

OK = types.Status.OK
WAIT_S = 20.0
serving, connected = scripted.serving, scripted.connected
raw_stub, collect = scripted.raw_stub, scripted.collect
wait_until = scripted.wait_until


def test_publication_switches_and_echoes_version_and_checksum():
  engine = scripted.load(scripted.Engine())
  with serving(engine) as server, connected(server) as sampler:
    checksum = sampler.publish(scripted.params(1.0), 5)
    assert engine.loaded == [(0, [0.5, -0.5]), (5, [1.0, -1.0])]
    sampler.submit([scripted.request(1, version=5)])
    result = sampler.next(WAIT_S)
    assert (result.policy_version, result.weights_checksum) == (5, checksum)


def test_large_snapshots_come_in_many_chunks():
  size = 3 * transfer.CHUNK_BYTES // 4 + 1
  big = {**scripted.params(1.0), 'big': np.arange(size, dtype=np.float32)}
  with serving() as server, connected(server) as sampler:
    assert sampler.publish(big, 1) == weights.checksum(weights.to_bytes(big))


def test_same_snapshot_again_changes_nothing():
  engine = scripted.load(scripted.Engine())
  with serving(engine) as server, connected(server) as sampler:
    sampler.publish(scripted.params(1.0), 1)
    sampler.publish(scripted.params(1.0), 1)
    assert [version for version, _ in engine.loaded] == [0, 1]
    with raw_stub(server.address, sampler.session_id) as stub:
      stub.Activate(
        sampler_pb2.ActivateRequest(
          policy_version=1,
          weights_checksum=engine.weights_checksum,
          session_id=sampler.session_id,
        ),
        timeout=WAIT_S,
      )
    assert [version for version, _ in engine.loaded] == [0, 1]


@pytest.mark.parametrize('version', [3, 2])
def test_version_must_increase(version):
  with (
    serving(scripted.load(scripted.Engine(), version=3)) as server,
    connected(server) as sampler,
    pytest.raises(errors.PublicationError, match='must exceed the active'),
  ):
    sampler.publish(scripted.params(9.0), version)


def test_refused_parameters_leave_the_old_version():
  engine = scripted.load(scripted.Engine())
  with serving(engine) as server, connected(server) as sampler:
    with pytest.raises(errors.PublicationError, match=r'w has shape \(3,\)'):
      sampler.publish({'w': np.zeros(3, np.float32)}, 1)
    sampler.submit([scripted.request(1, version=0)])
    assert sampler.next(WAIT_S).status == OK


@pytest.mark.parametrize(
  'header, code, words',
  [
    ({'weights_checksum': '0' * 64}, 'DATA_LOSS', 'sha256'),
    ({'size_bytes': 10_000}, 'DATA_LOSS', 'bytes arrived of 10000'),
    ({'policy_version': 0}, 'FAILED_PRECONDITION', 'must exceed'),
  ],
)
def test_damaged_publication_is_not_staged(header, code, words):
  data = weights.to_bytes(scripted.params(1.0))
  with serving() as server, raw_stub(server.address) as stub:
    with pytest.raises(grpc.RpcError) as caught:
      stub.Publish(scripted.publication(data, **header), timeout=WAIT_S)
    assert caught.value.code().name == code
    assert words in caught.value.details()
    with pytest.raises(grpc.RpcError) as caught:
      stub.Activate(
        sampler_pb2.ActivateRequest(
          policy_version=1,
          weights_checksum=weights.checksum(data),
          session_id=scripted.SESSION,
        ),
        timeout=WAIT_S,
      )
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert 'is not staged' in caught.value.details()


def test_publication_without_a_header_is_refused():
  with serving() as server, raw_stub(server.address) as stub:
    with pytest.raises(grpc.RpcError) as caught:
      stub.Publish(iter([transfer.chunk(0, b'x')]), timeout=WAIT_S)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_publisher_that_dies_between_the_phases_leaves_the_old_version():
  data = weights.to_bytes(scripted.params(1.0))
  with serving() as server, connected(server) as sampler:
    name = sampler.session_id
    with raw_stub(server.address, name) as stub:
      reply = stub.Publish(scripted.publication(data, name), timeout=WAIT_S)
      assert reply.weights_checksum == weights.checksum(data)
    sampler.reconnect(WAIT_S)
    assert sampler.service.active_policy_version == 0
    sampler.submit([scripted.request(1, version=0)])
    assert sampler.next(WAIT_S).policy_version == 0
    sampler.submit([scripted.request(2, version=1)])
    assert sampler.next(WAIT_S).status == types.Status.STALE


def test_activation_drains_every_accepted_request_first():
  engine = scripted.load(scripted.Engine(step_s=0.01))
  with serving(engine) as server, connected(server) as sampler:
    sampler.submit([scripted.request(n, 'win-5') for n in range(6)])
    collect(sampler, 1)
    sampler.publish(scripted.params(1.0), 1)
    results = collect(sampler, 5)
    assert {(r.status, r.policy_version) for r in results} == {(OK, 0)}


def test_activation_that_cannot_drain_in_time_is_given_up():
  engine = scripted.load(scripted.Engine(step_s=0.05))
  with (
    serving(engine) as server,
    connected(server, publish_deadline_s=0.2) as sampler,
  ):
    sampler.submit([scripted.request(n, 'endless') for n in range(4)])
    wait_until(lambda: engine.num_open)
    with pytest.raises(errors.PublicationError, match='DEADLINE_EXCEEDED'):
      sampler.publish(scripted.params(1.0), 1)
    assert {r.policy_version for r in collect(sampler, 4)} == {0}
    assert [version for version, _ in engine.loaded] == [0]


def test_before_the_first_publication_everything_is_stale():
  with serving(scripted.Engine()) as server, connected(server) as sampler:
    assert sampler.service.active_policy_version == -1
    sampler.submit([scripted.request(1)])
    assert sampler.next(WAIT_S).status == types.Status.STALE
    sampler.publish(scripted.params(1.0), 0)
    sampler.submit([scripted.request(1)])
    assert sampler.next(WAIT_S).status == OK
