"""How the hosts of a learner come together, by a deadline or not at all.

  host n -- join --> host 0 -- welcome | refused --> host n

Then JAX's own start follows, which names nobody that is missing.
"""

import contextlib
import json
import logging
import socket
import time
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections

from spopp_jax.runner import config as config_lib
from spopp_jax.runner import frames, hosts

_LOG = logging.getLogger(__name__)
_PAUSE_S = 0.2
_GREETING_S = 5.0  # for a newcomer's first words
# These differ from host to host.
_OWN = ('hosts.index', 'run.directory')


class HostsMissing(RuntimeError):
  """Not all hosts came together in time; the text names them."""


def start(
  config: ml_collections.ConfigDict,
) -> hosts.Lead | hosts.Follower | None:
  """Brings the hosts of a learner together; before any use of a device.

  Args:
    config: validated; `hosts` says how many there are and which this is. All
      hosts need the same settings but for `hosts.index` and `run.directory`.

  Returns:
    This host's connections; None when it is the only one.

  Raises:
    HostsMissing: not all have come in `hosts.start_timeout_s`; named.
  """
  own = config.hosts
  if own.count == 1:
    return None
  deadline = time.monotonic() + own.start_timeout_s
  link: hosts.Lead | hosts.Follower
  if own.index == 0:
    link, coordinator = _gather(config, deadline)
  else:
    link, coordinator = _join(config, deadline)
  # Without it a lost host ends all others at once, before they can say so.
  jax.config.update('jax_enable_recoverability', True)
  jax.distributed.initialize(
    coordinator,
    own.count,
    own.index,
    initialization_timeout=max(1, int(own.start_timeout_s)),
  )
  jax.devices()  # waits until every host has said which it has
  return link


def _gather(
  config: ml_collections.ConfigDict, deadline: float
) -> tuple[hosts.Lead, str]:
  """Waits for all others; returns them and the address of JAX's coordinator."""
  own = config.hosts
  name, port = _split(own.coordinator)
  peers: dict[int, socket.socket] = {}
  refused: dict[str, str] = {}
  try:
    listener = socket.create_server((name, port))
  except OSError as error:
    raise HostsMissing(
      f'host 0 cannot listen at hosts.coordinator ({own.coordinator}): '
      f'{error}; choose an address of this host and a free port, or another '
      'hosts.index (0 here) if it is not the first'
    ) from error
  with listener, contextlib.ExitStack() as stack:
    while len(peers) < own.count - 1:
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
    for index, peer in peers.items():
      try:
        frames.send(peer, 'welcome', {'coordinator': coordinator})
      except OSError as error:
        raise HostsMissing(
          f'host {index} came and went away again ({error}); start all hosts '
          'again'
        ) from error
    stack.pop_all()
  return hosts.Lead(peers), coordinator


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
  own = config.hosts
  absent = [str(i) for i in range(1, own.count) if i not in peers]
  text = (
    f'host{"s" * (len(absent) > 1)} {", ".join(absent)} of {own.count} did '
    f'not come to {own.coordinator} within hosts.start_timeout_s '
    f'({own.start_timeout_s:g} s)'
  )
  for address, problem in refused.items():
    text += f'; one at {address} was refused: {problem}'
  return text


def _join(
  config: ml_collections.ConfigDict, deadline: float
) -> tuple[hosts.Follower, str]:
  """Goes to host 0; returns it and the address of JAX's coordinator."""
  own = config.hosts
  problem: Exception | str = 'no time to try'
  while (left_s := deadline - time.monotonic()) > 0:
    try:
      peer = socket.create_connection(_split(own.coordinator), left_s)
    except OSError as error:
      problem = error
      time.sleep(_PAUSE_S)
      continue
    _prepare(peer)
    try:
      values = {'index': own.index, 'settings': _settings(config)}
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
      return hosts.Follower(own.index, peer), frame.values['coordinator']
    peer.close()
    raise HostsMissing(f'host 0: {frame.values["reason"]}')
  raise HostsMissing(
    f'host {own.index} found no host 0 at hosts.coordinator '
    f'({own.coordinator}) within hosts.start_timeout_s '
    f'({own.start_timeout_s:g} s): {problem}'
  )


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
