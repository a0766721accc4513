"""A world whose tokens can be written down: engine, tasks, template, service.

Run as a program it is a sampler service on this world, for tests that need a
process they can kill.
"""

import argparse
import contextlib
import queue
import sys
import threading
import time

import grpc
import numpy as np

from spopp_jax import types
from spopp_jax.envs import base as envs_base
from spopp_jax.sampler import (
  base,
  client,
  codec,
  connection,
  handshake,
  lifeline,
  options,
  rollout,
  sampler_pb2,
  sampler_pb2_grpc,
  service,
  transfer,
  weights,
)

END = 99
AFTER_TURN = 198
SAMPLING = types.SamplingParams(max_turn_tokens=4, max_turns=6)
TASK_IDS = (
  *(f'win-{n}' for n in range(1, 6)),
  *(f'lose-{n}' for n in range(1, 6)),
  'endless',
  'wordy',
  'crash-at-reset',
  'crash-at-step',
  'stuck',
)


class Template:
  """The word 'w30' is the id 30."""

  fingerprint = 'scripted-template'

  def prompt(self, observation):
    return np.array([int(w[1:]) for w in observation.split()], np.int32)

  def observation(self, observation, turn):
    return np.concatenate(
      [np.array([AFTER_TURN], np.int32), self.prompt(observation)]
    )

  def action_text(self, tokens):
    return ' '.join(f'w{token}' for token in tokens if token != END)


class Episode:
  """One episode; `actions` is what it was told."""

  def __init__(self, task_id, release):
    self.task_id = task_id
    self.actions = []
    self._release = release

  def reset(self):
    if self.task_id == 'crash-at-reset':
      raise IndexError('Cannot choose from an empty sequence')
    return 'w10 w11'

  def step(self, action):
    self.actions.append(action)
    kind, _, count = self.task_id.partition('-')
    if self.task_id == 'crash-at-step':
      raise IndexError('Cannot choose from an empty sequence')
    if kind == 'stuck':
      self._release.wait(30)
    if kind == 'wordy':
      return envs_base.StepResult(' '.join(['w7'] * 95), False, False)
    done = kind in ('win', 'lose') and len(self.actions) == int(count)
    return envs_base.StepResult('w30 w31', done, done and kind == 'win')


class Tasks:
  """Hands out episodes and remembers them."""

  task_ids = TASK_IDS

  def __init__(self):
    self.made = []
    self.release = threading.Event()

  def make(self, task_id):
    if task_id not in TASK_IDS:
      raise KeyError(task_id)
    self.made.append(Episode(task_id, self.release))
    return self.made[-1]


def turn_at(seed, position, version, max_turn_tokens):
  """Returns the tokens and log-probs that follow `position` ids."""
  length = 1 + (seed + position) % max_turn_tokens
  index = position + np.arange(length)
  tokens = (20 + (31 * seed + index) % 7).astype(np.int32)
  if length < max_turn_tokens:
    tokens[-1] = END
  logprobs = -0.125 * (1 + (version + seed + index) % 9)
  return tokens, logprobs.astype(np.float32)


def kept_at(tokens, sampling):
  """Returns what tokens were drawn from: each and those above it."""
  if not sampling.truncated:
    return None
  size = sampling.top_k or 2
  ids = tokens[:, None] + np.arange(size, dtype=np.int32)
  offsets = size * np.arange(len(tokens) + 1)
  log_mass = np.full(len(tokens), -0.5, np.float32)
  return types.KeptIds(ids.ravel(), offsets, log_mass)


class Engine:
  """Ends a turn of every slot at every step; keeps each slot's ids."""

  def __init__(self, num_slots=2, max_context=100, step_s=0.0, fail_after=-1):
    self.num_slots = num_slots
    self.max_context = max_context
    self.logprob_kind = types.LogprobKind.PROCESSED
    self.policy_version = -1
    self.weights_checksum = ''
    self.loaded = []
    self.histories = []
    self._step_s = step_s
    self._steps_left = fail_after
    self._slots = {}

  @property
  def num_open(self):
    return len(self._slots)

  def load(self, params, *, version, checksum):
    if params['w'].shape != (2,):
      raise ValueError(f'w has shape {params["w"].shape}; allowed: (2,)')
    self.loaded.append((version, params['w'].tolist()))
    self.policy_version, self.weights_checksum = version, checksum

  def open(self, slot, *, seed, sampling):
    assert slot not in self._slots
    self._slots[slot] = (seed, sampling, [], [])

  def append(self, slot, tokens):
    _, _, history, queued = self._slots[slot]
    history.extend(tokens.tolist())
    queued.append(True)

  def context_left(self, slot):
    return self.max_context - len(self._slots[slot][2])

  def step(self):
    if self._steps_left == 0:
      raise RuntimeError('the accelerator is on fire')
    self._steps_left -= 1
    time.sleep(self._step_s)
    turns = []
    for slot, (seed, sampling, history, queued) in self._slots.items():
      assert queued
      queued.clear()
      tokens, logprobs = turn_at(
        seed, len(history), self.policy_version, sampling.max_turn_tokens
      )
      history.extend(tokens.tolist())
      kept = kept_at(tokens, sampling)
      turns.append(base.Turn(slot, tokens, logprobs, tokens[-1] == END, kept))
    return turns

  def close(self, slot):
    self.histories.append(self._slots.pop(slot)[2])


