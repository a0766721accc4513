"""One channel to a service with its rollout stream."""

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from spopp_jax.sampler import (
  credentials,
  errors,
  joining,
  options,
  sampler_pb2,
  sampler_pb2_grpc,
)

_JOIN_DEADLINE_S = 5.0
_MOST_AT_ONCE = 256
_REFUSALS = (
  grpc.StatusCode.FAILED_PRECONDITION,
  grpc.StatusCode.DATA_LOSS,
  grpc.StatusCode.DEADLINE_EXCEEDED,
  grpc.StatusCode.INVALID_ARGUMENT,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Ended:
  """The last arrival of a connection.

  Attributes:
    connection: the one that ended.
    code: gRPC status; None when the service closed the stream without one.
    reason: in words.
  """

  connection: 'Connection'
  code: grpc.StatusCode | None
  reason: str


Arrival = sampler_pb2.Trajectory | Ended


class Connection:
  """One channel, its rollout stream and the thread that reads it.

  Attributes:
    stub: the calls of sampler.proto on this channel.
  """

  def __init__(
    self,
    address: str,
    limits: options.ChannelLimits,
    deliver: Callable[[Arrival], None],
    own: credentials.Credentials = credentials.NONE,
  ):
    """Prepares a channel; the first call connects it.

    Args:
      address: 'host:port' or 'unix:path'.
      limits: channel limits.
      deliver: takes the stream's replies and its end, in the reading thread.
      own: this end's credentials.

    Raises:
      CredentialsUnusable: a file of them is no good.
    """
    self._address = address
    self._max_message_bytes = limits.max_message_bytes
    self._closed = False
    self._channel = own.open_channel(address, limits.client_options())
    self.stub = sampler_pb2_grpc.SamplerStub(self._channel)
    self._deliver = deliver
    self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._call: Any = None
    self._reader: threading.Thread | None = None

  def open_stream(self, session_id: str) -> None:
    """Opens the session's rollout stream and starts to read it."""
    opening = sampler_pb2.Opening(session_id=session_id)
    self._outgoing.put(sampler_pb2.RolloutMessage(opening=opening))
    self._call = self.stub.Rollout(self._messages())
    self._reader = threading.Thread(
      target=self._read, name='sampler-client', daemon=True
    )
    self._reader.start()

  def send(self, request: sampler_pb2.Request) -> None:
    """Queues a request; it is lost when the stream has ended."""
    requests = sampler_pb2.Requests(requests=[request])
    self._outgoing.put(sampler_pb2.RolloutMessage(requests=requests))

  def acknowledge(self, request_ids: Iterable[str]) -> None:
    """Queues an acknowledgement; it is lost when the stream has ended."""
    acknowledgement = sampler_pb2.Acknowledgement(request_ids=request_ids)
    self._outgoing.put(
      sampler_pb2.RolloutMessage(acknowledgement=acknowledgement)
    )

  @contextlib.contextmanager
  def calls(self, what: str, *, publishing: bool = False) -> Iterator[None]:
    """Turns the errors of gRPC into those of this boundary.

    Args:
      what: said of a failure.
      publishing: a refusal is that of a snapshot.

    Raises:
      PublicationError: a snapshot was refused.
      HandshakeRefused: the service does not work for us.
      SamplerLost: it is gone, or this connection was closed meanwhile.
    """
    try:
      yield
    except grpc.RpcError as error:
      code, text = error.code(), error.details()
      kind: type[errors.SamplerError]
      if publishing and code in _REFUSALS:
        kind, remedy = errors.PublicationError, 'the old version is active'
      elif code == grpc.StatusCode.FAILED_PRECONDITION:
        kind, remedy = errors.HandshakeRefused, 'no rollout was run'
      elif remedy := credentials.misfit(code, text):
        kind = errors.HandshakeRefused
      else:
        kind = errors.SamplerLost
        remedy = 'start a sampler there, or reconnect if it was restarted'
        if more := credentials.suspicion(code, text):
          remedy = f'{remedy}; {more}'
      raise kind(
        f'sampler at {self._address}, {what}: {code.name}: {text}; {remedy}'
      ) from error
    except ValueError as error:
      # All that gRPC says to a call on a channel that another thread closed.
      if not self._closed:
        raise
      raise errors.SamplerLost(
        f'sampler at {self._address}, {what}: the connection was closed'
      ) from error

  def close(self) -> None:
    """Ends the stream and closes the channel."""
    self._closed = True
    self._outgoing.put(None)
    if self._call is not None:
      self._call.cancel()
    self._channel.close()
    if self._reader is not None:
      self._reader.join(_JOIN_DEADLINE_S)

  def _messages(self) -> Iterator[Any]:
    while waiting := self._take_all():
      yield from joining.rollout_messages(waiting, self._max_message_bytes)

  def _take_all(self) -> list[Any]:
    """Waits for messages to send; none are left once the stream is to end."""
    taken = [self._outgoing.get()]
    with contextlib.suppress(queue.Empty):
      while taken[-1] is not None and len(taken) < _MOST_AT_ONCE:
        taken.append(self._outgoing.get_nowait())
    if taken[-1] is None:
      self._outgoing.put(taken.pop())
    return taken

  def _read(self) -> None:
    code, reason = None, 'the service closed the stream'
    try:
      for reply in self._call:
        for trajectory in reply.trajectories:
          self._deliver(trajectory)
    except grpc.RpcError as error:
      code = error.code()
      reason = f'{code.name}: {error.details()}'
    # Frees the thread of gRPC that waits for messages to send.
    self._outgoing.put(None)
    self._deliver(Ended(self, code, reason))
