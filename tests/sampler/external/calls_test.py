"""One call: its answer, its refusals, its end."""

import contextlib
import socket
import threading

import external_world as world
import pytest

from spopp_jax.sampler import errors
from spopp_jax.sampler.external import calls


@pytest.fixture
def fake():
  with world.running(world.FakeVllm) as server:
    yield server


def call(fake, path='/weight_info', deadline_s=world.WAIT_S):
  return calls.Call(calls.Address(fake.url), 'GET', path, deadline_s=deadline_s)


def hooked(fake, error):
  def hook(_):
    raise error

  fake.hooks['/weight_info'] = hook


@pytest.mark.parametrize(
  'url',
  [
    'localhost:8000',
    'ftp://host:1',
    'http://',
    'http://host:port',
    'http://host:1/v1',
    'http://user@host:1',
  ],
)
def test_what_is_no_address_is_named(url):
  with pytest.raises(ValueError, match='host'):
    calls.Address(url)


def test_json_is_read(fake):
  assert call(fake).run() == {'weight_version': 'default'}


def test_status_and_text_of_a_refusal_are_given(fake):
  hooked(fake, world.Status(503, 'too busy'))
  with pytest.raises(errors.EngineRefused, match='status 503: too busy'):
    call(fake).run()


def test_half_an_answer_is_none(fake):
  hooked(fake, world.HalfAnswer())
  with pytest.raises(errors.EngineRefused, match='broke off'):
    call(fake).run()


def test_what_is_no_json_is_refused(fake):
  fake.hooks['/weight_info'] = lambda _: float('nan')
  assert call(fake).run() != call(fake).run()  # NaN is read
  with socket.create_server(('127.0.0.1', 0)) as listener:
    url = f'http://127.0.0.1:{listener.getsockname()[1]}'

    def answer():
      connection, _ = listener.accept()
      with connection:
        connection.recv(4096)
        connection.sendall(
          b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"a": '
        )

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(errors.EngineRefused, match='is no JSON'):
      calls.Call(calls.Address(url), 'GET', '/', deadline_s=world.WAIT_S).run()
    thread.join(world.WAIT_S)


def test_a_late_answer_is_none(fake):
  hooked(fake, world.Silence())
  with pytest.raises(errors.EngineRefused, match=r'no answer within 0\.1 s'):
    call(fake, deadline_s=0.1).run()


def test_a_server_that_dribbles_ends_at_the_deadline():
  with socket.create_server(('127.0.0.1', 0)) as listener:
    ended = threading.Event()

    def dribble():
      connection, _ = listener.accept()
      with connection, contextlib.suppress(OSError):
        connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n')
        while not ended.wait(0.02):
          connection.sendall(b' ')

    thread = threading.Thread(target=dribble)
    thread.start()
    url = f'http://127.0.0.1:{listener.getsockname()[1]}'
    late = calls.Call(calls.Address(url), 'GET', '/', deadline_s=0.3)
    with pytest.raises(errors.EngineRefused, match=r'no answer within 0\.3 s'):
      late.run()
    ended.set()
    thread.join(world.WAIT_S)


def test_cancelling_ends_the_call_and_the_server_sees_it(fake):
  hooked(fake, world.Silence())
  waiting = call(fake)
  failures = []

  def run():
    with pytest.raises(errors.EngineRefused, match='cancelled') as caught:
      waiting.run()
    failures.append(caught.value)

  thread = threading.Thread(target=run)
  thread.start()
  world.wait_until(lambda: fake.asked)
  waiting.cancel()
  thread.join(world.WAIT_S)
  assert failures
  world.wait_until(lambda: fake.abandoned == ['/weight_info'])


def test_a_call_that_was_cancelled_before_it_ran_asks_nothing(fake):
  early = call(fake)
  early.cancel()
  with pytest.raises(errors.EngineRefused, match='cancelled'):
    early.run()
  assert not fake.asked


def test_a_server_that_is_not_there_is_lost():
  with socket.create_server(('127.0.0.1', 0)) as listener:
    url = f'http://127.0.0.1:{listener.getsockname()[1]}'
  with pytest.raises(errors.EngineLost, match='cannot be reached'):
    calls.Call(calls.Address(url), 'GET', '/', deadline_s=1.0).run()