def params(value):
  """Returns a snapshot that the engine takes."""
  return {'w': np.array([value, -value], np.float32)}


MODEL_FINGERPRINT = 'scripted-model'
EXPECTED = handshake.Expectation(
  tokenizer_fingerprint=Template.fingerprint,
  model_fingerprint=MODEL_FINGERPRINT,
  tasks_fingerprint=rollout.tasks_fingerprint(TASK_IDS),
  max_context_tokens=100,
  vocab_size=1000,
)


def request(number, task_id='win-2', version=0, sampling=SAMPLING):
  """Returns request `r<number>` with the seed `number`."""
  return base.Request(f'r{number}', task_id, version, number, sampling)


def load(engine, value=0.5, version=0):
  """Loads a snapshot as a publication would."""
  checksum = weights.checksum(weights.to_bytes(params(value)))
  engine.load(params(value), version=version, checksum=checksum)
  return engine


def command(**flags):
  """Returns the command line of a service on this world."""
  return [
    sys.executable,
    __file__,
    *(f'--{name}={value}' for name, value in flags.items()),
  ]


@contextlib.contextmanager
def serving(engine=None, **kwargs):
  """Runs a service on this world in this process."""
  engine = engine or load(Engine())
  driver = rollout.RolloutDriver(engine, Tasks(), Template())
  server = service.serve(driver, model_fingerprint=MODEL_FINGERPRINT, **kwargs)
  try:
    yield server
  finally:
    server.stop(grace_s=0.2)


@contextlib.contextmanager
def connected(server, **kwargs):
  """Connects a client to such a service."""
  sampler = client.SamplerClient(server.address, EXPECTED, **kwargs)
  try:
    yield sampler
  finally:
    sampler.close()


SESSION = '5e' * 16
CALL_S = 20.0
OPENING = sampler_pb2.RolloutMessage(
  opening=sampler_pb2.Opening(session_id=SESSION)
)


def asking(*requests):
  """Returns the message that asks for rollouts."""
  return sampler_pb2.RolloutMessage(
    requests=sampler_pb2.Requests(requests=requests)
  )


@contextlib.contextmanager
def raw_stub(address, session_id=SESSION):
  """Connects without a client, to say what a client would not."""
  with grpc.insecure_channel(address) as channel:
    stub = sampler_pb2_grpc.SamplerStub(channel)
    stub.Handshake(
      handshake.request(options.ChannelLimits(), session_id), timeout=CALL_S
    )
    yield stub


@contextlib.contextmanager
def raw_stream(address, *numbers, session_id=SESSION):
  """Asks for requests without a client; yields the queue of what arrives."""
  arrivals = queue.SimpleQueue()
  raw = connection.Connection(address, options.ChannelLimits(), arrivals.put)
  raw.open_stream(session_id)
  for number in numbers:
    raw.send(codec.encode_request(request(number)))
  try:
    yield arrivals
  finally:
    raw.close()


def publication(data, session_id=SESSION, **header):
  """Yields the parts of a publication of version 1; `header` changes it."""
  fields = {
    'policy_version': 1,
    'weights_checksum': weights.checksum(data),
    'size_bytes': len(data),
    'session_id': session_id,
  }
  yield sampler_pb2.PublishPart(
    header=sampler_pb2.PublishHeader(**{**fields, **header})
  )
  if not header.get('directory'):
    yield transfer.chunk(0, data[:10])
    yield transfer.chunk(10, data[10:])


def collect(sampler, count):
  """Returns the next `count` answers."""
  return [sampler.next(CALL_S) for _ in range(count)]


def wait_until(condition):
  deadline = time.monotonic() + CALL_S
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.005)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--address', default='127.0.0.1:0')
  parser.add_argument('--step_s', type=float, default=0.0)
  parser.add_argument('--fail_after', type=int, default=-1)
  parser.add_argument('--max_pending', type=int, default=64)
  parser.add_argument('--keepalive_time_ms', type=int, default=10_000)
  parser.add_argument('--keepalive_timeout_ms', type=int, default=20_000)
  parser.add_argument('--die', default='')
  flags = parser.parse_args()
  if flags.die:
    sys.exit(flags.die)
  engine = Engine(step_s=flags.step_s, fail_after=flags.fail_after)
  driver = rollout.RolloutDriver(load(engine), Tasks(), Template())
  server = service.serve(
    driver,
    model_fingerprint=MODEL_FINGERPRINT,
    address=flags.address,
    limits=options.ChannelLimits(
      keepalive_time_ms=flags.keepalive_time_ms,
      keepalive_timeout_ms=flags.keepalive_timeout_ms,
    ),
    max_pending=flags.max_pending,
  )
  lifeline.run(server)


if __name__ == '__main__':
  main()
