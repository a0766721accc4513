"""The hosts of one learner: host 0 leads, the others compute along.

Host 0 alone has rollouts, evidence, metrics and checkpoints. Before each
computation it tells the others which one it is and with what numbers, so all
take the same steps, and none waits in a collective that another never enters.

  host n -- stopping --> host 0
         <-- begin, compile, init, place, update, score, end --
         <-- trained, to_save: what no host holds whole --
"""

import contextlib
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

from spopp_jax.runner import frames, preemption

_PAUSE_S = 0.2
_SILENCE_S = 120.0  # for every part of a frame
_FAREWELL_S = 30.0
# For a computation that a lost host took part in to fail, or to be left.
_COMPUTATION_S = 20.0
_RESUME = 'start all hosts again with --config.run.resume=True'


class HostLost(RuntimeError):
  """A host went away in the middle of the run; the text says how to go on."""


class Lead:
  """Host 0's end of the connections to all others."""

  def __init__(self, peers: dict[int, socket.socket]):
    """Takes connected sockets by the hosts' indices, to be closed."""
    self._peers = peers
    self._lost = ''
    self._closed = False
    self._listeners: list[threading.Thread] = []

  @contextlib.contextmanager
  def leading(self, stop: preemption.StopRequest) -> Iterator[None]:
    """Holds the hosts together for a run, then lets them end as it does.

    Args:
      stop: asked by a host that is to stop, and when one goes away.
    """
    for index, peer in self._peers.items():
      listener = threading.Thread(
        target=self._listen,
        args=(index, peer, stop),
        name=f'host-{index}',
        daemon=True,
      )
      self._listeners.append(listener)
      listener.start()
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
    # The others leave first: JAX ends those that find host 0 gone.
    deadline = time.monotonic() + _FAREWELL_S
    for listener in self._listeners:
      listener.join(max(0.0, deadline - time.monotonic()))
    for peer in self._peers.values():
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
        self._end_computation(stop)

  def _end_computation(self, stop: preemption.StopRequest) -> None:
    """Ends the process if it waits for the lost host in a computation."""
    deadline = time.monotonic() + _COMPUTATION_S
    while time.monotonic() < deadline:
      if self._closed or stop.was_seen:
        return
      time.sleep(_PAUSE_S)
    exit_alone(f'{self._lost} in the middle of a computation; {_RESUME}')


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
      jax.distributed.shutdown()
      return

  def ask_to_stop(self, reason: str) -> None:
    """Tells host 0 that this host was asked to stop."""
    with contextlib.suppress(OSError):  # its loss shows in `commands`
      frames.send(self._peer, 'stopping', {'reason': reason})

  def close(self) -> None:
    """Closes the connection."""
    self._peer.close()


def failed_computation(error: Exception) -> str:
  """Says what it most likely means that a computation of all hosts failed."""
  return (
    f'a computation of all hosts failed, one is probably gone ({error}); '
    f'{_RESUME}'
  )


def exit_alone(text: str) -> NoReturn:
  """Ends this process with code 1 although another host is gone.

  JAX's own end would wait for that host, and then abort.
  """
  sys.stderr.write(f'{text}\n')
  logging.shutdown()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(1)


def _patiently(
  peer: socket.socket, max_bytes: int | None = None
) -> frames.Frame:
  """Waits for a frame as long as it takes to begin, then for its parts."""
  # Rollouts may take long; keepalive notices a host that has vanished.
  while not select.select([peer], [], [], _SILENCE_S)[0]:
    pass
  peer.settimeout(_SILENCE_S)
  return frames.receive(peer, max_bytes)
