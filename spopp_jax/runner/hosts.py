"""The hosts of one learner: host 0 leads, the others compute along.

Host 0 alone has rollouts, evidence, metrics and checkpoints. Before each
computation it tells the others which one it is and with what numbers, so all
take the same steps, and none waits in a collective that another never enters.

  host n -- join, stopping --> host 0
         <-- welcome | refused, begin, init, place, update, score, end --
"""

import contextlib
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
import ml_collections

from spopp_jax.runner import config as config_lib
from spopp_jax.runner import frames, preemption

_LOG = logging.getLogger(__name__)
_PAUSE_S = 0.2
# For a newcomer's first words, and for every part of a frame.
_GREETING_S = 5.0
_SILENCE_S = 120.0
_RESUME = 'start all hosts again with --config.run.resume=True'
# These differ from host to host.
_OWN = ('hosts.index', 'run.directory')


class HostsMissing(RuntimeError):
  """Not all hosts came together in time; the text names them."""


class HostLost(RuntimeError):
  """A host went away in the middle of the run; the text says how to go on."""


class Lead:
  """Host 0's end of the connections to all others."""

  def __init__(self, peers: dict[int, socket.socket]):
    """Takes connected sockets by the hosts' indices, to be closed."""
    self._peers = peers
    self._lost = ''
    self._closed = False

  @contextlib.contextmanager
  def leading(self, stop: preemption.StopRequest) -> Iterator[None]:
    """Holds the hosts together for a run, then lets them end as it does.

    Args:
      stop: asked by a host that is to stop, and when one goes away.
    """
    for index, peer in self._peers.items():
      threading.Thread(
        target=self._listen,
        args=(index, peer, stop),
        name=f'host-{index}',
        daemon=True,
      ).start()
    finished = False
    try:
      yield
      finished = True
    except preemption.Stopped as stopped:
      finished = not stopped.exit_code
      raise
    finally:
      self.close(finished=finished)

  def announce(
    self,
    kind: str,
    arrays: Mapping[str, Any],
    values: Mapping[str, Any] | None = None,
  ) -> None:
    """Tells every host what comes next.

    Args:
      kind: the call to make.
      arrays: its numpy arrays by name.
      values: JSON values by name.

    Raises:
      HostLost: one of them is gone.
    """
    for index, peer in self._peers.items():
      try:
        if not self._lost:
          frames.send(peer, kind, values, arrays)
      except OSError as error:
        self._lost = f'host {index} is gone ({error})'
    if self._lost:
      raise HostLost(f'{self._lost}; {_RESUME}')

  def close(self, *, finished: bool) -> None:
    """Lets the others end; `finished` as the run should, or not."""
    self._closed = True
    for peer in self._peers.values():
      with contextlib.suppress(OSError):
        frames.send(peer, 'end', {'finished': finished})
      peer.close()

  def _listen(
    self, index: int, peer: socket.socket, stop: preemption.StopRequest
  ) -> None:
    try:
      while True:
        frame = _patiently(peer, max_bytes=0)
        reason = frame.values.get('reason')
        stop.ask(preemption.Stopped(f'stopped by {reason} of host {index}'))
    except (OSError, EOFError, frames.BrokenFrame) as error:
      if not self._closed:
        self._lost = f'host {index} is gone ({error})'
        stop.ask(preemption.Stopped(f'stopped, {self._lost},', exit_code=1))


class Follower:
  """Another host's end of its connection to host 0.

  Attributes:
    index: of this host.
  """

  def __init__(self, index: int, peer: socket.socket):
    """Takes a connected socket, which `close` closes."""
    self.index = index
    self._peer = peer

  def commands(self) -> Iterator[frames.Frame]:
    """Yields what host 0 announces, until it ends the run.

    Raises:
      HostLost: host 0 is gone, or its run failed.
    """
    while True:
      try:
        frame = _patiently(self._peer)
      except (OSError, EOFError, frames.BrokenFrame) as error:
        raise HostLost(f'host 0 is gone ({error}); {_RESUME}') from error
      if frame.kind != 'end':
        yield frame
        continue
      if not frame.values['finished']:
        raise HostLost('the run of host 0 has failed; its output says why')
      return

  def ask_to_stop(self, reason: str) -> None:
    """Tells host 0 that this host was asked to stop."""
    with contextlib.suppress(OSError):  # its loss shows in `commands`
      frames.send(self._peer, 'stopping', {'reason': reason})

  def close(self) -> None:
    """Closes the connection."""
    self._peer.close()


