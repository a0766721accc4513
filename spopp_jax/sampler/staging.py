"""The service's side of a publication: take in, hold aside, switch."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np

from spopp_jax.sampler import (
  errors,
  publication,
  sampler_pb2,
  transfer,
)
from spopp_jax.sampler import session as session_lib
from spopp_jax.sampler import worker as worker_lib


class Staging:
  """Answers Publish, Resume and Activate for the current session."""

  def __init__(self, worker: worker_lib.Worker, failure: Callable[[], str]):
    """Works beside the worker.

    Args:
      worker: switches snapshots.
      failure: returns why the worker has ended; '' while it works.
    """
    self._worker = worker
    self._failure = failure
    self._lock = threading.Lock()

  def publish(
    self,
    session: session_lib.Session,
    header: sampler_pb2.PublishHeader,
    parts: Iterator[sampler_pb2.PublishPart],
    context: Any,
  ) -> sampler_pb2.PublishReply:
    """Holds a snapshot aside once all of it is verified."""
    key = (header.policy_version, header.weights_checksum)
    active, _ = self._worker.active
    if header.policy_version <= active:
      context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        f'version {header.policy_version} must exceed the active version '
        f'{active} of this session',
      )
    if _staged(session) != key:
      try:
        if header.directory:
          params = publication.read(header.directory, header.weights_checksum)
        else:
          params = self._take_in(session, header, parts)
      except errors.SnapshotUnseen as error:
        context.abort(grpc.StatusCode.NOT_FOUND, str(error))
      except errors.PublicationError as error:
        context.abort(grpc.StatusCode.DATA_LOSS, str(error))
      with self._lock:
        session.staged = worker_lib.Snapshot(*key, params)
        session.incoming = None
    return sampler_pb2.PublishReply(
      policy_version=key[0], weights_checksum=key[1]
    )

  def resume(
    self, session: session_lib.Session, request: sampler_pb2.ResumeRequest
  ) -> sampler_pb2.ResumeReply:
    """Says how much of a snapshot is held, and ends what brings more."""
    key = (request.policy_version, request.weights_checksum)
    with self._lock:
      incoming = session.incoming
      held = request.size_bytes if _staged(session) == key else 0
    whole_key = (*key, request.size_bytes)
    if not held and incoming is not None and incoming.key == whole_key:
      _, held = incoming.take_turn()
    return sampler_pb2.ResumeReply(held_bytes=held)

  def activate(
    self,
    session: session_lib.Session,
    request: sampler_pb2.ActivateRequest,
    context: Any,
  ) -> sampler_pb2.ActivateReply:
    """Switches to what is held aside."""
    named = (request.policy_version, request.weights_checksum)
    if named != self._worker.active:
      refusal = self._switch(
        session, named, context, interrupt=request.interrupt
      )
      if refusal is not None:
        context.abort(*refusal)
    return sampler_pb2.ActivateReply(
      policy_version=named[0], weights_checksum=named[1]
    )

  def _take_in(
    self,
    session: session_lib.Session,
    header: sampler_pb2.PublishHeader,
    parts: Iterator[sampler_pb2.PublishPart],
  ) -> dict[str, np.ndarray]:
    """Takes chunks, after those that an earlier call brought."""
    key = (header.policy_version, header.weights_checksum, header.size_bytes)
    with self._lock:
      incoming = session.incoming
      if incoming is None or incoming.key != key:
        incoming = session.incoming = transfer.Incoming(*key)
    turn, _ = incoming.take_turn()
    for part in parts:
      incoming.append(turn, part.chunk)
    # The parts also end where a connection breaks: then there is more to come.
    is_whole = incoming.is_whole
    try:
      return incoming.finish()
    finally:
      with self._lock:
        if is_whole and session.incoming is incoming:
          session.incoming = None

  def _switch(
    self,
    session: session_lib.Session,
    named: tuple[int, str],
    context: Any,
    *,
    interrupt: bool,
  ) -> tuple[grpc.StatusCode, str] | None:
    """Activates the staged snapshot; returns why that failed, or None."""
    with self._lock:
      staged = session.staged
      if staged is None or named != _staged(session):
        return (
          grpc.StatusCode.FAILED_PRECONDITION,
          f'version {named[0]} with sha256 {errors.shown(named[1])} is not '
          'staged; publish it first',
        )
      session.staged = None
    timeout_s = context.time_remaining()
    if timeout_s is None:
      return (
        grpc.StatusCode.INVALID_ARGUMENT,
        'Activate needs a deadline on the call',
      )
    activation = worker_lib.Activation(
      staged, session.book, time.monotonic() + timeout_s, interrupt
    )
    self._worker.send(activation)
    while not activation.done.wait(worker_lib.POLL_S):
      if self._failure():
        return grpc.StatusCode.INTERNAL, self._failure()
      if time.monotonic() > activation.deadline_s + worker_lib.POLL_S:
        return grpc.StatusCode.DEADLINE_EXCEEDED, 'the worker did not answer'
    if activation.is_late:
      return grpc.StatusCode.DEADLINE_EXCEEDED, activation.refusal
    if activation.refusal:
      return grpc.StatusCode.FAILED_PRECONDITION, activation.refusal
    return None


def _staged(session: session_lib.Session) -> tuple[int, str] | None:
  staged = session.staged
  return None if staged is None else (staged.version, staged.checksum)
