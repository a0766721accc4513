"""A sampler service as a child process of the runner, and its client."""

import atexit
import collections
import contextlib
import os
import pathlib
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spopp_jax import types
from spopp_jax.sampler import (
  base,
  client,
  connection,
  errors,
  handshake,
  installation,
  lifeline,
  options,
  weights,
)
from spopp_jax.sampler import failures as failures_lib

_STOP_DEADLINE_S = 5.0
_TRY_S = 1.0
_LOG_LINES_SHOWN = 8


class LocalSampler:
  """Implements `sampler.base.Sampler` with a service process of its own.

  The process ends with `close`, with this interpreter, and also when this
  process is killed. `reconnect` starts it again when it has died; it then
  generates with no snapshot, or the one its command names, so the runner must
  publish again.
  """

  def __init__(
    self,
    command: Sequence[str],
    expected: handshake.Expectation,
    *,
    log_path: str | os.PathLike[str],
    limits: options.ChannelLimits | None = None,
    ready_deadline_s: float = 120.0,
    publish_deadline_s: float = 300.0,
    transport: installation.Transport = 'auto',
    deliver: Callable[[connection.Arrival], None] | None = None,
    failures: failures_lib.Failures | None = None,
  ):
    """Starts the process, waits for it and shakes hands.

    Args:
      command: the process; it must end in `lifeline.run`.
      expected: what the service must be.
      log_path: file that takes the process's output, appended.
      limits: channel limits; the process must use the same.
      ready_deadline_s: wait for the process to accept calls.
      publish_deadline_s: wait for each phase of a publication.
      transport: see `SamplerClient`.
      deliver: see `SamplerClient`.
      failures: see `SamplerClient`.

    Raises:
      SamplerLost: the process ended or was not ready in time.
      HandshakeRefused: the service is not the expected one.
    """
    self._command = list(command)
    self._log_path = pathlib.Path(log_path)
    self._process: subprocess.Popen[str] | None = None
    atexit.register(self.close)
    try:
      address = self._start(ready_deadline_s)
      self._client = client.SamplerClient(
        address,
        expected,
        limits=limits,
        connect_deadline_s=ready_deadline_s,
        publish_deadline_s=publish_deadline_s,
        transport=transport,
        deliver=deliver,
        failures=failures,
      )
    except errors.SamplerError:
      self._stop()
      raise

  @property
  def service(self) -> handshake.Description:
    """What the service said of itself at the last handshake."""
    return self._client.service

  @property
  def session_id(self) -> str:
    """See `SamplerClient`."""
    return self._client.session_id

  @property
  def address(self) -> str:
    """Where the service listens."""
    return self._client.address

  @property
  def process_id(self) -> int:
    """Id of the service process, running or not."""
    assert self._process is not None
    return self._process.pid

  def submit(self, requests: Sequence[base.Request]) -> None:
    """See `SamplerClient.submit`."""
    self._client.submit(requests)

  def next(self, timeout_s: float) -> types.Trajectory:
    """See `SamplerClient.next`."""
    return self._client.next(timeout_s)

  def publish(self, params: Mapping[str, np.ndarray], version: int) -> str:
    """See `SamplerClient.publish`."""
    return self._client.publish(params, version)

  def install(
    self, snapshot: weights.Snapshot, *, interrupt: bool = False
  ) -> str:
    """See `SamplerClient.install`."""
    return self._client.install(snapshot, interrupt=interrupt)

  def receive(self, arrival: connection.Arrival) -> types.Trajectory | None:
    """See `SamplerClient.receive`."""
    return self._client.receive(arrival)

  @property
  def lost(self) -> errors.SamplerError | None:
    """See `SamplerClient.lost`."""
    return self._client.lost

  def reconnect(self, deadline_s: float, *, new_session: bool = False) -> None:
    """Restores the connection, starting the process again if need be.

    A process that runs but does not answer within half of the deadline is
    ended and started again.

    Args:
      deadline_s: until a service must have answered.
      new_session: see `SamplerClient.reconnect`.

    Raises:
      SamplerLost: no service within the deadline.
    """
    now = time.monotonic()
    deadline, give_up = now + deadline_s, now + deadline_s / 2
    # A process that has just died may still look alive, so it is asked often.
    while self._is_running() and time.monotonic() < give_up:
      with contextlib.suppress(errors.SamplerLost):
        self._client.reconnect(
          min(_TRY_S, deadline_s / 2), new_session=new_session
        )
        return
    # It does not answer, so it is not asked to end either.
    self._stop(patience_s=0.0)
    address = self._start(deadline - time.monotonic())
    self._client.reconnect(
      deadline - time.monotonic(), address, new_session=new_session
    )

  def close(self) -> None:
    """Closes the connection and ends the process."""
    atexit.unregister(self.close)
    if hasattr(self, '_client'):
      self._client.close()
    self._stop()

  def _is_running(self) -> bool:
    return self._process is not None and self._process.poll() is None

  def _start(self, deadline_s: float) -> str:
    """Starts the process; returns the address it says it listens at."""
    self._log_path.parent.mkdir(parents=True, exist_ok=True)
    with self._log_path.open('ab') as log:
      self._process = subprocess.Popen(
        self._command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        # Ctrl-C in the terminal is for the runner, which then closes us.
        start_new_session=True,
        env={**os.environ, lifeline.PARENT_VARIABLE: '1'},
      )
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(
      target=_read_output,
      args=(self._process, self._log_path, answers),
      name='sampler-output',
      daemon=True,
    ).start()
    try:
      address = answers.get(timeout=max(0.0, deadline_s))
    except queue.Empty:
      self._stop()
      raise self._failure(f'was not ready within {deadline_s:.1f} s') from None
    if address is None:
      self._stop()
      raise self._failure(f'ended with code {self._process.returncode}')
    return address

  def _failure(self, what: str) -> errors.SamplerLost:
    with self._log_path.open(encoding='utf-8', errors='replace') as log:
      last = collections.deque(log, maxlen=_LOG_LINES_SHOWN)
    return errors.SamplerLost(
      f'the sampler process {" ".join(self._command)} {what}; the log is '
      f'{self._log_path} and ends:\n{"".join(last)}'
    )

  def _stop(self, patience_s: float = _STOP_DEADLINE_S) -> None:
    """Asks the process to end, and kills it when it has not in time."""
    process = self._process
    if process is None:
      return
    if process.stdin is not None:
      process.stdin.close()
    process.terminate()
    try:
      process.wait(patience_s)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait(_STOP_DEADLINE_S)


def _read_output(
  process: 'subprocess.Popen[str]',
  log_path: pathlib.Path,
  answers: 'queue.SimpleQueue[str | None]',
) -> None:
  """Finds the ready line in the process's output and logs the rest."""
  assert process.stdout is not None
  with process.stdout as lines, log_path.open('a', encoding='utf-8') as log:
    for line in lines:
      address = lifeline.parse_ready_line(line)
      if address is None:
        log.write(line)
        log.flush()
      else:
        answers.put(address)
  answers.put(None)