def start(config: ml_collections.ConfigDict) -> Lead | Follower | None:
  """Brings the hosts of a learner together; before any use of a device.

  Args:
    config: validated; `hosts` says how many there are and which this is. All
      hosts need the same settings but for `hosts.index` and `run.directory`.

  Returns:
    This host's connections; None when it is the only one.

  Raises:
    HostsMissing: not all have come in `hosts.start_timeout_s`; named.
  """
  hosts = config.hosts
  if hosts.count == 1:
    return None
  deadline = time.monotonic() + hosts.start_timeout_s
  link: Lead | Follower
  if hosts.index == 0:
    link, coordinator = _gather(config, deadline)
  else:
    link, coordinator = _join(config, deadline)
  jax.distributed.initialize(
    coordinator,
    hosts.count,
    hosts.index,
    initialization_timeout=max(1, int(hosts.start_timeout_s)),
  )
  jax.devices()  # waits until every host has said which it has
  return link


def exit_alone(text: str) -> NoReturn:
  """Ends this process with code 1 although another host is gone.

  JAX's own end would wait for that host, and then abort.
  """
  sys.stderr.write(f'{text}\n')
  logging.shutdown()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(1)


def _gather(
  config: ml_collections.ConfigDict, deadline: float
) -> tuple[Lead, str]:
  """Waits for all others; returns them and the address of JAX's coordinator."""
  hosts = config.hosts
  name, port = _split(hosts.coordinator)
  peers: dict[int, socket.socket] = {}
  refused: dict[str, str] = {}
  try:
    listener = socket.create_server((name, port))
  except OSError as error:
    raise HostsMissing(
      f'host 0 cannot listen at hosts.coordinator ({hosts.coordinator}): '
      f'{error}; choose an address of host 0 and a free port'
    ) from error
  with listener, contextlib.ExitStack() as stack:
    while len(peers) < hosts.count - 1:
      left_s = deadline - time.monotonic()
      if left_s <= 0:
        reason = _missing(config, peers, refused)
        for peer in peers.values():
          _refuse(peer, reason)
        raise HostsMissing(reason)
      listener.settimeout(left_s)
      with contextlib.suppress(TimeoutError):
        peer, address = listener.accept()
        stack.callback(peer.close)
        _greet(peer, address[0], config, peers, refused)
    coordinator = f'{name}:{_free_port(name)}'
    for peer in peers.values():
      frames.send(peer, 'welcome', {'coordinator': coordinator})
    stack.pop_all()
  return Lead(peers), coordinator


def _greet(
  peer: socket.socket,
  address: str,
  config: ml_collections.ConfigDict,
  peers: dict[int, socket.socket],
  refused: dict[str, str],
) -> None:
  """Takes a host in, or says why not."""
  _prepare(peer)
  peer.settimeout(_GREETING_S)
  try:
    frame = frames.receive(peer, max_bytes=0)
    index, settings = frame.values['index'], frame.values['settings']
    if frame.kind != 'join':
      raise ValueError(f'a frame of kind {frame.kind!r}')
    problem = _misfit(config, peers, index, settings)
  except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
    _LOG.warning('%s is no host of this run: %s', address, error)
    peer.close()
    return
  if problem:
    refused[address] = problem
    _LOG.warning('refused a host at %s: %s', address, problem)
    _refuse(peer, problem)
    return
  peers[index] = peer
  _LOG.info('host %d has come, from %s', index, address)


