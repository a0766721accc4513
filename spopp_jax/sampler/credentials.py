"""Who may talk to whom: mutual TLS, a bearer token, and where they are needed.

Inside a machine a channel needs neither. To another machine it needs TLS with
certificates at both ends; the token may be asked for on top, or alone inside a
machine that others use too.
"""

import dataclasses
import hmac
import ipaddress
import logging
import pathlib
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from spopp_jax.sampler import errors

_LAST_PORT = 65535
_LOG = logging.getLogger(__name__)
_HEADER = 'authorization'
# Probes cannot send a token, and the answer tells only whether we serve.
_OPEN_PREFIX = '/grpc.health.v1.Health/'
_MIN_TOKEN_CHARACTERS = 16
_SETTINGS = (
  'sampler.tls_ca, sampler.tls_certificate and sampler.tls_key at the runner, '
  '--tls_ca, --tls_certificate and --tls_key at serve_sampler.py'
)
# What gRPC says of a TLS handshake that cannot end well, and what to do.
_MISFITS = {
  'CERTIFICATE_VERIFY_FAILED': (
    "the service's certificate must be signed by this end's CA and valid now; "
    'give both ends certificates of one CA and renew one that has expired '
    f'({_SETTINGS})'
  ),
  'Hostname Verification Check failed': (
    "the service's certificate must name this address as a subjectAltName; "
    'make it again with IP:... or DNS:..., or use a name that it has'
  ),
  'WRONG_VERSION_NUMBER': (
    'the service speaks without TLS; start it with --tls_ca, '
    '--tls_certificate and --tls_key, or name none of them here'
  ),
}
# All that a caller sees of a service that refuses its certificate.
_CLOSED = ('Socket closed', 'Connection reset', 'Broken pipe')


