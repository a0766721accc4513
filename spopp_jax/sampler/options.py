"""Size and keepalive rules that both ends of a channel share."""

import dataclasses

# Covers every field of a Trajectory but the arrays, in bytes.
_ENVELOPE_BYTES = 4096
_BYTES_PER_TOKEN = 4 + 1 + 4


@dataclasses.dataclass(frozen=True)
class ChannelLimits:
  """Limits that must be equal at both ends; the handshake compares them.

  Attributes:
    max_message_bytes: largest message in either direction.
    keepalive_time_ms: silence after which the client pings the service.
    keepalive_timeout_ms: wait for the answer before the peer counts as dead.
  """

  max_message_bytes: int = 16 * 2**20
  keepalive_time_ms: int = 10_000
  keepalive_timeout_ms: int = 20_000

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      if value < 1:
        raise ValueError(f'{name} ({value}) must be at least 1')

  def client_options(self) -> list[tuple[str, int]]:
    """Returns the channel arguments of a client."""
    return [
      *self._shared_options(),
      ('grpc.keepalive_permit_without_calls', 1),
      ('grpc.http2.max_pings_without_data', 0),
      ('grpc.initial_reconnect_backoff_ms', 200),
      # Despite its name the least patience with one attempt to connect: TLS
      # to a busy machine takes its time.
      ('grpc.min_reconnect_backoff_ms', 5_000),
      ('grpc.max_reconnect_backoff_ms', 1_000),
      # Without its own pool a new channel inherits the back-off of a lost one.
      ('grpc.use_local_subchannel_pool', 1),
      ('grpc.enable_http_proxy', 0),
    ]

  def server_options(self) -> list[tuple[str, int]]:
    """Returns the channel arguments of a server."""
    return [
      *self._shared_options(),
      ('grpc.keepalive_permit_without_calls', 1),
      # A server closes connections that ping more often than this; half of
      # the agreed time leaves room for jitter.
      (
        'grpc.http2.min_ping_interval_without_data_ms',
        self.keepalive_time_ms // 2,
      ),
      # Two servers on one port would share it silently.
      ('grpc.so_reuseport', 0),
    ]

  def _shared_options(self) -> list[tuple[str, int]]:
    return [
      ('grpc.max_send_message_length', self.max_message_bytes),
      ('grpc.max_receive_message_length', self.max_message_bytes),
      ('grpc.keepalive_time_ms', self.keepalive_time_ms),
      ('grpc.keepalive_timeout_ms', self.keepalive_timeout_ms),
      # A ping has a timeout of its own, by default a minute, and a peer that
      # is stopped rather than dead runs into that one.
      ('grpc.http2.ping_timeout_ms', self.keepalive_timeout_ms),
    ]


def trajectory_bytes(num_tokens: int) -> int:
  """Returns the most bytes that a trajectory of `num_tokens` can take.

  Kept sets are not counted: their size is known only once they are there.
  """
  return _ENVELOPE_BYTES + _BYTES_PER_TOKEN * num_tokens
