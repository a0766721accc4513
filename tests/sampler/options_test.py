"""Sizes and keepalive."""

import pytest

from spopp_jax.sampler import options


def test_both_sides_have_the_same_size_and_keepalive():
  limits = options.ChannelLimits(
    max_message_bytes=12345, keepalive_time_ms=4000, keepalive_timeout_ms=300
  )
  for side in (limits.client_options(), limits.server_options()):
    arguments = dict(side)
    assert arguments['grpc.max_send_message_length'] == 12345
    assert arguments['grpc.max_receive_message_length'] == 12345
    assert arguments['grpc.keepalive_time_ms'] == 4000
    assert arguments['grpc.keepalive_timeout_ms'] == 300
  # A client pings every 4000 ms; the server must not call that too often.
  allowed = dict(limits.server_options())[
    'grpc.http2.min_ping_interval_without_data_ms'
  ]
  assert allowed < 4000


def test_sixteen_long_trajectories_exceed_the_default_of_grpc():
  # GRPC-01: 32768 tokens each; here one trajectory is one message.
  size = options.trajectory_bytes(32768)
  assert 16 * size > 4 * 2**20
  assert size <= options.ChannelLimits().max_message_bytes
  assert options.trajectory_bytes(32769) - size == 4 + 1 + 4


@pytest.mark.parametrize(
  'name', ['max_message_bytes', 'keepalive_time_ms', 'keepalive_timeout_ms']
)
def test_limits_must_be_positive(name):
  with pytest.raises(ValueError, match=rf'{name} \(0\) must be at least 1'):
    options.ChannelLimits(**{name: 0})
