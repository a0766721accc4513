"""TLS and the token over real sockets; every refusal says what to do."""

import logging
import pathlib
import socket
import threading

import grpc
import pytest
import scripted
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spopp_jax import types
from spopp_jax.sampler import (
  client,
  connection,
  credentials,
  errors,
  handshake,
  options,
  sampler_pb2,
  sampler_pb2_grpc,
)

FILES = pathlib.Path(__file__).parent / 'certificates'
TOKEN = 'correct-horse-battery-staple'
ANOTHER = 'incorrect-horse-battery-staple'
# A port where nobody listens: connecting must not get that far.
ELSEWHERE = '10.1.2.3:50051'
BRIEFLY_S = 0.7


def tls(name, ca='ca', token=''):
  """Returns the credentials of one end, of files in certificates/."""
  return credentials.Credentials(
    *(
      str(FILES / file) for file in (f'{ca}.pem', f'{name}.pem', f'{name}.key')
    ),
    str(token),
  )


SERVER, CLIENT = tls('server'), tls('client')


@pytest.fixture(autouse=True)
def log(caplog):
  caplog.set_level(logging.DEBUG)
  return caplog


@pytest.fixture
def token_file(tmp_path):
  """Returns a function that writes a token to a file of its own."""

  def write(token=TOKEN):
    path = tmp_path / f'{len(list(tmp_path.iterdir()))}.token'
    path.write_bytes(token.encode() + b'\n')
    return str(path)

  return write


def only_token(path):
  return credentials.Credentials(token=path)


def play(server, own, **kwargs):
  """Publishes and plays an episode: every rpc with something to say."""
  with scripted.connected(server, own=own, **kwargs) as sampler:
    checksum = sampler.publish(scripted.params(0.25), 1)
    sampler.submit([scripted.request(1, version=1)])
    (trajectory,) = scripted.collect(sampler, 1)
    assert trajectory.status == types.Status.OK
    assert trajectory.weights_checksum == checksum
    sampler.reconnect(scripted.CALL_S)


def refusal(server_own, client_own, kind):
  """Returns what is said to a client that a service does not fit."""
  with (
    scripted.serving(own=server_own) as server,
    pytest.raises(kind) as caught,
    scripted.connected(server, own=client_own, connect_deadline_s=BRIEFLY_S),
  ):
    pass
  assert caught.type is kind
  assert server.address in str(caught.value)
  return str(caught.value)


def everything_said(caught, log):
  """Returns the error with its causes, and the log."""
  said, error = [log.text], caught.value
  while error is not None:
    said += [str(error), repr(error)]
    error = error.__cause__ or error.__context__
  return '\n'.join(said)


@pytest.mark.parametrize('transport', ['auto', 'grpc'])
def test_both_ends_with_certificates_of_one_authority(transport):
  with scripted.serving(own=SERVER) as server:
    play(server, CLIENT, transport=transport)


def test_certificates_and_token_together(token_file, log):
  path = token_file()
  with scripted.serving(own=tls('server', token=path)) as server:
    play(server, tls('client', token=path))
  assert TOKEN not in log.text


def test_a_token_alone_inside_the_machine(token_file, log, tmp_path):
  own = only_token(token_file())
  for address in ('127.0.0.1:0', f'unix:{tmp_path}/socket'):
    with scripted.serving(own=own, address=address) as server:
      play(server, own)
  assert TOKEN not in log.text


def test_the_service_must_be_signed_by_the_ca_of_the_client():
  said = refusal(
    SERVER, tls('client', ca='foreign_ca'), errors.HandshakeRefused
  )
  assert "must be signed by this end's CA" in said
  assert 'sampler.tls_ca' in said
  assert '--tls_certificate' in said


def test_the_certificate_of_the_service_must_be_valid_now():
  said = refusal(tls('expired'), CLIENT, errors.HandshakeRefused)
  assert 'has expired' in said
  assert 'renew' in said


def test_the_certificate_of_the_service_must_name_its_address():
  said = refusal(tls('elsewhere'), CLIENT, errors.HandshakeRefused)
  assert 'subjectAltName' in said


def test_a_service_without_tls_is_told_apart():
  said = refusal(credentials.NONE, CLIENT, errors.HandshakeRefused)
  assert 'the service speaks without TLS; start it with --tls_ca' in said


@pytest.mark.parametrize(
  'own', [tls('foreign_client'), credentials.NONE, tls('expired')]
)
def test_a_client_that_the_service_does_not_trust(own):
  said = refusal(SERVER, own, errors.SamplerLost)
  assert 'start a sampler there' in said
  for cause in ('no TLS', 'no certificate', 'did not sign', 'expired'):
    assert cause in said


def test_a_client_without_a_certificate():
  ca = (FILES / 'ca.pem').read_bytes()
  with (
    scripted.serving(own=SERVER) as server,
    grpc.secure_channel(
      server.address, grpc.ssl_channel_credentials(ca)
    ) as channel,
    pytest.raises(grpc.RpcError) as caught,
  ):
    sampler_pb2_grpc.SamplerStub(channel).Handshake(
      handshake.request(options.ChannelLimits(), scripted.SESSION),
      timeout=scripted.CALL_S,
    )
  said = credentials.suspicion(caught.value.code(), caught.value.details())
  assert 'no certificate' in said


