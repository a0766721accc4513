"""How snapshots get to services: directories, chunks, cuts, kills."""

import contextlib
import os
import pathlib
import subprocess
import sys
import threading

import grpc
import numpy as np
import proxy
import pytest
import scripted

from spopp_jax import types
from spopp_jax.sampler import (
  client,
  errors,
  installation,
  publication,
  sampler_pb2,
  transfer,
  weights,
)

OK = types.Status.OK
WAIT_S = 20.0
serving, connected = scripted.serving, scripted.connected
raw_stub = scripted.raw_stub
MIB = 2**20
SIZE = 16 * MIB


def big(value):
  return {
    **scripted.params(value),
    'big': np.arange(SIZE // 4, dtype=np.float32),
  }


@contextlib.contextmanager
def connected_to(address, **kwargs):
  sampler = client.SamplerClient(address, scripted.EXPECTED, **kwargs)
  try:
    yield sampler
  finally:
    sampler.close()


@pytest.fixture
def sent(monkeypatch):
  """Returns the byte that each transfer of chunks began with."""
  starts = []
  parts = transfer.parts

  def record(snapshot, session_id, held_bytes):
    starts.append(held_bytes)
    return parts(snapshot, session_id, held_bytes)

  monkeypatch.setattr(transfer, 'parts', record)
  return starts


@pytest.mark.parametrize('transport', ['auto', 'directory'])
def test_a_version_in_a_directory_is_read_there(tmp_path, transport, sent):
  store = publication.Store(tmp_path)
  engine = scripted.Engine()
  with (
    serving(engine) as server,
    connected(server, transport=transport) as sampler,
  ):
    for version in (3, 5):
      snapshot = store.write(scripted.params(version), version)
      assert sampler.install(snapshot) == snapshot.checksum
      # What it generates with is in its memory.
      store.release(version, 'nobody')
    assert store.collect() == [3]
    sampler.submit([scripted.request(1, version=5)])
    result = sampler.next(WAIT_S)
  assert (result.status, result.weights_checksum) == (OK, snapshot.checksum)
  assert engine.loaded == [(3, [3.0, -3.0]), (5, [5.0, -5.0])]
  assert sent == []


def test_chunks_can_be_asked_for(tmp_path, sent):
  store = publication.Store(tmp_path)
  engine = scripted.Engine()
  with (
    serving(engine) as server,
    connected(server, transport='grpc') as sampler,
  ):
    sampler.install(store.write(scripted.params(3.0), 3))
  assert engine.loaded == [(3, [3.0, -3.0])]
  assert sent == [0]


def unseen_by_the_service(monkeypatch, tmp_path):
  """Lets the service look for every directory on a machine without it."""
  read = publication.read
  asked = []

  def elsewhere(directory, checksum):
    asked.append(directory)
    return read(tmp_path / 'other-machine', checksum)

  monkeypatch.setattr(publication, 'read', elsewhere)
  return asked


def test_a_service_that_does_not_see_the_directory_gets_chunks(
  tmp_path, monkeypatch, caplog, sent
):
  store = publication.Store(tmp_path / 'store')
  snapshots = [store.write(scripted.params(n), n) for n in (3, 5)]
  asked = unseen_by_the_service(monkeypatch, tmp_path)
  engine = scripted.Engine()
  with serving(engine) as server, connected(server) as sampler:
    for snapshot in snapshots:
      sampler.install(snapshot)
  assert [version for version, _ in engine.loaded] == [3, 5]
  # It was asked once and that was said once.
  assert asked == [str(tmp_path / 'store' / '3')]
  assert sent == [0, 0]
  assert caplog.text.count('sent over gRPC from now on') == 1


def test_a_directory_that_is_asked_for_and_not_seen_is_an_error(
  tmp_path, monkeypatch, sent
):
  snapshot = publication.Store(tmp_path).write(scripted.params(3.0), 3)
  unseen_by_the_service(monkeypatch, tmp_path)
  engine = scripted.load(scripted.Engine())
  with (
    serving(engine) as server,
    connected(server, transport='directory') as sampler,
  ):
    with pytest.raises(errors.PublicationError, match='mount it there'):
      sampler.install(snapshot)
    with pytest.raises(errors.PublicationError, match=r'publication\.Store'):
      sampler.publish(scripted.params(3.0), 3)
    sampler.submit([scripted.request(1, version=0)])
    assert sampler.next(WAIT_S).status == OK
  assert sent == []


def test_other_transports_are_refused():
  with pytest.raises(ValueError, match=r"\('ftp'\) must be one of"):
    installation.Installer('ftp', 1.0)


def test_a_version_that_was_collected_is_no_reason_to_fall_back(
  tmp_path, caplog
):
  store = publication.Store(tmp_path)
  old = store.write(scripted.params(1.0), 1)
  new = store.write(scripted.params(2.0), 2)
  store.collect()
  with serving() as server, connected(server) as sampler:
    with pytest.raises(errors.PublicationError, match='must be leased'):
      sampler.install(old)
    sampler.install(new)
  assert 'over gRPC' not in caplog.text


def test_a_damaged_file_leaves_the_old_version(tmp_path):
  snapshot = publication.Store(tmp_path).write(scripted.params(1.0), 1)
  data = snapshot.path.read_bytes()
  snapshot.path.write_bytes(data[:-1] + b'\x01')
  engine = scripted.load(scripted.Engine())
  with serving(engine) as server:
    for transport in ('directory', 'grpc'):
      with connected(server, transport=transport) as sampler:
        with pytest.raises(errors.PublicationError, match='DATA_LOSS'):
          sampler.install(snapshot)
        # A transfer that was damaged as a whole is not gone on with.
        snapshot.path.write_bytes(data)
        sampler.install(snapshot)
        snapshot.path.write_bytes(data[:-1] + b'\x01')


@pytest.mark.parametrize('cuts', [[6 * MIB], [4 * MIB, 9 * MIB, 13 * MIB]])
def test_a_transfer_that_is_cut_goes_on_where_it_was(cuts, sent):
  engine = scripted.Engine()
  with serving(engine) as server, proxy.through(server.address, cuts) as way:
    with connected_to(way.address) as sampler:
      checksum = sampler.publish(big(3.0), 3)
    assert way.cuts == []
    again = way.upstream_bytes - SIZE
  assert engine.loaded == [(3, [3.0, -3.0])]
  assert engine.weights_checksum == checksum
  # A try on a connection that was not up again brings nothing: it repeats.
  assert sent == sorted(sent)
  assert len(set(sent)) == 1 + len(cuts)
  # Only what was on its way at a cut was sent again.
  assert again < cuts[-1] - sent[-1] + MIB // 2


def test_a_transfer_goes_on_over_a_new_connection(sent):
  engine = scripted.load(scripted.Engine())
  snapshot = weights.snapshot(big(3.0), 3)
  with serving(engine) as server, connected(server) as sampler:
    # A runner's earlier try, which ended in the middle.
    stub = sampler._connection.stub
    tried = []

    def half():
      for part in transfer.parts(snapshot, sampler.session_id, 0):
        tried.append(part.chunk.data)
        yield part
        if len(tried) > 10:
          scripted.wait_until(lambda: held() >= 9 * transfer.CHUNK_BYTES)
          call.cancel()
          return

    def held():
      # Resume ends the transfer, so this looks from inside.
      incoming = server._servicer._sessions._current.incoming
      return len(incoming._data)

    call = stub.Publish.future(half(), timeout=WAIT_S)
    with pytest.raises(grpc.FutureCancelledError):
      call.result(WAIT_S)
    arrived = held()
    sent.clear()
    sampler.reconnect(WAIT_S)
    sampler.install(snapshot)
    (first_sent,) = sent
    # One more chunk may arrive before the service knows of the end.
    assert 9 * transfer.CHUNK_BYTES <= arrived <= first_sent
    assert first_sent <= 10 * transfer.CHUNK_BYTES
    assert engine.loaded[1:] == [(3, [3.0, -3.0])]


def test_what_is_held_aside_is_not_sent_again(sent):
  engine = scripted.load(scripted.Engine())
  snapshot = weights.snapshot(scripted.params(3.0), 3)
  with serving(engine) as server, connected(server) as sampler:
    installer = installation.Installer('auto', WAIT_S)
    installer.stage(sampler._connection.stub, snapshot, sampler.session_id)
    sampler.reconnect(WAIT_S)
    sampler.install(snapshot)
  assert sent == [0, snapshot.size_bytes]
  assert engine.loaded[1:] == [(3, [3.0, -3.0])]


def test_bytes_of_one_snapshot_are_not_taken_for_another():
  first = weights.to_bytes(scripted.params(1.0))
  second = weights.to_bytes(scripted.params(2.0))
  with serving() as server, raw_stub(server.address) as stub:
    opening, start, _ = scripted.publication(first)

    def held(data, **changes):
      fields = {
        'policy_version': 1,
        'weights_checksum': weights.checksum(data),
        'size_bytes': len(data),
        'session_id': scripted.SESSION,
      }
      request = sampler_pb2.ResumeRequest(**{**fields, **changes})
      return stub.Resume(request, timeout=WAIT_S).held_bytes

    bad = transfer.chunk(11, b'x')
    with pytest.raises(grpc.RpcError, match='offset 11; allowed: 10'):
      stub.Publish(iter([opening, start, bad]), timeout=WAIT_S)
    assert held(first) == 10
    assert held(second) == 0
    assert held(first, policy_version=2) == 0
    assert held(first, size_bytes=len(first) + 1) == 0
    assert held(first) == 10
    stub.Publish(scripted.publication(second), timeout=WAIT_S)
    assert held(second) == len(second)
    assert held(first) == 0


def test_a_connection_that_is_always_cut_is_given_up(sent):
  with (
    serving() as server,
    proxy.through(server.address) as way,
    connected_to(way.address) as sampler,
  ):
    # From now on nothing of a chunk gets through.
    way.cuts += range(way.upstream_bytes + 50_000, 10**9, 50_000)
    with pytest.raises(errors.SamplerLost, match='publication of version 3'):
      sampler.publish(big(3.0), 3)
  assert len(sent) <= 2 + installation._TRIES_IN_VAIN


def test_a_client_that_is_closed_meanwhile_is_lost():
  engine = scripted.load(scripted.Engine(step_s=0.05))
  with serving(engine) as server, connected(server) as sampler:
    sampler.submit([scripted.request(n, 'endless') for n in range(4)])
    scripted.wait_until(lambda: engine.num_open)
    closer = threading.Timer(0.1, sampler.close)
    closer.start()
    with pytest.raises(errors.SamplerLost, match='version 1'):
      sampler.publish(scripted.params(1.0), 1)
    closer.join(WAIT_S)
    with pytest.raises(errors.SamplerLost, match='was closed'):
      sampler.publish(scripted.params(1.0), 1)


def test_one_version_is_installed_in_many_services_at_once(tmp_path):
  store = publication.Store(tmp_path)
  engines = [scripted.Engine() for _ in range(4)]
  with contextlib.ExitStack() as stack:
    samplers = [
      stack.enter_context(connected(stack.enter_context(serving(engine))))
      for engine in engines
    ]
    for version in (0, 1, 2):
      snapshot = store.write(scripted.params(float(version)), version)
      for sampler in samplers:
        store.lease(version, sampler.address)

      def install(sampler, snapshot=snapshot):
        sampler.install(snapshot)
        store.release(snapshot.version, sampler.address)

      threads = [
        threading.Thread(target=install, args=(sampler,))
        for sampler in samplers
      ]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join(WAIT_S)
      store.collect()
      assert store.versions() == [version]
  for engine in engines:
    assert [version for version, _ in engine.loaded] == [0, 1, 2]


# A runner that stops between the phases, for ever.
RUNNER = """
import scripted, sys, time
from spopp_jax.sampler import client, installation, publication
store = publication.Store(sys.argv[2])
sampler = client.SamplerClient(sys.argv[1], scripted.EXPECTED)
sampler.install(store.write(scripted.params(1.0), 1))
installer = installation.Installer(sys.argv[3], 20.0)
snapshot = store.write(scripted.params(2.0), 2)
installer.stage(sampler._connection.stub, snapshot, sampler.session_id)
print('staged', flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize('transport', ['directory', 'grpc'])
def test_a_runner_killed_between_the_phases_leaves_no_half_state(
  tmp_path, transport
):
  here = str(pathlib.Path(__file__).parent)
  paths = [here, os.environ.get('PYTHONPATH', '')]
  engine = scripted.Engine()
  with serving(engine) as server:
    runner = subprocess.Popen(
      [sys.executable, '-c', RUNNER, server.address, tmp_path, transport],
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths)},
    )
    with runner:
      assert runner.stdout.readline().strip() == 'staged'
      runner.kill()
    assert engine.policy_version == 1
    store = publication.Store(tmp_path)
    assert store.versions() == [1, 2]
    with connected(server, transport=transport) as sampler:
      assert sampler.service.active_policy_version == -1
      # What the dead one held aside is not to be had.
      with pytest.raises(grpc.RpcError, match='is not staged'):
        sampler._connection.stub.Activate(
          sampler_pb2.ActivateRequest(
            policy_version=2,
            weights_checksum=weights.snapshot(scripted.params(2.0), 2).checksum,
            session_id=sampler.session_id,
          ),
          timeout=WAIT_S,
        )
      # The resumed run had got less far, and goes another way.
      checksum = sampler.install(store.write(scripted.params(3.0), 1))
      sampler.submit([scripted.request(1, version=1)])
      assert sampler.next(WAIT_S).weights_checksum == checksum
  assert engine.loaded == [(1, [1.0, -1.0]), (1, [3.0, -3.0])]
