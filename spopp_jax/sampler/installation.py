"""How a snapshot gets to a service: by a directory that both see, or chunks."""

import logging
import time
from typing import Any, Literal, get_args

import grpc

from spopp_jax.sampler import errors, sampler_pb2, transfer, weights

_LOG = logging.getLogger(__name__)

Transport = Literal['auto', 'directory', 'grpc']
# A service that is there after a cut answers within this.
_RETURN_S = 10.0
# Tries in a row that bring a transfer no further before it is given up.
_TRIES_IN_VAIN = 2


class Installer:
  """Brings snapshots to one service and activates them."""

  def __init__(self, transport: Transport, deadline_s: float):
    """Decides how.

    Args:
      transport: 'directory' names the snapshot's file to the service, 'grpc'
        sends its bytes, 'auto' sends them only when it has no file or the
        service does not see that.
      deadline_s: wait for each of the two phases.

    Raises:
      ValueError: `transport` is another word.
    """
    if transport not in get_args(Transport):
      raise ValueError(
        f'transport ({transport!r}) must be one of {get_args(Transport)}'
      )
    self._transport = transport
    self._deadline_s = deadline_s
    self._sees_directory = transport != 'grpc'

  def stage(
    self, stub: Any, snapshot: weights.Snapshot, session_id: str
  ) -> None:
    """Runs phase one.

    Args:
      stub: of the service.
      snapshot: what to bring.
      session_id: the service's current one.

    Raises:
      PublicationError: the snapshot cannot be read here, or not be brought by
        the transport asked for.
      grpc.RpcError: the service refused it or is gone.
    """
    deadline = time.monotonic() + self._deadline_s
    if snapshot.path is None and self._transport == 'directory':
      raise errors.PublicationError(
        f"transport 'directory' needs version {snapshot.version} in a file; "
        "write it to a publication.Store or use transport 'auto'"
      )
    if snapshot.path is None or not self._sees_directory:
      self._send(stub, snapshot, session_id, deadline)
      return
    # What we cannot read ourselves is no news about the service.
    snapshot.open().close()
    directory = str(snapshot.path.parent)
    try:
      stub.Publish(
        iter([transfer.header(snapshot, session_id, directory)]),
        timeout=self._deadline_s,
      )
    except grpc.RpcError as error:
      if error.code() != grpc.StatusCode.NOT_FOUND:
        raise
      if self._transport == 'directory':
        raise errors.PublicationError(
          f'the service does not see {directory}: {error.details()}; mount it '
          "there under the same path, or use transport 'auto' or 'grpc'"
        ) from error
      _LOG.warning(
        'the service does not see %s (%s); snapshots are sent over gRPC from '
        'now on',
        directory,
        error.details(),
      )
      self._sees_directory = False
      self._send(stub, snapshot, session_id, deadline)

  def activate(
    self,
    stub: Any,
    snapshot: weights.Snapshot,
    session_id: str,
    *,
    interrupt: bool,
  ) -> None:
    """Runs phase two; raises grpc.RpcError as `stage`.

    Args:
      stub: of the service.
      snapshot: what was staged.
      session_id: the service's current one.
      interrupt: switch under the open episodes.
    """
    stub.Activate(
      sampler_pb2.ActivateRequest(
        policy_version=snapshot.version,
        weights_checksum=snapshot.checksum,
        session_id=session_id,
        interrupt=interrupt,
      ),
      timeout=self._deadline_s,
    )

  def _send(
    self,
    stub: Any,
    snapshot: weights.Snapshot,
    session_id: str,
    deadline: float,
  ) -> None:
    """Sends what the service lacks, again as long as some tries get further."""
    request = sampler_pb2.ResumeRequest(
      policy_version=snapshot.version,
      weights_checksum=snapshot.checksum,
      size_bytes=snapshot.size_bytes,
      session_id=session_id,
    )
    furthest, in_vain = -1, 0
    while True:
      left_s = max(0.0, deadline - time.monotonic())
      held = -1
      try:
        held = stub.Resume(
          request, timeout=min(left_s, _RETURN_S), wait_for_ready=True
        ).held_bytes
        stub.Publish(
          transfer.parts(snapshot, session_id, held),
          timeout=max(0.0, deadline - time.monotonic()),
        )
        return
      except grpc.RpcError as error:
        in_vain = 0 if held > furthest else in_vain + 1
        if (
          error.code() != grpc.StatusCode.UNAVAILABLE
          or in_vain > _TRIES_IN_VAIN
        ):
          raise
        _LOG.warning(
          'the transfer of version %d broke off (%s); going on',
          snapshot.version,
          error.details(),
        )
      furthest = max(furthest, held)
