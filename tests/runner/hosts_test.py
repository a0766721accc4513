"""How the hosts of a learner find and lose each other, without JAX's part."""

import concurrent.futures
import contextlib
import logging
import socket
import struct
import time

import jax
import numpy as np
import pytest
import tiny_world

from spopp_jax.runner import frames, hosts, meeting, preemption

WAIT_S = 20.0


@pytest.fixture
def settings(tmp_path, monkeypatch):
  """Returns settings of a host; JAX's own start is noted, not made."""
  started = []
  monkeypatch.setattr(
    jax.distributed,
    'initialize',
    lambda *args, **kwargs: started.append((args, kwargs)),
  )
  jax.devices()
  with socket.create_server(('127.0.0.1', 0)) as probe:
    port = probe.getsockname()[1]

  def load(index, *overrides, count=3, timeout_s=5.0):
    return tiny_world.load(
      tmp_path / str(index),
      f'hosts.count={count}',
      f'hosts.index={index}',
      f'hosts.coordinator=127.0.0.1:{port}',
      f'hosts.start_timeout_s={timeout_s}',
      *overrides,
    )

  load.started = started
  return load


def start(*configs):
  """Starts hosts side by side; returns their ends or errors, in order."""
  with concurrent.futures.ThreadPoolExecutor(len(configs)) as threads:
    futures = []
    for config in configs:
      futures.append(threads.submit(meeting.start, config))
      time.sleep(0.05)  # later ones are there later
    return [f.exception(WAIT_S) or f.result() for f in futures]


def close(lead, *followers):
  lead.close(finished=True)
  for follower in followers:
    follower.close()


def test_a_single_host_needs_nobody(settings):
  assert meeting.start(settings(0, count=1)) is None
  assert settings.started == []


@pytest.mark.parametrize('order', [(0, 1, 2), (2, 1, 0)])
def test_hosts_come_in_any_order_and_agree_on_a_coordinator(settings, order):
  links = start(*map(settings, order))
  lead, one, two = (links[order.index(i)] for i in range(3))
  assert isinstance(lead, hosts.Lead)
  assert (one.index, two.index) == (1, 2)
  indices = sorted(args[2] for args, _ in settings.started)
  assert indices == [0, 1, 2]
  assert {args[1] for args, _ in settings.started} == {3}
  (coordinator,) = {args[0] for args, _ in settings.started}
  assert coordinator.startswith('127.0.0.1:')
  numbers = {'a': np.arange(3), 'b': np.float32(0.5)}
  lead.announce('update', numbers, {'x': 1})
  close(lead)
  for follower in (one, two):
    (frame,) = follower.commands()
    assert (frame.kind, frame.values) == ('update', {'x': 1})
    assert frame.arrays['a'].tolist() == [0, 1, 2]
    assert frame.arrays['b'] == np.float32(0.5)
    follower.close()


def test_missing_hosts_are_named_to_all_that_came(settings):
  lead, other = start(
    settings(0, count=4, timeout_s=1.0), settings(2, count=4, timeout_s=1.0)
  )
  for error in (lead, other):
    assert isinstance(error, meeting.HostsMissing)
    assert 'hosts 1, 3 of 4 did not come to 127.0.0.1' in str(error)
    assert 'hosts.start_timeout_s (1 s)' in str(error)
  assert str(other).startswith('host 0: ')
  assert settings.started == []


def test_without_host_0_the_address_is_named(settings):
  (error,) = start(settings(1, timeout_s=0.5))
  assert isinstance(error, meeting.HostsMissing)
  assert 'host 1 found no host 0 at hosts.coordinator (127.0.0.1:' in str(error)
  assert 'refused' in str(error)


def test_an_address_of_another_machine_cannot_be_listened_at(settings):
  config = settings(0, 'hosts.coordinator=192.0.2.1:8476')
  (error,) = start(config)
  assert isinstance(error, meeting.HostsMissing)
  assert 'cannot listen at hosts.coordinator (192.0.2.1:8476)' in str(error)


def test_a_host_with_other_settings_is_refused(settings):
  lead, other = start(
    settings(0, count=2, timeout_s=1.0),
    settings(1, 'optimizer.learning_rate=0.5', count=2, timeout_s=1.0),
  )
  for error in (lead, other):
    assert isinstance(error, meeting.HostsMissing)
    assert 'optimizer.learning_rate is 0.01 at host 0 and 0.5 at host 1' in str(
      error
    )


def test_two_hosts_with_one_index_are_refused(settings):
  lead, one, again, two = start(
    settings(0), settings(1), settings(1), settings(2)
  )
  assert isinstance(again, meeting.HostsMissing)
  assert 'a host with hosts.index 1 already' in str(again)
  close(lead, one, two)