def _misfit(
  config: ml_collections.ConfigDict,
  peers: Mapping[int, socket.socket],
  index: Any,
  theirs: Mapping[str, Any],
) -> str:
  """Says why a host cannot be taken in; '' when it can."""
  count = config.hosts.count
  if index not in range(1, count):
    return f'hosts.index ({index}) must be between 1 and {count - 1}'
  if index in peers:
    return f'there is a host with hosts.index {index} already'
  ours = _settings(config)
  for name in sorted(ours.keys() | theirs.keys()):
    if ours.get(name) != theirs.get(name):
      return (
        f'{name} is {ours.get(name)!r} at host 0 and {theirs.get(name)!r} at '
        f'host {index}; start all hosts with the same settings'
      )
  return ''


def _missing(
  config: ml_collections.ConfigDict,
  peers: Mapping[int, socket.socket],
  refused: Mapping[str, str],
) -> str:
  hosts = config.hosts
  absent = [str(i) for i in range(1, hosts.count) if i not in peers]
  text = (
    f'of {hosts.count} hosts {", ".join(absent)} did not come to '
    f'{hosts.coordinator} within hosts.start_timeout_s '
    f'({hosts.start_timeout_s:g} s)'
  )
  for address, problem in refused.items():
    text += f'; one at {address} was refused: {problem}'
  return text


def _join(
  config: ml_collections.ConfigDict, deadline: float
) -> tuple[Follower, str]:
  """Goes to host 0; returns it and the address of JAX's coordinator."""
  hosts = config.hosts
  problem: Exception | str = 'no time to try'
  while (left_s := deadline - time.monotonic()) > 0:
    try:
      peer = socket.create_connection(_split(hosts.coordinator), left_s)
    except OSError as error:
      problem = error
      time.sleep(_PAUSE_S)
      continue
    _prepare(peer)
    try:
      values = {'index': hosts.index, 'settings': _settings(config)}
      frames.send(peer, 'join', values)
      # Host 0 says itself who is missing; it began at another moment.
      peer.settimeout(left_s + _GREETING_S)
      frame = frames.receive(peer, max_bytes=0)
    except (OSError, EOFError, frames.BrokenFrame) as error:
      peer.close()
      problem = error
      time.sleep(_PAUSE_S)
      continue
    if frame.kind == 'welcome':
      return Follower(hosts.index, peer), frame.values['coordinator']
    peer.close()
    raise HostsMissing(f'host 0: {frame.values["reason"]}')
  raise HostsMissing(
    f'host {hosts.index} found no host 0 at hosts.coordinator '
    f'({hosts.coordinator}) within hosts.start_timeout_s '
    f'({hosts.start_timeout_s:g} s): {problem}'
  )


def _patiently(
  peer: socket.socket, max_bytes: int | None = None
) -> frames.Frame:
  """Waits for a frame as long as it takes to begin, then for its parts."""
  # Rollouts may take long; keepalive notices a host that has vanished.
  while not select.select([peer], [], [], _SILENCE_S)[0]:
    pass
  peer.settimeout(_SILENCE_S)
  return frames.receive(peer, max_bytes)


def _settings(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The settings that all hosts share, as JSON gives them back."""
  values = {
    name: value
    for name, value in config_lib.leaf_values(config).items()
    if name not in _OWN
  }
  return json.loads(json.dumps(values))


def _refuse(peer: socket.socket, reason: str) -> None:
  with contextlib.suppress(OSError):
    frames.send(peer, 'refused', {'reason': reason})
  peer.close()


def _prepare(peer: socket.socket) -> None:
  """Has the system notice a host that vanished, within about a minute."""
  peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in (('IDLE', 30), ('INTVL', 10), ('CNT', 3)):
    if hasattr(socket, f'TCP_KEEP{name}'):
      option = getattr(socket, f'TCP_KEEP{name}')
      peer.setsockopt(socket.IPPROTO_TCP, option, value)


def _split(address: str) -> tuple[str, int]:
  name, _, port = address.rpartition(':')
  return name, int(port)


def _free_port(name: str) -> int:
  with socket.create_server((name, 0)) as probe:
    return probe.getsockname()[1]
