"""Real processes over real gRPC: trained, killed, resumed, refused."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny_world

from spopp_jax.models import policy_files
from spopp_jax.runner import metrics

EXPERIMENTS = tiny_world.ROOT / 'experiments'
WAIT_S = 100.0
STEPS = 3
# Of every request in flight (8) a step trains on the first 6.
BATCH, IN_FLIGHT = 6, 8


def command(script, *arguments):
  return [
    sys.executable,
    str(EXPERIMENTS / script),
    f'--config={tiny_world.ROOT / "configs" / "common.py"}',
    *(f'--config.{setting}' for setting in tiny_world.SETTINGS),
    *arguments,
  ]


def environment():
  # Tiny programs run as fast, and compile in half of the time.
  return {
    **os.environ,
    'PYTHONPATH': str(tiny_world.ROOT),
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
  }


@contextlib.contextmanager
def started(folder, script, *arguments):
  """Runs a script in `folder`; whatever happens, it is gone at the end."""
  with (folder / f'{script}.err').open('w') as log:
    process = subprocess.Popen(
      command(script, *arguments),
      cwd=folder,
      env=environment(),
      stdout=subprocess.PIPE,
      stderr=log,
      text=True,
    )
  try:
    yield process
  finally:
    process.kill()
    process.wait(WAIT_S)
    process.stdout.close()


def train(folder, name, *arguments):
  """Trains to the end; returns the exit code and what was said."""
  done = subprocess.run(
    command('train.py', f'--config.run.name={name}', *arguments),
    cwd=folder,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=WAIT_S,
    check=False,
  )
  return done.returncode, done.stdout, done.stderr


def summary(folder, name):
  return json.loads((folder / 'runs' / name / 'summary.json').read_text())


def written_steps(folder, name):
  """Returns the steps recorded so far, also while they are written."""
  path = folder / 'runs' / name / 'metrics.jsonl'
  if not path.exists():
    return []
  lines = path.read_text().splitlines(keepends=True)
  return [json.loads(line)['step'] for line in lines if line.endswith('\n')]


def wait_until(condition, what, process):
  deadline = time.monotonic() + WAIT_S
  while not condition():
    assert process.poll() is None, f'the process ended before {what}'
    assert time.monotonic() < deadline, f'waited in vain for {what}'
    time.sleep(0.02)


def is_alive(process_id):
  try:
    text = pathlib.Path(f'/proc/{process_id}/stat').read_text()
  except OSError:
    return False
  return text.rsplit(')', 1)[1].split()[0] != 'Z'


def sampler_of(process):
  """Returns the id of the service that a training process started."""
  for path in pathlib.Path('/proc').glob('[0-9]*'):
    with contextlib.suppress(OSError):
      parent = int((path / 'stat').read_text().rsplit(')', 1)[1].split()[1])
      if parent == process.pid:
        words = (path / 'cmdline').read_text()
        if 'serve_sampler.py' in words:
          return int(path.name)
  raise AssertionError('the training process has no sampler')


@pytest.fixture(scope='module')
def trained(tmp_path_factory, compiled_programs):
  """A folder with the finished run `first`, made by one command."""
  folder = tmp_path_factory.mktemp('folder')
  (folder / 'runs').mkdir()
  (folder / 'runs' / '.compilation_cache').symlink_to(compiled_programs)
  code, said, errors = train(folder, 'first', f'--config.run.steps={STEPS}')
  assert code == 0, errors
  return folder, said


@pytest.fixture
def folder(trained):
  return trained[0]


@pytest.fixture
def start(folder):
  """The setting that starts from the policy of the run `first`."""
  return f'--config.cold_start.policy={folder}/runs/first/policy'


def test_one_command_makes_everything_it_promises(trained):
  folder, said = trained
  directory = folder / 'runs' / 'first'
  made = summary(folder, 'first')
  assert list(made) == [
    *('seed', 'steps', 'success_before', 'success_after'),
    *('reward_first5', 'reward_last5', 'wall_s'),
    *('trajectories', 'action_tokens'),
  ]
  records = metrics.read_metrics(directory)
  assert [record['step'] for record in records] == list(range(STEPS))
  assert made['seed'] == 0
  assert made['steps'] == STEPS
  assert made['trajectories'] == STEPS * BATCH
  tokens = sum(record['action_tokens'] for record in records)
  assert made['action_tokens'] == tokens > 0
  for name in ('success_before', 'success_after', 'reward_last5'):
    assert 0 <= made[name] <= 1
  assert 0 < made['wall_s'] < WAIT_S
  assert said.count('\n') == 1
  assert said.startswith(f'spopp, {STEPS} steps: success over all tasks ')
  assert 'runs/first' in said
  # The service is a process of its own and has ended with the run.
  log = (directory / 'sampler-0.log').read_text()
  assert log.count('serving at 127.0.0.1:') == 1
  assert 'the service ends' in log


def test_files_of_a_run(trained):
  directory = trained[0] / 'runs' / 'first'
  config = json.loads((directory / 'config.json').read_text())
  assert config['run']['steps'] == STEPS
  assert (directory / 'reward_curve.png').read_bytes()[:8] == (
    b'\x89PNG\r\n\x1a\n'
  )
  assert list((directory / 'tensorboard').glob('events*'))
  assert (directory / 'checkpoints' / str(STEPS)).is_dir()
  texts = sorted((directory / 'transcripts').iterdir())
  assert [path.name for path in texts] == ['1.txt', '2.txt', '3.txt']
  for path in texts:
    text = path.read_text()
    assert text.startswith('task small-put-0-')
    assert f'policy version {STEPS}' in text
    assert 'Your task is to:' in text
    assert '\n> ' in text
  offline = json.loads((directory / 'offline.json').read_text())
  assert len(offline) == 10
  before, after = (
    policy_files.load(directory / name) for name in ('policy', 'trained')
  )
  assert before.config == after.config
  assert before.tokenizer.fingerprint == after.tokenizer.fingerprint
  assert before.params.keys() == after.params.keys()
  assert all(np.isfinite(value).all() for value in after.params.values())


def test_no_sampler_at_the_address_is_one_sentence(folder, start):
  code, said, errors = train(
    folder,
    'nobody',
    start,
    "--config.sampler.addresses=('127.0.0.1:1',)",
    '--config.sampler.connect_timeout_s=0.5',
  )
  assert (code, said) == (1, '')
  for words in ('train.py: error: ', '127.0.0.1:1', '0.5 s', 'start a sampler'):
    assert words in errors
  assert 'Traceback' not in errors


@pytest.mark.parametrize(
  'override, words',
  [
    ('run.stepz=3', "did you mean 'run.steps'?"),
    ('run.steps=1e3', 'run.steps takes a whole number'),
  ],
)
def test_a_refused_setting_leaves_no_trace(tmp_path, override, words):
  code, said, errors = train(tmp_path, 'never', f'--config.{override}')
  assert (code, said) == (2, '')
  assert words in errors
  assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_sampler_is_restored_and_nothing_counts_twice(folder, start):
  steps = 40
  with started(
    folder,
    'train.py',
    start,
    '--config.run.name=restored',
    f'--config.run.steps={steps}',
  ) as process:
    for least in (2, 12):
      wait_until(
        lambda least=least: len(written_steps(folder, 'restored')) > least,
        f'step {least}',
        process,
      )
      os.kill(sampler_of(process), signal.SIGKILL)
    assert process.wait(WAIT_S) == 0
  errors = (folder / 'train.py.err').read_text()
  assert errors.count('lost local-0 with') == 2
  assert summary(folder, 'restored')['trajectories'] == steps * BATCH
  records = metrics.read_metrics(folder / 'runs' / 'restored')
  assert [record['step'] for record in records] == list(range(steps))
  assert {record['trajectories'] for record in records} == {BATCH}
  assert {record['late_trajectories'] for record in records} == {
    IN_FLIGHT - BATCH
  }
  ok = [record['status/ok'] for record in records]
  assert ok == [10 + IN_FLIGHT * (step + 1) for step in range(steps)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_learner_takes_its_sampler_along_and_is_resumed(folder, start):
  settings = (start, '--config.run.checkpoint_every_steps=5')
  with started(
    folder,
    'train.py',
    *settings,
    '--config.run.name=resumed',
    '--config.run.steps=100000',
  ) as process:
    wait_until(
      lambda: len(written_steps(folder, 'resumed')) > 7, 'step 7', process
    )
    sampler = sampler_of(process)
    process.kill()
    process.wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while is_alive(sampler):
      assert time.monotonic() < deadline, 'the sampler lives on'
      time.sleep(0.05)
  checkpoints = folder / 'runs' / 'resumed' / 'checkpoints'
  saved = max(int(path.name) for path in checkpoints.iterdir())
  steps = saved + 4
  code, _, errors = train(
    folder,
    'resumed',
    *settings,
    '--config.run.resume=True',
    f'--config.run.steps={steps}',
  )
  assert code == 0, errors
  assert written_steps(folder, 'resumed') == list(range(steps))
  records = metrics.read_metrics(folder / 'runs' / 'resumed')
  assert [r['attempt'] for r in records] == [1] * saved + [2] * 4
  assert summary(folder, 'resumed')['trajectories'] == steps * BATCH
  ok = [record['status/ok'] for record in records]
  assert ok == [10 + IN_FLIGHT * (step + 1) for step in range(steps)]


def test_sigterm_saves_says_how_to_continue_and_ends_well(folder, start):
  with started(
    folder,
    'train.py',
    start,
    '--config.run.name=preempted',
    '--config.run.steps=100000',
    '--config.run.checkpoint_every_steps=100000',
  ) as process:
    wait_until(
      lambda: len(written_steps(folder, 'preempted')) > 2, 'step 2', process
    )
    process.terminate()
    assert process.wait(WAIT_S) == 0
    said = process.stdout.read()
  done = len(written_steps(folder, 'preempted'))
  for words in (
    f'stopped by SIGTERM after {done} of 100000 steps',
    'runs/preempted',
    '--config.run.name=preempted --config.run.resume=True',
  ):
    assert words in said
  code, _, errors = train(
    folder,
    'preempted',
    start,
    '--config.run.resume=True',
    f'--config.run.steps={done + 2}',
  )
  assert code == 0, errors
  assert written_steps(folder, 'preempted') == list(range(done + 2))
  made = summary(folder, 'preempted')
  assert made['trajectories'] == (done + 2) * BATCH


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_samplers_may_die_join_and_leave_during_a_run(folder, start):
  steps = 40
  with (
    started(
      folder,
      'serve_sampler.py',
      f'--policy={folder}/runs/first/policy',
      '--address=127.0.0.1:0',
    ) as third,
    started(
      folder,
      'train.py',
      start,
      '--config.run.name=several',
      f'--config.run.steps={steps}',
      "--config.sampler.addresses=('local', 'local')",
    ) as process,
  ):
    address = json.loads(third.stdout.readline())['sampler_ready']
    passed = lambda least: wait_until(
      lambda: len(written_steps(folder, 'several')) > least,
      f'step {least}',
      process,
    )
    passed(3)
    os.kill(sampler_of(process), signal.SIGKILL)
    passed(10)
    directory = folder / 'runs' / 'several'
    names = directory / 'samplers.txt'
    names.write_text(names.read_text().replace('local-1', address))
    assert process.wait(WAIT_S) == 0
  errors = (folder / 'train.py.err').read_text()
  assert 'lost local-' in errors
  assert 'local-1 leaves the pool' in errors
  records = metrics.read_metrics(directory)
  assert [record['step'] for record in records] == list(range(steps))
  assert {record['trajectories'] for record in records} == {BATCH}
  ok = [record['status/ok'] for record in records]
  assert ok == [10 + IN_FLIGHT * (step + 1) for step in range(steps)]
  assert 'is active' in (folder / 'serve_sampler.py.err').read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_service_started_by_hand_serves_one_run_after_another(folder, start):
  with started(
    folder,
    'serve_sampler.py',
    f'--policy={folder}/runs/first/policy',
    '--address=127.0.0.1:0',
  ) as service:
    address = json.loads(service.stdout.readline())['sampler_ready']
    here = f"--config.sampler.addresses=('{address}',)"
    for name in ('remote', 'remote-again'):
      code, _, errors = train(folder, name, start, here)
      assert code == 0, errors
      assert summary(folder, name)['trajectories'] == 4 * BATCH
      assert not (folder / 'runs' / name / 'sampler-0.log').exists()
    code, _, errors = train(
      folder, 'others', start, here, '--config.environment.seed=1'
    )
    assert code == 1
    for words in ('tasks_fingerprint', 'give both sides the same tasks'):
      assert words in errors
    assert 'Traceback' not in errors
    service.terminate()
    assert service.wait(WAIT_S) == 0