@pytest.mark.parametrize(
  'server_own, client_own',
  [
    (tls('expired'), CLIENT),
    (tls('elsewhere'), CLIENT),
    (credentials.NONE, CLIENT),
  ],
)
def test_what_cannot_get_better_is_not_tried_again(
  server_own, client_own, monkeypatch
):
  # Whoever pauses before a second try fails at that.
  monkeypatch.setattr(client, '_PAUSE_S', -1.0)
  refusal(server_own, client_own, errors.HandshakeRefused)


def test_the_reason_outlives_a_try_that_is_never_answered():
  with socket.create_server(('127.0.0.1', 0)) as listener:
    # The first connection is closed, the next is never answered.
    thread = threading.Thread(target=lambda: listener.accept()[0].close())
    thread.start()
    with pytest.raises(errors.SamplerLost, match='it asks for TLS'):
      client.SamplerClient(
        f'127.0.0.1:{listener.getsockname()[1]}',
        scripted.EXPECTED,
        connect_deadline_s=BRIEFLY_S,
      )
    thread.join(scripted.CALL_S)


def test_nobody_there_does_not_read_like_credentials():
  with pytest.raises(errors.SamplerLost, match='start a sampler') as caught:
    client.SamplerClient(
      '127.0.0.1:1', scripted.EXPECTED, own=CLIENT, connect_deadline_s=0.3
    )
  assert 'tls' not in str(caught.value).lower()
  assert 'refused' in str(caught.value)


@pytest.mark.parametrize('wrong', [ANOTHER, TOKEN[:-1], TOKEN + 'x', ''])
@pytest.mark.parametrize('with_tls', [False, True])
def test_the_token_must_be_that_of_the_service(
  token_file, log, wrong, with_tls
):
  theirs, ours = token_file(), wrong and token_file(wrong)
  ends = tls('server', token=theirs), tls('client', token=ours)
  if not with_tls:
    ends = only_token(theirs), only_token(ours)
  with (
    scripted.serving(own=ends[0]) as server,
    pytest.raises(errors.HandshakeRefused) as caught,
    scripted.connected(server, own=ends[1], connect_deadline_s=scripted.CALL_S),
  ):
    pass
  assert 'UNAUTHENTICATED' in str(caught.value)
  assert 'same token file (sampler.token_file' in str(caught.value)
  said = everything_said(caught, log)
  assert 'without the token' in log.text
  assert TOKEN not in said
  assert not wrong or wrong not in said


def test_no_rpc_but_health_goes_without_the_token(token_file):
  with (
    scripted.serving(own=only_token(token_file())) as server,
    grpc.insecure_channel(server.address) as channel,
  ):
    stub = sampler_pb2_grpc.SamplerStub(channel)
    health = health_pb2_grpc.HealthStub(channel).Check(
      health_pb2.HealthCheckRequest(), timeout=scripted.CALL_S
    )
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    calls = {
      'Handshake': lambda **k: stub.Handshake(
        handshake.request(options.ChannelLimits(), scripted.SESSION), **k
      ),
      'Rollout': lambda **k: list(stub.Rollout(iter([scripted.OPENING]), **k)),
      'Publish': lambda **k: stub.Publish(scripted.publication(b'1' * 20), **k),
      'Resume': lambda **k: stub.Resume(sampler_pb2.ResumeRequest(), **k),
      'Activate': lambda **k: stub.Activate(sampler_pb2.ActivateRequest(), **k),
    }
    service = sampler_pb2.DESCRIPTOR.services_by_name['Sampler']
    assert set(calls) == set(service.methods_by_name)
    for twice in (f'Bearer {TOKEN}', TOKEN), (f'Bearer {TOKEN}',) * 2, ():
      metadata = [('authorization', value) for value in twice]
      for call in calls.values():
        with pytest.raises(grpc.RpcError) as caught:
          call(metadata=metadata, timeout=scripted.CALL_S)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    # Nothing above has opened a session.
    assert stub.Handshake(
      handshake.request(options.ChannelLimits(), 'ab' * 16),
      metadata=[('authorization', f'Bearer {TOKEN}')],
      timeout=scripted.CALL_S,
    )


def test_a_stream_without_the_token_ends_saying_so(token_file):
  arrivals = []
  with scripted.serving(own=only_token(token_file())) as server:
    raw = connection.Connection(
      server.address,
      options.ChannelLimits(),
      arrivals.append,
      only_token(token_file(ANOTHER)),
    )
    raw.open_stream(scripted.SESSION)
    scripted.wait_until(lambda: arrivals)
    raw.close()
  assert arrivals[0].code == grpc.StatusCode.UNAUTHENTICATED
  assert ANOTHER not in arrivals[0].reason


def test_a_new_token_is_read_at_the_next_connection(token_file):
  path = token_file()
  own = only_token(path)
  with scripted.serving(own=own) as old:
    sampler = client.SamplerClient(old.address, scripted.EXPECTED, own=own)
  pathlib.Path(path).write_text(ANOTHER)
  with scripted.serving(own=own) as new:
    sampler.reconnect(scripted.CALL_S, new.address, new_session=True)
    sampler.close()


