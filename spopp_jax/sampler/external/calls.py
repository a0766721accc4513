"""One HTTP call that exchanges JSON, ends in time and can be cancelled."""

import contextlib
import http.client
import json
import socket
import threading
import urllib.parse
from typing import Any

from spopp_jax.sampler import errors

# A question that no token has to be generated for.
CONTROL_DEADLINE_S = 60.0


class Address:
  """Where a server listens.

  Attributes:
    url: as it was given.
  """

  def __init__(self, url: str):
    """Reads http://host[:port] or https://host[:port].

    Raises:
      ValueError: it is something else.
    """
    self.url = url
    try:
      parts = urllib.parse.urlsplit(url)
      port = parts.port
    except ValueError as error:
      raise ValueError(f'{url!r} is no address: {error}') from error
    if (
      parts.scheme not in ('http', 'https')
      or not parts.hostname
      or parts.path not in ('', '/')
      or parts.query
      or parts.fragment
      or parts.username
    ):
      raise ValueError(f'{url!r} must be http://host:port or https://host:port')
    self._secure = parts.scheme == 'https'
    self._host = parts.hostname
    self._port = port

  def connection(self, timeout_s: float) -> http.client.HTTPConnection:
    """Returns a connection that is not open yet."""
    if self._secure:
      return http.client.HTTPSConnection(
        self._host, self._port, timeout=timeout_s
      )
    return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

  def ask(
    self,
    method: str,
    path: str,
    body: object = None,
    *,
    deadline_s: float = CONTROL_DEADLINE_S,
  ) -> Any:
    """Makes a `Call` and returns its answer."""
    return Call(self, method, path, body, deadline_s=deadline_s).run()


class Call:
  """A call; `run` it once in one thread, `cancel` it from any.

  A new connection carries it: closing that is how a server is told that
  nobody waits for what it generates.
  """

  def __init__(
    self,
    address: Address,
    method: str,
    path: str,
    body: object = None,
    *,
    deadline_s: float,
  ):
    """Prepares the call.

    Args:
      address: whom it asks.
      method: GET or POST.
      path: with its query, from the first slash on.
      body: sent as JSON; None sends nothing.
      deadline_s: from `run` to the last byte of the answer.
    """
    self._address = address
    self._method = method
    self._path = path
    self._body = b'' if body is None else json.dumps(body).encode()
    self._deadline_s = deadline_s
    self._lock = threading.Lock()
    self._socket: socket.socket | None = None
    self._reason = ''
    self._late = f'there was no answer within {deadline_s:g} s'

  def cancel(self, reason: str = 'it was cancelled') -> None:
    """Has `run` end soon, with EngineRefused that gives the reason."""
    with self._lock:
      self._reason = self._reason or reason
      if self._socket is not None:
        with contextlib.suppress(OSError):
          self._socket.shutdown(socket.SHUT_RDWR)

  def run(self) -> Any:
    """Returns the answer: what its JSON says, or its text if it is none.

    Raises:
      EngineLost: the server cannot be reached.
      EngineRefused: it refused, broke off or was too late, or the call was
        cancelled.
    """
    timer = threading.Timer(self._deadline_s, self.cancel, [self._late])
    timer.daemon = True
    timer.start()
    connection = self._address.connection(self._deadline_s)
    try:
      self._connect(connection)
      return self._exchange(connection)
    finally:
      timer.cancel()
      with self._lock:
        self._socket = None
      connection.close()

  def _connect(self, connection: http.client.HTTPConnection) -> None:
    try:
      connection.connect()
    except OSError as error:
      raise errors.EngineLost(
        f'{self._address.url} cannot be reached: {error}'
      ) from error
    with self._lock:
      self._socket = connection.sock
      if self._reason:
        raise self._refused(self._reason)

  def _exchange(self, connection: http.client.HTTPConnection) -> Any:
    headers = {'Content-Type': 'application/json', 'Connection': 'close'}
    try:
      connection.request(self._method, self._path, self._body, headers)
      response = connection.getresponse()
      data = response.read()
    except TimeoutError as error:
      raise self._refused(self._reason or self._late) from error
    except (OSError, http.client.HTTPException) as error:
      raise self._refused(
        self._reason or f'the answer broke off ({error!r})'
      ) from error
    if self._reason:
      raise self._refused(self._reason)
    text = data.decode('utf-8', errors='replace')
    if response.status != http.client.OK:
      raise self._refused(f'status {response.status}: {errors.shown(text)}')
    if 'json' not in response.headers.get('Content-Type', ''):
      return text
    try:
      return json.loads(text)
    except ValueError as error:
      raise self._refused(
        f'the answer is no JSON ({error}): {errors.shown(text)}'
      ) from error

  def _refused(self, reason: str) -> errors.EngineRefused:
    return errors.EngineRefused(
      f'{self._method} {self._address.url}{self._path}: {reason}'
    )
