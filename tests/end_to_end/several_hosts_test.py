"""One learner on several hosts, each a process with a device of its own."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny_world

from spopp_jax.models import policy_files
from spopp_jax.runner import metrics

SCRIPT = pathlib.Path(__file__).with_name('several_hosts.py')
WAIT_S = 120.0


@pytest.fixture
def policy(tmp_path):
  policy_files.save(
    tmp_path / 'policy', tiny_world.random_policy(tiny_world.load(tmp_path))
  )
  return tmp_path / 'policy'


@pytest.fixture
def begin(tmp_path, policy):
  """Starts the hosts of a run; they are ended with the test."""
  processes = []

  def started(count, *settings, devices=1):
    with socket.create_server(('127.0.0.1', 0)) as probe:
      port = probe.getsockname()[1]
    hosts = [
      subprocess.Popen(
        [
          *(sys.executable, SCRIPT, tmp_path, policy),
          *(f'hosts.count={count}', f'hosts.index={index}'),
          f'hosts.coordinator=127.0.0.1:{port}',
          *settings,
        ],
        env={
          **os.environ,
          'PYTHONPATH': f'{tiny_world.ROOT}{os.pathsep}{tiny_world.HERE}',
          'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
          'JAX_PLATFORMS': 'cpu',
          'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
      for index in range(count)
    ]
    processes.extend(hosts)
    return hosts

  yield started
  for process in processes:
    process.kill()
    process.communicate()


def end(process, code=0):
  """Waits for a host; returns its last line and all that it complained of."""
  out, err = process.communicate(timeout=WAIT_S)
  assert process.returncode == code, (process.returncode, out, err)
  return (out.splitlines() or [''])[-1], err


def recorded_steps(directory):
  return [r['step'] for r in metrics.read_metrics(directory / 'runs/unnamed')]


def wait_for_step(directory, step, process):
  deadline = time.monotonic() + WAIT_S
  path = directory / 'runs/unnamed/metrics.jsonl'
  while not path.exists() or len(path.read_text().splitlines()) <= step:
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.05)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
  'mesh',
  [
    (),
    # No host holds all of the state that it publishes and saves.
    pytest.param(('mesh.data=1', 'mesh.fsdp=2'), marks=pytest.mark.slow),
    pytest.param(('mesh.data=1', 'mesh.tensor=2'), marks=pytest.mark.slow),
  ],
)
def test_two_hosts_learn_what_two_devices_of_one_learn(tmp_path, begin, mesh):
  assert [end(host)[0] for host in begin(2, *mesh)] == ['4', '4']
  (tmp_path / 'runs').rename(tmp_path / 'of-two-hosts')
  (alone,) = begin(1, devices=2)
  assert end(alone)[0] == '4'
  theirs, ours = (np.load(tmp_path / f'{n}.npz') for n in (1, 2))
  start = policy_files.load(tmp_path / 'policy').params
  for name, value in theirs.items():
    np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-5)
  # They did learn: the comparison is of something.
  assert max(np.abs(theirs[k] - start[k]).max() for k in start) > 1e-2
  if mesh:  # and what they saved goes on, cut in the same way
    (tmp_path / 'runs').rename(tmp_path / 'of-one-host')
    (tmp_path / 'of-two-hosts').rename(tmp_path / 'runs')
    again = begin(2, *mesh, 'run.steps=5', 'run.resume=True')
    assert [end(host)[0] for host in again] == ['5', '1']


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_signal_to_any_host_saves_the_run_and_it_goes_on(tmp_path, begin):
  lead, other = begin(2, 'run.steps=1000')
  wait_for_step(tmp_path, 3, lead)
  other.send_signal(signal.SIGTERM)
  words, _ = end(lead)
  assert 'stopped by SIGTERM of host 1 after ' in words
  assert '--config.run.resume=True' in words
  done = recorded_steps(tmp_path)
  assert done == list(range(len(done)))
  assert end(other)[0] == str(len(done))
  more = len(done) + 2
  again = begin(2, f'run.steps={more}', 'run.resume=True')
  assert [end(host)[0] for host in again] == [str(more), '2']
  assert recorded_steps(tmp_path) == list(range(more))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize('stands_still_s', [0, 5])
def test_a_run_outlives_the_loss_of_any_host(tmp_path, begin, stands_still_s):
  done = 0
  for victim in (1, 0):
    hosts = begin(2, 'run.steps=1000', f'run.resume={done > 0}')
    wait_for_step(tmp_path, done + 3, hosts[0])
    if stands_still_s:  # so that the other one waits for it in a computation
      hosts[victim].send_signal(signal.SIGSTOP)
      time.sleep(stands_still_s)
    hosts[victim].kill()
    left = hosts[1 - victim]
    _, words = left.communicate(timeout=WAIT_S)
    assert left.returncode == 1
    assert 'run.resume=True' in words
    done = len(recorded_steps(tmp_path))
  again = begin(2, f'run.steps={done + 2}', 'run.resume=True')
  assert end(again[0])[0] == str(done + 2)
  end(again[1])
  assert recorded_steps(tmp_path) == list(range(done + 2))
