"""A service in its own process: killed, restarted, orphaned."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import scripted

from spopp_jax import types
from spopp_jax.sampler import (
  client,
  errors,
  lifeline,
  local,
  options,
  weights,
)

OK = types.Status.OK
WAIT_S = 30.0


@contextlib.contextmanager
def local_sampler(tmp_path, expected=scripted.EXPECTED, **flags):
  sampler = local.LocalSampler(
    scripted.command(**flags),
    expected,
    log_path=tmp_path / 'sampler.log',
    ready_deadline_s=WAIT_S,
  )
  try:
    yield sampler
  finally:
    sampler.close()


def is_alive(process_id):
  state = pathlib.Path(f'/proc/{process_id}/stat')
  return state.exists() and state.read_text().split()[2] != 'Z'


def take_until_lost(sampler, answers):
  while True:
    answers.append(sampler.next(WAIT_S))


def wait_until_gone(process_id):
  deadline = time.monotonic() + WAIT_S
  while is_alive(process_id):
    assert time.monotonic() < deadline, f'process {process_id} lives on'
    time.sleep(0.02)


def test_killed_service_is_lost_restarted_and_answers_every_request(tmp_path):
  with local_sampler(tmp_path, step_s=0.02) as sampler:
    checksum = sampler.publish(scripted.params(2.0), 4)
    requests = [
      scripted.request(n, f'win-{1 + n % 5}', version=4) for n in range(12)
    ]
    sampler.submit(requests)
    answers = [sampler.next(WAIT_S) for _ in range(3)]
    before = sampler.process_id
    os.kill(before, signal.SIGKILL)
    with pytest.raises(errors.SamplerLost, match='reconnect and submit'):
      take_until_lost(sampler, answers)
    sampler.reconnect(WAIT_S)
    assert sampler.process_id != before
    # The new process knows nothing of version 4 until it is published again.
    assert sampler.service.active_policy_version == 0
    assert sampler.publish(scripted.params(2.0), 4) == checksum
    answered = {answer.request_id for answer in answers}
    sampler.submit([r for r in requests if r.request_id not in answered])
    while len(answers) < len(requests):
      answers.append(sampler.next(WAIT_S))
    assert sorted(a.request_id for a in answers) == sorted(
      r.request_id for r in requests
    )
    assert {(a.status, a.weights_checksum) for a in answers} == {(OK, checksum)}


def test_service_that_crashes_between_the_phases_has_the_old_version(tmp_path):
  data = weights.to_bytes(scripted.params(1.0))
  with local_sampler(tmp_path) as sampler:
    name = sampler.session_id
    with scripted.raw_stub(sampler.address, name) as stub:
      stub.Publish(scripted.publication(data, name), timeout=WAIT_S)
    os.kill(sampler.process_id, signal.SIGKILL)
    wait_until_gone(sampler.process_id)
    with pytest.raises(errors.SamplerLost):
      sampler.publish(scripted.params(1.0), 1)
    sampler.reconnect(WAIT_S)
    assert sampler.service.active_policy_version == 0
    sampler.submit([scripted.request(1, version=0)])
    assert sampler.next(WAIT_S).status == OK


def test_connection_alone_is_restored_and_close_ends_the_process(tmp_path):
  with local_sampler(tmp_path) as sampler:
    before = sampler.process_id
    sampler.submit([scripted.request(1)])
    sampler.reconnect(WAIT_S)
    assert sampler.process_id == before
    sampler.submit([scripted.request(1)])
    assert sampler.next(WAIT_S).request_id == 'r1'
    assert is_alive(before)
  assert not is_alive(before)


def test_stopped_process_is_noticed_by_keepalive(tmp_path):
  limits = options.ChannelLimits(
    keepalive_time_ms=500, keepalive_timeout_ms=200
  )
  flags = {'keepalive_time_ms': 500, 'keepalive_timeout_ms': 200}
  sampler = local.LocalSampler(
    scripted.command(**flags),
    scripted.EXPECTED,
    log_path=tmp_path / 'sampler.log',
    limits=limits,
  )
  try:
    sampler.submit([scripted.request(1, 'stuck')])
    os.kill(sampler.process_id, signal.SIGSTOP)
    with pytest.raises(errors.SamplerLost):
      sampler.next(WAIT_S)
    # It runs but does not answer: half of the deadline, then a new one.
    before = sampler.process_id
    sampler.reconnect(4.0)
    assert sampler.process_id != before
  finally:
    sampler.close()


@pytest.mark.slow
def test_keepalive_alone_never_ends_an_idle_stream(tmp_path):
  limits = options.ChannelLimits(keepalive_time_ms=1000)
  sampler = local.LocalSampler(
    scripted.command(keepalive_time_ms=1000),
    scripted.EXPECTED,
    log_path=tmp_path / 'sampler.log',
    limits=limits,
  )
  try:
    sampler.submit([scripted.request(1, 'stuck')])
    # A server that finds the pings too many closes the channel after six.
    with pytest.raises(errors.SamplerTimeout):
      sampler.next(10.0)
  finally:
    sampler.close()


def test_process_that_never_gets_ready_shows_its_last_words(tmp_path):
  with (
    pytest.raises(errors.SamplerLost) as caught,
    local_sampler(tmp_path, die='no such policy'),
  ):
    pass
  assert 'ended with code 1' in str(caught.value)
  assert 'no such policy' in str(caught.value)
  assert str(tmp_path / 'sampler.log') in str(caught.value)


def test_process_that_is_not_ready_in_time_is_ended(tmp_path):
  code = 'import time; print("loading", flush=True); time.sleep(100)'
  with pytest.raises(errors.SamplerLost, match=r'not ready within 0\.5 s'):
    local.LocalSampler(
      [sys.executable, '-c', code],
      scripted.EXPECTED,
      log_path=tmp_path / 'sampler.log',
      ready_deadline_s=0.5,
    )


def test_engine_failure_ends_the_process_and_is_explained(tmp_path):
  with local_sampler(tmp_path, fail_after=1) as sampler:
    sampler.submit([scripted.request(1, 'endless')])
    with pytest.raises(errors.SamplerLost, match='accelerator is on fire'):
      sampler.next(WAIT_S)
    wait_until_gone(sampler.process_id)
    sampler.reconnect(WAIT_S)
    assert 'on fire' in (tmp_path / 'sampler.log').read_text()


def test_killed_parent_takes_the_service_with_it(tmp_path):
  code = (
    'import scripted, time\n'
    'from spopp_jax.sampler import local\n'
    'sampler = local.LocalSampler(scripted.command(), scripted.EXPECTED, '
    f'log_path={str(tmp_path / "sampler.log")!r})\n'
    'print(sampler.process_id, flush=True)\n'
    'time.sleep(100)\n'
  )
  here = str(pathlib.Path(__file__).parent)
  paths = [here, os.environ.get('PYTHONPATH', '')]
  parent = subprocess.Popen(
    [sys.executable, '-c', code],
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths)},
  )
  with parent:
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
  wait_until_gone(child)


def test_service_without_a_parent_outlives_its_standard_input():
  environment = {
    k: v for k, v in os.environ.items() if k != lifeline.PARENT_VARIABLE
  }
  process = subprocess.Popen(
    scripted.command(),
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    text=True,
    env=environment,
  )
  with process:
    address = lifeline.parse_ready_line(process.stdout.readline())
    sampler = client.SamplerClient(address, scripted.EXPECTED)
    sampler.submit([scripted.request(1)])
    assert sampler.next(WAIT_S).status == OK
    sampler.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0


def test_ready_line_is_found_among_other_output():
  line = lifeline.ready_line('127.0.0.1:7')
  assert lifeline.parse_ready_line(line + '\n') == '127.0.0.1:7'
  for other in ('loading', '{}', '7', '["sampler_ready"]', ''):
    assert lifeline.parse_ready_line(other) is None