def test_a_host_that_came_and_went_is_named(settings, monkeypatch):
  send = frames.send

  def fail(peer, kind, *contents):
    if kind == 'welcome':
      peer.close()
      raise BrokenPipeError('gone')
    send(peer, kind, *contents)

  monkeypatch.setattr(frames, 'send', fail)
  lead, other = start(
    settings(0, count=2, timeout_s=1.0), settings(1, count=2, timeout_s=1.0)
  )
  assert isinstance(lead, meeting.HostsMissing)
  assert 'host 1 came and went away again (gone)' in str(lead)
  assert isinstance(other, meeting.HostsMissing)
  assert settings.started == []


def test_strangers_do_not_keep_the_hosts_from_each_other(settings, caplog):
  caplog.set_level(logging.WARNING)
  config = settings(0, count=2)
  port = int(config.hosts.coordinator.rpartition(':')[2])
  with concurrent.futures.ThreadPoolExecutor(2) as threads:
    leading = threads.submit(meeting.start, config)
    for words in (b'GET / HTTP/1.1\r\n\r\n', struct.pack('!IQ', 2, 0) + b'{}'):
      deadline = time.monotonic() + WAIT_S
      while True:
        try:
          stranger = socket.create_connection(('127.0.0.1', port), 1)
          break
        except OSError:
          assert time.monotonic() < deadline
          time.sleep(0.01)
      with stranger:
        stranger.sendall(words)
        with contextlib.suppress(ConnectionResetError):
          assert stranger.recv(100) == b''
    (follower,) = start(settings(1, count=2))
    close(leading.result(WAIT_S), follower)
  assert caplog.text.count('is no host of this run') == 2


@pytest.fixture
def pair(settings, monkeypatch):
  monkeypatch.setattr(hosts, '_FAREWELL_S', 0.2)
  lead, follower = start(settings(0, count=2), settings(1, count=2))
  yield lead, follower
  close(lead, follower)


def stopped(stop):
  """Waits for a reason to stop."""
  deadline = time.monotonic() + WAIT_S
  while time.monotonic() < deadline:
    try:
      stop.check()
    except preemption.Stopped as reason:
      return reason
    time.sleep(0.01)
  raise AssertionError('nobody asked for a stop')


def test_a_host_that_is_to_stop_tells_host_0(pair):
  lead, follower = pair
  stop = preemption.StopRequest()
  with lead.leading(stop):
    stop.check()
    follower.ask_to_stop('SIGTERM')
    reason = stopped(stop)
    assert str(reason) == 'stopped by SIGTERM of host 1'
    assert reason.exit_code == 0
    lead.announce('score', {})  # it still computes along
  assert [frame.kind for frame in follower.commands()] == ['score']


def test_a_host_that_vanishes_stops_the_run(pair):
  lead, follower = pair
  stop = preemption.StopRequest()
  with lead.leading(stop):
    follower.close()
    reason = stopped(stop)
    assert 'host 1 is gone' in str(reason)
    assert reason.exit_code == 1
    with pytest.raises(hosts.HostLost, match=r'host 1 .*run\.resume=True'):
      lead.announce('update', {'a': np.zeros(1)})


@pytest.mark.parametrize(
  'error, ends_well',
  [
    (None, True),
    (preemption.Stopped('stopped by SIGTERM'), True),
    (preemption.Stopped('host 2 is gone', exit_code=1), False),
    (ValueError('a bug'), False),
  ],
)
def test_the_others_end_as_host_0_does(pair, error, ends_well):
  lead, follower = pair
  try:
    with lead.leading(preemption.StopRequest()):
      if error is not None:
        raise error
  except type(error):
    pass
  if ends_well:
    assert list(follower.commands()) == []
  else:
    with pytest.raises(hosts.HostLost, match='the run of host 0 has failed'):
      list(follower.commands())


def test_the_end_of_host_0_is_told_from_a_finished_run(pair):
  lead, follower = pair
  for peer in lead._peers.values():
    peer.shutdown(socket.SHUT_RDWR)
  with pytest.raises(hosts.HostLost, match='host 0 is gone'):
    list(follower.commands())


def test_a_long_wait_between_frames_is_no_loss(pair, monkeypatch):
  monkeypatch.setattr(hosts, '_SILENCE_S', 0.05)
  lead, follower = pair
  commands = follower.commands()
  with concurrent.futures.ThreadPoolExecutor(1) as threads:
    waiting = threads.submit(next, commands)
    time.sleep(0.3)
    lead.announce('score', {})
    assert waiting.result(WAIT_S) == frames.Frame('score', {}, {})