@pytest.mark.parametrize(
  'address', ['0.0.0.0:0', '[::]:0', 'sampler.example:1']
)
@pytest.mark.parametrize('token', ['', 'token'])
def test_another_machine_is_refused_without_tls(address, token, token_file):
  own = only_token(token and token_file())
  for open_it in (
    lambda: scripted.serving(own=own, address=address).__enter__(),
    lambda: client.SamplerClient(address, scripted.EXPECTED, own=own),
  ):
    with pytest.raises(ValueError, match='without TLS') as caught:
      open_it()
    for word in (address, 'sampler.tls_ca', '--tls_key', '--allow_insecure'):
      assert word in str(caught.value)


def test_another_machine_is_taken_with_tls(log):
  with scripted.serving(own=SERVER, address='0.0.0.0:0') as server:
    host, port = server.address.split(':')
    assert host == '0.0.0.0'
    server.address = f'127.0.0.1:{port}'
    play(server, CLIENT)
  credentials.check_address(ELSEWHERE, CLIENT)
  assert 'INSECURE' not in log.text


def test_another_machine_is_taken_without_tls_by_name_alone(log):
  with scripted.serving(allow_insecure=True, address='0.0.0.0:0') as server:
    (warning,) = (r for r in log.records if 'INSECURE' in r.message)
    assert warning.levelno == logging.WARNING
    assert warning.message.startswith('INSECURE: 0.0.0.0:0 ')
    # The name 0.0.0.0 is no loopback address, though it leads here.
    play(server, credentials.NONE, allow_insecure=True)
  assert log.text.count('INSECURE') == 2


def test_this_machine_needs_no_warning(log):
  for address in ('127.0.0.1:1', '[::1]:1', 'localhost:1', 'unix:/tmp/s'):
    credentials.check_address(address, allow_insecure=True)
  assert 'INSECURE' not in log.text


def test_no_token_goes_to_another_machine_in_the_clear(token_file):
  own = only_token(token_file())
  with pytest.raises(ValueError, match='in the clear; give both ends'):
    credentials.check_address(ELSEWHERE, own, allow_insecure=True)
  credentials.check_address(ELSEWHERE, tls('client', token=own.token), True)


@pytest.mark.parametrize('kept', [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_the_files_of_tls_belong_together(kept):
  with pytest.raises(ValueError, match='all three or none'):
    credentials.Credentials(*('x' if i in kept else '' for i in range(3)))


@pytest.mark.parametrize(
  'name, number', [('ca', 0), ('certificate', 1), ('key', 2), ('token', 3)]
)
def test_a_file_that_is_not_there_is_named(name, number, token_file, tmp_path):
  files = [FILES / 'ca.pem', FILES / 'server.pem', FILES / 'server.key']
  files = [*map(str, files), token_file()]
  files[number] = str(tmp_path / 'nowhere')
  own = credentials.Credentials(*files)
  for open_it in (
    lambda: scripted.serving(own=own).__enter__(),
    lambda: client.SamplerClient('127.0.0.1:1', scripted.EXPECTED, own=own),
  ):
    with pytest.raises(
      errors.CredentialsUnusable, match=rf'{name} \(.*nowhere\) cannot be read'
    ):
      open_it()


def test_files_that_are_no_certificates_are_named(tmp_path):
  (tmp_path / 'junk').write_text('junk')
  junk = str(tmp_path / 'junk')
  pem, key = SERVER.certificate, SERVER.key
  for own, says in (
    (credentials.Credentials(junk, pem, key), r'ca \(.*junk\) must hold'),
    (credentials.Credentials(SERVER.ca, junk, key), 'must be a pair'),
    (credentials.Credentials(SERVER.ca, pem, CLIENT.key), 'must be a pair'),
  ):
    with (
      pytest.raises(errors.CredentialsUnusable, match=says),
      scripted.serving(own=own),
    ):
      pass


@pytest.mark.parametrize(
  'token',
  ['', 'short', 'two words of one line', 'two\nlines\nof a file', 'ä' * 20],
)
def test_a_file_without_a_token_is_refused_unseen(token, token_file, log):
  own = only_token(token_file(token))
  with (
    pytest.raises(errors.CredentialsUnusable, match='openssl rand') as caught,
    scripted.serving(own=own),
  ):
    pass
  assert own.token in str(caught.value)
  assert not token or token not in everything_said(caught, log)


@pytest.mark.parametrize(
  'address',
  ['127.0.0.1:0', 'localhost:50051', '[::1]:7', '127.9.9.9:1', 'unix:/tmp/s'],
)
def test_addresses_of_this_machine_are_taken(address):
  credentials.check_address(address)


@pytest.mark.parametrize('address', ['', '127.0.0.1', '127.0.0.1:', 'x:y'])
def test_other_words_are_no_addresses(address):
  for own in (credentials.NONE, CLIENT):
    with pytest.raises(ValueError, match='must be host:port or unix:path'):
      credentials.check_address(address, own, allow_insecure=True)