@dataclasses.dataclass(frozen=True)
class Credentials:
  """The files of one end, read whenever a channel or a service is opened.

  Attributes:
    ca: PEM of the authority that signed the other end's certificate.
    certificate: PEM of this end's certificate, with those between it and the
      authority.
    key: PEM of its private key, not encrypted.
    token: file with the bearer token in its one line.
  """

  ca: str = ''
  certificate: str = ''
  key: str = ''
  token: str = ''

  def __post_init__(self):
    if len({bool(self.ca), bool(self.certificate), bool(self.key)}) > 1:
      raise ValueError(
        f'ca ({self.ca!r}), certificate ({self.certificate!r}) and key '
        f'({self.key!r}) of TLS belong together; name all three or none'
      )

  def open_channel(
    self, address: str, arguments: Sequence[tuple[str, int]]
  ) -> grpc.Channel:
    """Returns a channel with TLS and token as far as they are named.

    Raises:
      CredentialsUnusable: a file is missing or not what it should be.
    """
    if self.ca:
      ca, chain, key = self._tls_files()
      channel = grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(ca, key, chain),
        options=arguments,
      )
    else:
      channel = grpc.insecure_channel(address, options=arguments)
    if self.token:
      sender = _TokenSender(_read_token(self.token))
      channel = grpc.intercept_channel(channel, sender)
    return channel

  def interceptors(self) -> list[grpc.ServerInterceptor]:
    """Returns what a server must ask every call for.

    Raises:
      CredentialsUnusable: the token file is missing or holds no token.
    """
    return [_TokenCheck(_read_token(self.token))] if self.token else []

  def listen(self, server: grpc.Server, address: str) -> int:
    """Adds a port, with TLS if that is named; returns its number.

    Raises:
      CredentialsUnusable: a file is missing or not what it should be.
      RuntimeError: the address is taken.
    """
    if not self.ca:
      return server.add_insecure_port(address)
    ca, chain, key = self._tls_files()
    return server.add_secure_port(
      address,
      grpc.ssl_server_credentials(
        [(key, chain)], root_certificates=ca, require_client_auth=True
      ),
    )

  def _tls_files(self) -> tuple[bytes, bytes, bytes]:
    """Returns CA, certificate and key; gRPC itself says nothing of bad ones."""
    files = tuple(
      _read(name, path)
      for name, path in (
        ('ca', self.ca),
        ('certificate', self.certificate),
        ('key', self.key),
      )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
      context.load_verify_locations(self.ca)
    except ssl.SSLError as error:
      raise errors.CredentialsUnusable(
        f'ca ({self.ca}) must hold a certificate in PEM: {error}'
      ) from None
    try:
      # Without a password of ours openssl would ask at the terminal.
      context.load_cert_chain(self.certificate, self.key, lambda: '')
    except ssl.SSLError as error:
      raise errors.CredentialsUnusable(
        f'certificate ({self.certificate}) and key ({self.key}) must be a pair '
        f'in PEM, the key not encrypted: {error}'
      ) from None
    return files[0], files[1], files[2]


NONE = Credentials()


def check_address(
  address: str,
  credentials: Credentials = NONE,
  allow_insecure: bool = False,
) -> None:
  """Refuses what would cross a network unprotected, or logs that it will.

  Args:
    address: 'host:port' or 'unix:path'; one of this machine is always right.
    credentials: those that the channel will have.
    allow_insecure: True takes another machine without TLS, with a warning.

  Raises:
    ValueError: no address; another machine without TLS, unless allowed; a
      token that would cross the network in the clear.
  """
  if _is_local(address) or credentials.ca:
    return
  if not allow_insecure:
    raise ValueError(
      f'address ({address!r}) is not of this machine and the sampler speaks '
      f'without TLS; give both ends certificates ({_SETTINGS}), or use '
      '127.0.0.1:port, [::1]:port or unix:path with a tunnel (ssh -L), or '
      'allow it by name (sampler.allow_insecure, --allow_insecure)'
    )
  if credentials.token:
    raise ValueError(
      f'address ({address!r}) is not of this machine and the token would go '
      f'there in the clear; give both ends certificates ({_SETTINGS}), or name '
      'no token file'
    )
  _LOG.warning(
    'INSECURE: %s is not of this machine and nothing protects it: whoever '
    'reaches it can read and replace rollouts and parameters; allowed by '
    'allow_insecure',
    address,
  )


def misfit(code: grpc.StatusCode, details: str) -> str:
  """Returns what to do when no later try can succeed, else ''."""
  if code == grpc.StatusCode.UNAUTHENTICATED:
    return (
      'give both ends the same token file (sampler.token_file at the runner, '
      '--token_file at serve_sampler.py)'
    )
  if code != grpc.StatusCode.UNAVAILABLE:
    return ''
  return next((do for text, do in _MISFITS.items() if text in details), '')


def suspicion(code: grpc.StatusCode, details: str) -> str:
  """Returns what else to look at when a service closes connections, else ''."""
  closed = any(text in details for text in _CLOSED)
  if code != grpc.StatusCode.UNAVAILABLE or not closed:
    return ''
  return (
    'if it runs, it asks for TLS and this end has no TLS, no certificate, or '
    f'one that its CA did not sign or that has expired ({_SETTINGS})'
  )


def _is_local(address: str) -> bool:
  """Says whether an address stays on this machine."""
  if address.startswith('unix:'):
    return True
  host, separator, port = address.rpartition(':')
  host = host.strip('[]')
  if not separator or not port.isdecimal() or int(port) > _LAST_PORT:
    raise ValueError(
      f'address ({address!r}) must be host:port or unix:path with a port up to '
      f'{_LAST_PORT}, for example 127.0.0.1:50051'
    )
  if host == 'localhost':
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def _read(name: str, path: str) -> bytes:
  try:
    return pathlib.Path(path).read_bytes()
  except OSError as error:
    raise errors.CredentialsUnusable(
      f'{name} ({path}) cannot be read: {error.strerror}; name a file that '
      'this process may read'
    ) from None


def _read_token(path: str) -> str:
  """Returns the token; errors name the file alone."""
  token = _read('token', path).strip()
  # Another character would make gRPC quote the token in an error.
  printable = all(0x21 <= byte <= 0x7E for byte in token)
  if len(token) < _MIN_TOKEN_CHARACTERS or not printable:
    raise errors.CredentialsUnusable(
      f'token ({path}) must be a file with one line of at least '
      f'{_MIN_TOKEN_CHARACTERS} printable ASCII characters without blanks; '
      'openssl rand -hex 32 makes one'
    )
  return token.decode('ascii')


class _TokenSender(
  grpc.UnaryUnaryClientInterceptor,
  grpc.StreamUnaryClientInterceptor,
  grpc.StreamStreamClientInterceptor,
):
  """Adds the token to every call; gRPC's own way refuses plain channels."""

  def __init__(self, token: str):
    self._header = (_HEADER, f'Bearer {token}')

  def _send(self, continuation: Any, details: Any, request: Any) -> Any:
    metadata = [*(details.metadata or ()), self._header]
    return continuation(_Details(details, metadata), request)

  intercept_unary_unary = _send
  intercept_stream_unary = _send
  intercept_stream_stream = _send


class _Details(grpc.ClientCallDetails):
  """A call's details with other metadata."""

  def __init__(self, details: Any, metadata: list[tuple[str, str]]):
    self.method = details.method
    self.timeout = details.timeout
    self.metadata = metadata
    self.credentials = details.credentials
    self.wait_for_ready = details.wait_for_ready
    self.compression = details.compression


class _TokenCheck(grpc.ServerInterceptor):
  """Ends every call without the token, before any of it is read."""

  def __init__(self, token: str):
    self._expected = f'Bearer {token}'.encode()

  def intercept_service(
    self, continuation: Callable[[Any], Any], handler_call_details: Any
  ) -> Any:
    values = [
      value
      for name, value in handler_call_details.invocation_metadata
      if name == _HEADER
    ]
    given = values[0].encode() if len(values) == 1 else b''
    fits = hmac.compare_digest(given, self._expected)
    if fits or handler_call_details.method.startswith(_OPEN_PREFIX):
      return continuation(handler_call_details)
    # On the wire every kind of call is a stream each way.
    return grpc.stream_stream_rpc_method_handler(_refuse)


def _refuse(messages: Any, context: Any) -> Any:
  del messages
  _LOG.warning('refused a call from %s without the token', context.peer())
  context.abort(
    grpc.StatusCode.UNAUTHENTICATED,
    'the call has no token, or not that of this service',
  )
