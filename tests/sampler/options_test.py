"""Addresses, sizes and keepalive."""

import pytest

from spopp_jax.sampler import options


@pytest.mark.parametrize(
  'address',
  ['127.0.0.1:0', 'localhost:50051', '[::1]:7', '127.9.9.9:1', 'unix:/tmp/s'],
)
def test_addresses_of_this_machine_are_taken(address):
  options.check_address(address)


@pytest.mark.parametrize(
  'address', ['0.0.0.0:1', '10.0.0.3:50051', 'sampler.example:1', '[::]:1']
)
def test_addresses_that_leave_the_machine_are_refused(address):
  with pytest.raises(ValueError, match='without TLS') as caught:
    options.check_address(address)
  assert address in str(caught.value)


@pytest.mark.parametrize('address', ['', '127.0.0.1', '127.0.0.1:', 'x:y'])
def test_other_words_are_no_addresses(address):
  with pytest.raises(ValueError, match='must be host:port or unix:path'):
    options.check_address(address)


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
