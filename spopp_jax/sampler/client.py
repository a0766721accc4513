"""The runner's end of the sampler service."""

import collections
import logging
import queue
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

import grpc
import numpy as np

from spopp_jax import types
from spopp_jax.sampler import (
  base,
  codec,
  credentials,
  errors,
  handshake,
  installation,
  options,
  provenance,
  sampler_pb2,
  weights,
)
from spopp_jax.sampler import connection as connection_lib
from spopp_jax.sampler import failures as failures_lib

_logger = logging.getLogger(__name__)

_CALL_DEADLINE_S = 30.0
_KEPT_ACKNOWLEDGEMENTS = 4096
_PAUSE_S = 0.1
# Ends of a request that somebody should look into.
_FAILURES = (
  types.Status.ENV_ERROR,
  types.Status.TOOL_TIMEOUT,
  types.Status.VERIFIER_TIMEOUT,
  types.Status.SAMPLER_ERROR,
  types.Status.MIXED_VERSIONS,
  types.Status.INVALID,
)


class SamplerClient:
  """Implements `sampler.base.Sampler` over gRPC; for one runner thread.

  It is one session of the service, over all its connections: request ids and
  versions need to be unique and to increase within it only.

  Attributes:
    session_id: names it at the service.
    address: where the service is.
    service: what it said of itself at the last handshake.
    counts: replies that were not passed on as they came: 'invalid' (turned
      into status INVALID) and 'duplicate' (dropped).
  """

  def __init__(
    self,
    address: str,
    expected: handshake.Expectation,
    *,
    limits: options.ChannelLimits | None = None,
    own: credentials.Credentials = credentials.NONE,
    allow_insecure: bool = False,
    connect_deadline_s: float = 20.0,
    publish_deadline_s: float = 300.0,
    transport: installation.Transport = 'auto',
    deliver: Callable[[connection_lib.Arrival], None] | None = None,
    failures: failures_lib.Failures | None = None,
  ):
    """Connects and shakes hands.

    Args:
      address: 'host:port' or 'unix:path'; another machine needs TLS.
      expected: what the service must be.
      limits: channel limits; the service must have the same.
      own: this end's credentials; the files are read at every connection.
      allow_insecure: True takes another machine without TLS, with a warning.
      connect_deadline_s: wait for a service to answer.
      publish_deadline_s: wait for each phase of a publication.
      transport: how snapshots get there; see `installation.Installer`.
      deliver: called with everything that arrives, from a thread of the
        connection; the caller then hands it to `receive` in the runner's
        thread and has no use for `next`.
      failures: keeps replies that break the contract or tell of a failure.

    Raises:
      ValueError: the address leaves this machine without TLS, or `transport`
        is another word.
      CredentialsUnusable: a file of the credentials is no good.
      SamplerLost: no service answers in time.
      HandshakeRefused: the service is not the expected one, takes other
        credentials, or works for another runner.
    """
    credentials.check_address(address, own, allow_insecure)
    self._own = own
    self.session_id = uuid.uuid4().hex
    self.address = address
    self.counts: collections.Counter[str] = collections.Counter()
    self._expected = expected
    self._limits = limits or options.ChannelLimits()
    self._installer = installation.Installer(transport, publish_deadline_s)
    self._arrivals: queue.SimpleQueue[connection_lib.Arrival] = (
      queue.SimpleQueue()
    )
    self._deliver = deliver or self._arrivals.put
    self._failures = failures
    self._outstanding: dict[str, base.Request] = {}
    self._snapshots: dict[int, str] = {}
    # A lost connection may have lost these; they are sent again.
    self._acknowledged: collections.deque[str] = collections.deque(
      maxlen=_KEPT_ACKNOWLEDGEMENTS
    )
    self._lost: errors.SamplerError | None = None
    self._connection = self._connect(connect_deadline_s)

  def submit(self, requests: Sequence[base.Request]) -> None:
    """Sends requests; a known request_id is not run twice.

    Raises:
      SamplerLost: the connection is gone; `reconnect` first.
      QueueFull: more would be outstanding than the service takes.
      InvalidMessage: a request is not what sampler.proto allows.
    """
    if self._lost is not None:
      raise self._lost
    messages = [codec.encode_request(request) for request in requests]
    fresh = {
      request.request_id: request
      for request in requests
      if request.request_id not in self._outstanding
    }
    if len(self._outstanding) + len(fresh) > self.service.max_pending:
      raise errors.QueueFull(
        f'{len(self._outstanding)} requests are outstanding and {len(fresh)} '
        f'more exceed max_pending ({self.service.max_pending}) of the '
        'service; submit fewer at a time or raise it'
      )
    self._outstanding.update(fresh)
    for message in messages:
      self._connection.send(message)

  def next(self, timeout_s: float) -> types.Trajectory:
    """Returns the next finished trajectory, in completion order.

    A reply that breaks the contract, or claims a snapshot that this client
    did not activate, comes as a trajectory with status INVALID.

    Raises:
      SamplerLost: the service is gone; submit the unanswered requests again
        after `reconnect`.
      SamplerTimeout: nothing is outstanding, or nothing finished in time.
      InvalidMessage: a reply from which no request id can be read.
    """
    deadline = time.monotonic() + timeout_s
    while True:
      if not self._outstanding:
        raise errors.SamplerTimeout('nothing is outstanding; submit first')
      trajectory = self.receive(self._take(timeout_s, deadline))
      if trajectory is not None:
        return trajectory

  def receive(self, arrival: connection_lib.Arrival) -> types.Trajectory | None:
    """Takes in what `deliver` was called with.

    Args:
      arrival: a reply, or the end of a connection.

    Returns:
      The trajectory as `next` returns it; None when there is none: a repeat,
      or the end of a connection, after which `lost` says so.

    Raises:
      InvalidMessage: a reply from which no request id can be read.
    """
    if isinstance(arrival, connection_lib.Ended):
      if arrival.connection is self._connection:
        self._lost = self._loss(arrival)
      return None
    return self._accept(arrival)

  @property
  def lost(self) -> errors.SamplerError | None:
    """Why there is no connection; None while there is one."""
    return self._lost

  def publish(self, params: Mapping[str, np.ndarray], version: int) -> str:
    """Transfers, verifies and activates parameters from memory; see `install`.

    Args:
      params: name -> array.
      version: must exceed what this session published before.

    Returns:
      sha256 of the snapshot's bytes, 64 hex digits.
    """
    return self.install(weights.snapshot(params, version))

  def install(
    self, snapshot: weights.Snapshot, *, interrupt: bool = False
  ) -> str:
    """Transfers, verifies and activates a snapshot.

    Nothing is sent when the service already generates with exactly it.
    Accepted requests of the old version are run to their end first; one that
    is still on its way when the switch happens is answered STALE.

    Args:
      snapshot: its version must exceed what this session published before.
      interrupt: activate it at once; open episodes go on with it.

    Returns:
      sha256 of the snapshot's bytes, 64 hex digits.

    Raises:
      PublicationError: refused, damaged, or the old version did not drain in
        time; it is still active.
      HandshakeRefused: the service works for another runner now.
      SamplerLost: the service is gone; publish again after `reconnect`.
    """
    version, checksum = snapshot.version, snapshot.checksum
    connection = self._connection
    with connection.calls(f'handshake before version {version}'):
      active = self._shake_hands(connection, _CALL_DEADLINE_S)
    with connection.calls(f'publication of version {version}', publishing=True):
      if (version, checksum) != (
        active.active_policy_version,
        active.active_weights_checksum,
      ):
        self._installer.stage(connection.stub, snapshot, self.session_id)
        if interrupt:
          # Answers of the new version may overtake the one to this call.
          self._snapshots[version] = checksum
        self._installer.activate(
          connection.stub, snapshot, self.session_id, interrupt=interrupt
        )
    self._snapshots[version] = checksum
    return checksum

  def reconnect(
    self,
    deadline_s: float,
    address: str | None = None,
    *,
    new_session: bool = False,
  ) -> None:
    """Replaces the connection; results that have arrived are kept.

    Args:
      deadline_s: wait for a service to answer.
      address: where the service is now, when it has moved.
      new_session: begin anew: the service drops what it still owes, has no
        snapshot, and nothing is outstanding here.

    Raises:
      SamplerLost: no service answers in time.
      HandshakeRefused: the service is not the expected one, or works for
        another runner.
    """
    self._connection.close()
    self.address = address or self.address
    if new_session:
      self.session_id = uuid.uuid4().hex
      self._outstanding.clear()
      self._snapshots.clear()
      self._acknowledged.clear()
    self._lost = errors.SamplerLost(f'not connected to {self.address}')
    self._connection = self._connect(deadline_s)
    self._lost = None

  def close(self) -> None:
    """Closes the connection; the service cancels what is outstanding."""
    self._connection.close()
    self._outstanding.clear()
    self._lost = errors.SamplerLost(f'the client of {self.address} is closed')

  def _connect(self, deadline_s: float) -> connection_lib.Connection:
    connection = connection_lib.Connection(
      self.address, self._limits, self._deliver, self._own
    )
    try:
      with connection.calls(f'connection within {deadline_s} s'):
        self.service = self._first_handshake(connection, deadline_s)
      handshake.check_description(self.service, self._expected)
    except errors.SamplerError:
      connection.close()
      raise
    version = self.service.active_policy_version
    # What we have activated stands, whatever a service says of it later.
    self._snapshots.setdefault(version, self.service.active_weights_checksum)
    connection.open_stream(self.session_id)
    connection.acknowledge(
      name for name in self._acknowledged if name not in self._outstanding
    )
    return connection

  def _first_handshake(
    self, connection: connection_lib.Connection, deadline_s: float
  ) -> handshake.Description:
    """Tries until a service answers.

    A call that waits for the service by itself ends without the reason why
    there was none.
    """
    deadline = time.monotonic() + deadline_s
    while True:
      left_s = max(0.0, deadline - time.monotonic())
      try:
        return self._shake_hands(connection, left_s)
      except grpc.RpcError as error:
        code, text = error.code(), error.details()
        # The last try has a pause's time, lest it end without a reason too.
        if (
          code != grpc.StatusCode.UNAVAILABLE
          or credentials.misfit(code, text)
          or time.monotonic() + 2 * _PAUSE_S > deadline
        ):
          raise
      time.sleep(_PAUSE_S)

  def _shake_hands(
    self, connection: connection_lib.Connection, deadline_s: float
  ) -> handshake.Description:
    reply = connection.stub.Handshake(
      handshake.request(self._limits, self.session_id), timeout=deadline_s
    )
    handshake.check_contract(reply, self._limits)
    return handshake.describe(reply)

  def _take(self, timeout_s: float, deadline: float) -> connection_lib.Arrival:
    try:
      if self._lost is not None:
        return self._arrivals.get_nowait()
      left_s = max(0.0, deadline - time.monotonic())
      return self._arrivals.get(timeout=left_s)
    except queue.Empty:
      if self._lost is not None:
        raise self._lost from None
      raise errors.SamplerTimeout(
        f'nothing finished within {timeout_s} s at {self.address}; '
        f'outstanding: {sorted(self._outstanding)}'
      ) from None

  def _loss(self, ended: connection_lib.Ended) -> errors.SamplerError:
    if ended.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
      return errors.QueueFull(f'{self.address}: {ended.reason}')
    return errors.SamplerLost(
      f'lost the sampler at {self.address} ({ended.reason}) with '
      f'{len(self._outstanding)} requests unanswered; reconnect and submit '
      'them again'
    )

  def _accept(self, message: sampler_pb2.Trajectory) -> types.Trajectory | None:
    """Checks a reply; returns None for one that was answered before."""
    request = self._outstanding.get(message.request_id)
    try:
      trajectory = codec.decode_trajectory(
        message,
        max_tokens=self.service.max_context_tokens,
        vocab_size=self._expected.vocab_size,
      )
    except errors.InvalidMessage as error:
      if not error.request_id:
        self.counts['invalid'] += 1
        self._keep(message, str(error))
        raise
      trajectory = None
      problem = str(error)
    if request is None:
      self.counts['duplicate'] += 1
      return None
    del self._outstanding[message.request_id]
    self._acknowledged.append(message.request_id)
    self._connection.acknowledge([message.request_id])
    if trajectory is not None:
      problem = provenance.problem(trajectory, request, self._snapshots)
      if not problem:
        if trajectory.status in _FAILURES:
          self._keep(message, f'{trajectory.status.name}: {trajectory.detail}')
        return trajectory
    self.counts['invalid'] += 1
    self._keep(message, problem)
    _logger.warning('invalid reply for %s: %s', request.request_id, problem)
    return base.unanswered(request, types.Status.INVALID, problem)

  def _keep(self, message: sampler_pb2.Trajectory, reason: str) -> None:
    if self._failures is not None:
      self._failures.add(message, reason, self.address)
