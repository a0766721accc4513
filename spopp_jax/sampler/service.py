"""The rollout service: one worker thread owns the engine, gRPC feeds it.

Callers name their session; its ledger and the worker serve it alone.

handler threads --claim--> ledger      --commands--> worker (driver, engine)
handler threads <--stream-- ledger.finish <--results-- worker
"""

import concurrent.futures
import logging
import threading
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from spopp_jax import types
from spopp_jax.sampler import (
  base,
  codec,
  credentials,
  errors,
  handshake,
  joining,
  ledger,
  options,
  rollout,
  sampler_pb2_grpc,
  staging,
)
from spopp_jax.sampler import session as session_lib
from spopp_jax.sampler import worker as worker_lib

_logger = logging.getLogger(__name__)

_HANDLER_THREADS = 16
# Every stream holds a handler thread; the rest answer the short calls.
_MAX_STREAMS = 8
_HEALTH_NAMES = ('', 'spopp.sampler.v1.Sampler')


class _Servicer(sampler_pb2_grpc.SamplerServicer):
  """Answers the rpcs of sampler.proto."""

  def __init__(
    self,
    driver: rollout.RolloutDriver,
    sessions: session_lib.Sessions,
    worker: worker_lib.Worker,
    *,
    model_fingerprint: str,
    limits: options.ChannelLimits,
  ):
    self.failure = ''
    self._driver = driver
    self._sessions = sessions
    self._worker = worker
    self._model_fingerprint = model_fingerprint
    self._limits = limits
    self._staging = staging.Staging(worker, lambda: self.failure)
    self._streams: set[session_lib.Stream] = set()
    self._tasks_fingerprint = rollout.tasks_fingerprint(driver.tasks.task_ids)

  def end_streams(self, code: grpc.StatusCode, text: str) -> None:
    for stream in list(self._streams):
      stream.end(code, text)

  def Handshake(self, request: Any, context: Any) -> Any:  # noqa: N802
    self._refuse_after_failure(context)
    try:
      handshake.check_contract(request, self._limits)
      handshake.check_session_id(request.session_id)
      session = self._sessions.enter(request.session_id)
    except errors.HandshakeRefused as error:
      context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    while not session.ready.wait(worker_lib.POLL_S):
      self._refuse_after_failure(context)
      if not context.is_active():
        break
    self._session(request.session_id, context)
    version, checksum = self._worker.active
    return handshake.reply(
      handshake.Description(
        tokenizer_fingerprint=self._driver.template.fingerprint,
        model_fingerprint=self._model_fingerprint,
        tasks_fingerprint=self._tasks_fingerprint,
        num_tasks=len(self._driver.tasks.task_ids),
        max_context_tokens=self._driver.engine.max_context,
        num_slots=self._driver.engine.num_slots,
        max_pending=session.book.max_pending,
        active_policy_version=version,
        active_weights_checksum=checksum,
      ),
      self._limits,
    )

  def _session(self, session_id: str, context: Any) -> session_lib.Session:
    """Returns the current session, or ends the call of any other."""
    try:
      return self._sessions.get(session_id)
    except errors.SessionEnded as error:
      context.abort(grpc.StatusCode.ABORTED, str(error))
      raise

  def _refuse_after_failure(self, context: Any) -> None:
    if self.failure:
      context.abort(
        grpc.StatusCode.INTERNAL, f'{self.failure}; restart the service'
      )

  def Rollout(self, request_iterator: Any, context: Any) -> Iterator[Any]:  # noqa: N802
    self._refuse_after_failure(context)
    if len(self._streams) >= _MAX_STREAMS:
      context.abort(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f'{_MAX_STREAMS} rollout streams are open, the most there may be',
      )
    stream = session_lib.Stream()
    if not context.add_callback(stream.end):
      return
    self._streams.add(stream)
    threading.Thread(
      target=self._read,
      args=(request_iterator, stream),
      name='sampler-reader',
      daemon=True,
    ).start()
    end = None
    try:
      while end is None:
        results, end = stream.take()
        yield from joining.replies(results, self._limits.max_message_bytes)
    finally:
      self._streams.discard(stream)
    if end.code is not None:
      context.abort(end.code, end.text)

  def _read(self, messages: Any, stream: session_lib.Stream) -> None:
    """Takes in what one caller sends until its side closes."""
    session: session_lib.Session | None = None
    try:
      first = next(messages, None)
      if first is None or first.WhichOneof('part') != 'opening':
        raise errors.InvalidMessage('part', 'another', 'opening at first')
      session = self._sessions.join(first.opening.session_id, stream)
      for message in messages:
        self._take(message, session, stream)
    except errors.SessionEnded as error:
      stream.end(grpc.StatusCode.ABORTED, str(error))
    except errors.QueueFull as error:
      stream.end(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
    except errors.InvalidMessage as error:
      stream.end(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except grpc.RpcError:
      _logger.info('a caller went away')
    finally:
      # Only here: no claim of this stream can come later.
      if session is not None:
        self._sessions.leave(session, stream)
      stream.end()

  def _take(
    self,
    message: Any,
    session: session_lib.Session,
    stream: session_lib.Stream,
  ) -> None:
    part = message.WhichOneof('part')
    if part == 'acknowledgement':
      session.book.acknowledge(
        message.acknowledgement.request_ids, stream.deliver
      )
      return
    if part != 'requests':
      raise errors.InvalidMessage('part', part, 'requests or acknowledgement')
    for asked in message.requests.requests:
      try:
        request = codec.decode_request(asked)
        is_new = session.book.claim(request, stream.deliver)
      except errors.InvalidMessage as error:
        if not error.request_id:
          raise
        _logger.warning('refused a request: %s', error)
        stream.deliver(self._refuse(asked, str(error)))
        continue
      if is_new:
        self._worker.send(request)

  def _refuse(self, message: Any, detail: str) -> types.Trajectory:
    request = base.Request(
      request_id=message.request_id,
      task_id=message.task_id,
      policy_version=message.policy_version,
      seed=message.seed,
      sampling=types.SamplingParams(),
    )
    return self._driver.answer(request, types.Status.INVALID, detail)

  def Publish(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
    first: Any = next(request_iterator, None)
    if first is None or first.WhichOneof('part') != 'header':
      context.abort(
        grpc.StatusCode.INVALID_ARGUMENT,
        'the first part of a publication must be its header',
      )
    session = self._session(first.header.session_id, context)
    return self._staging.publish(
      session, first.header, request_iterator, context
    )

  def Resume(self, request: Any, context: Any) -> Any:  # noqa: N802
    session = self._session(request.session_id, context)
    return self._staging.resume(session, request)

  def Activate(self, request: Any, context: Any) -> Any:  # noqa: N802
    session = self._session(request.session_id, context)
    return self._staging.activate(session, request, context)


class SamplerServer:
  """A running service; made by `serve`.

  Attributes:
    address: where it listens, with the port that was chosen.
  """

  def __init__(
    self,
    server: Any,
    servicer: _Servicer,
    worker: worker_lib.Worker,
    address: str,
  ):
    self.address = address
    self._server = server
    self._servicer = servicer
    self._worker = worker
    self._ended = threading.Event()
    self._thread = threading.Thread(
      target=self._work, name='sampler-worker', daemon=True
    )
    self._health = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
    sampler_pb2_grpc.add_SamplerServicer_to_server(servicer, server)

  def start(self) -> None:
    """Starts the worker, then accepts calls, then reports SERVING."""
    self._thread.start()
    self._server.start()
    self._set_health(health_pb2.HealthCheckResponse.SERVING)
    _logger.info('serving at %s', self.address)

  def wait(self, timeout_s: float) -> str:
    """Waits for the engine to fail; returns how it did, or '' if it has not."""
    self._ended.wait(timeout_s)
    return self._servicer.failure

  def stop(self, grace_s: float = 1.0) -> None:
    """Ends all streams, then the worker; results not sent are lost."""
    self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    self._servicer.end_streams(grpc.StatusCode.UNAVAILABLE, 'the service stops')
    self._server.stop(grace_s).wait(grace_s + worker_lib.POLL_S)
    self._worker.stop()
    self._thread.join(grace_s)

  def _work(self) -> None:
    try:
      self._worker.run()
    except Exception as error:
      # Whatever the engine raised, its state is unknown: the service ends.
      _logger.exception('the worker failed')
      failure = f'the worker failed: {type(error).__name__}: {error}'
      self._servicer.failure = failure
      self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
      self._servicer.end_streams(grpc.StatusCode.INTERNAL, failure)
    self._ended.set()

  def _set_health(self, status: Any) -> None:
    for name in _HEALTH_NAMES:
      self._health.set(name, status)


def serve(
  driver: rollout.RolloutDriver,
  *,
  model_fingerprint: str,
  address: str = '127.0.0.1:0',
  limits: options.ChannelLimits | None = None,
  own: credentials.Credentials = credentials.NONE,
  allow_insecure: bool = False,
  max_pending: int = 1024,
  orphan_grace_s: float = 120.0,
) -> SamplerServer:
  """Starts a service; from then on its worker thread owns the driver.

  Args:
    driver: engine, tasks and template; idle.
    model_fingerprint: of the engine's architecture; the runner must name the
      same.
    address: 'host:port', port 0 for any free one, or 'unix:path'; one that
      other machines reach needs TLS.
    limits: channel limits; the clients must have the same.
    own: this end's credentials; with TLS a caller needs a certificate, with a
      token every call but those for health needs it.
    allow_insecure: True lets other machines in without TLS, with a warning.
    max_pending: requests that may be unacknowledged at a time.
    orphan_grace_s: how long the requests of a lost stream go on.

  Returns:
    The running service; `stop` it.

  Raises:
    ValueError: the address leaves this machine without TLS, or a trajectory
      that fills the context would exceed `max_message_bytes`.
    CredentialsUnusable: a file of the credentials is no good.
    SamplerError: the address is taken.
  """
  limits = limits or options.ChannelLimits()
  credentials.check_address(address, own, allow_insecure)
  needed = options.trajectory_bytes(driver.engine.max_context)
  if needed > limits.max_message_bytes:
    raise ValueError(
      f'max_message_bytes ({limits.max_message_bytes}) must be at least '
      f'{needed} for a context of {driver.engine.max_context} tokens'
    )
  book = ledger.Ledger(max_pending=max_pending, orphan_grace_s=orphan_grace_s)
  worker = worker_lib.Worker(driver, book)
  silence_ms = limits.keepalive_time_ms + limits.keepalive_timeout_ms
  sessions = session_lib.Sessions(worker, book, silence_s=silence_ms / 1000)
  servicer = _Servicer(
    driver, sessions, worker, model_fingerprint=model_fingerprint, limits=limits
  )
  grpc_server = grpc.server(
    concurrent.futures.ThreadPoolExecutor(_HANDLER_THREADS),
    interceptors=own.interceptors(),
    options=limits.server_options(),
  )
  try:
    port = own.listen(grpc_server, address)
  except RuntimeError as error:
    raise errors.SamplerError(
      f'cannot listen at {address} ({error}); choose another address, or port '
      '0 for any free one'
    ) from error
  if not address.startswith('unix:'):
    address = f'{address.rpartition(":")[0]}:{port}'
  server = SamplerServer(grpc_server, servicer, worker, address)
  server.start()
  return server
