"""The engine in front of a server that answers as vLLM or SGLang do."""

import dataclasses

import external_world as world
import numpy as np
import pytest

from spopp_jax import types
from spopp_jax.sampler import errors, kept_sets
from spopp_jax.sampler.external import engine as engine_lib

SAMPLING = types.SamplingParams(temperature=0.7, max_turn_tokens=world.TURN)
TOP_K = dataclasses.replace(SAMPLING, top_k=5)
MIN_P = dataclasses.replace(SAMPLING, top_k=20, min_p=0.3)
BOTH = dataclasses.replace(SAMPLING, top_k=20, top_p=0.6)
PROMPT = np.array([10, 11, 12], np.int32)


@pytest.fixture(params=world.KINDS, ids=lambda kind: kind.kind)
def fake(request):
  with world.running(request.param) as server:
    yield server


@pytest.fixture
def decoder(fake, tmp_path):
  return world.connect(fake, tmp_path)


def begin(decoder, slot=0, sampling=SAMPLING, seed=3, prompt=PROMPT):
  decoder.open(slot, seed=seed, sampling=sampling)
  decoder.append(slot, prompt)


def one_turn(decoder, **arguments):
  begin(decoder, **arguments)
  (turn,) = world.turns(decoder, 1)
  decoder.close(turn.slot)
  return turn


def hook(fake, change):
  """Changes answers; vLLM's and SGLang's by the same words."""

  def changed(answer):
    answer = dict(answer)
    part = answer if fake.kind == 'sglang' else answer['choices'][0]
    change(part)
    return answer

  fake.hooks[fake.generate_path] = changed


@pytest.mark.parametrize('sampling', [SAMPLING, TOP_K, MIN_P, BOTH])
@pytest.mark.parametrize('seed', range(4))
def test_log_probs_and_kept_sets_are_of_the_weights(decoder, sampling, seed):
  params = world.load(decoder)
  turn = one_turn(decoder, sampling=sampling, seed=seed)
  assert turn.problem == ''
  assert decoder.logprob_kind is types.LogprobKind.PROCESSED
  before = [PROMPT[-1], *turn.tokens[:-1]]
  for index, (last, token) in enumerate(zip(before, turn.tokens, strict=True)):
    expected = world.log_distribution(
      params,
      last,
      temperature=sampling.temperature,
      top_k=sampling.top_k,
      top_p=sampling.top_p,
      min_p=sampling.min_p,
    )
    np.testing.assert_allclose(turn.logprobs[index], expected[token], 1e-5)
    if sampling.truncated:
      start, end = turn.kept.offsets[index : index + 2]
      np.testing.assert_array_equal(
        np.sort(turn.kept.ids[start:end]), np.flatnonzero(np.isfinite(expected))
      )
  assert (turn.kept is not None) == sampling.truncated


@pytest.mark.parametrize(
  'options',
  [{'mask': True}, {'mask': True, 'max_logprobs': 5}, {'max_logprobs': 20}],
)
def test_kept_sets_come_by_mask_or_by_log_probs(options, tmp_path):
  with world.running(world.FakeVllm, **options) as fake:
    decoder = world.connect(fake, tmp_path)
    world.load(decoder)
    turn = one_turn(decoder, sampling=BOTH)
    assert kept_sets.problem(turn.kept, turn.tokens) is None
    assert np.diff(turn.kept.offsets).max() > 1


def test_untruncated_turns_go_on_with_all_their_ids(fake, decoder):
  world.load(decoder)
  begin(decoder)
  (first,) = world.turns(decoder, 1)
  decoder.append(0, np.array([30, 31], np.int32))
  world.turns(decoder, 1)
  asked = [body for path, body in fake.asked if path == fake.generate_path]
  name = 'token_ids' if fake.kind == 'vllm' else 'input_ids'
  assert asked[-1][name] == [*PROMPT, *first.tokens, 30, 31]
  assert asked[-2][name] == [*PROMPT]


def test_ends_are_told_apart(fake, decoder):
  world.load(decoder)
  turns = [one_turn(decoder, seed=seed) for seed in range(60)]
  ends = {turn.ended for turn in turns}
  assert ends == {True, False}
  for turn in turns:
    assert turn.ended == (turn.tokens[-1] in (world.END, 98))
    assert turn.ended or len(turn.tokens) == world.TURN


def test_seeds_decide_and_differ_between_turns(fake, decoder):
  world.load(decoder)
  turns = [one_turn(decoder, seed=seed).tokens.tolist() for seed in (7, 7, 8)]
  assert turns[0] == turns[1] != turns[2]
  begin(decoder, seed=7)
  world.turns(decoder, 1)
  decoder.append(0, PROMPT)
  world.turns(decoder, 1)
  key = 'seed' if fake.kind == 'vllm' else 'sampling_seed'
  seeds = [
    body['sampling_params'][key]
    for path, body in fake.asked
    if path == fake.generate_path
  ]
  assert seeds[-1] != seeds[-2]
  assert seeds[-2] == seeds[-5]


def test_caches_are_keyed_by_the_weights(fake, decoder):
  key = 'cache_salt' if fake.kind == 'vllm' else 'extra_key'
  for version in (0, 1):
    world.load(decoder, version)
    one_turn(decoder)
  keys = [body[key] for path, body in fake.asked if path == fake.generate_path]
  assert keys[-2:] == [f'{v}-{v:064x}' for v in (0, 1)]


def test_turns_come_as_they_finish(fake, decoder):
  world.load(decoder)

  def stall_first(answer):
    body = fake.asked[-1][1]
    if 10 in body.get('token_ids', body.get('input_ids')):
      raise world.Silence
    return answer

  fake.hooks[fake.generate_path] = stall_first
  begin(decoder, slot=0)
  world.wait_until(lambda: fake.paths()[-1] == fake.generate_path)
  begin(decoder, slot=1, prompt=PROMPT + 50)
  assert [turn.slot for turn in world.turns(decoder, 1)] == [1]
  assert decoder.step() == []
  decoder.close(0)
  world.wait_until(lambda: fake.abandoned == [fake.generate_path])
  assert decoder.step() == []


def test_a_closed_slot_gets_no_turn_of_its_predecessor(fake, decoder):
  world.load(decoder)
  begin(decoder, seed=1)
  decoder.close(0)
  begin(decoder, seed=2)
  (turn,) = world.turns(decoder, 1)
  decoder.close(0)
  assert turn.problem == ''
  assert turn.tokens.tolist() == one_turn(decoder, seed=2).tokens.tolist()


@pytest.mark.parametrize(
  'error, text',
  [
    (world.Status(500, 'on fire'), 'status 500: on fire'),
    (world.HalfAnswer(), 'broke off'),
    (world.Silence(), 'no answer within'),
  ],
)
def test_a_failed_call_ends_its_turn_alone(fake, tmp_path, error, text):
  decoder = world.connect(fake, tmp_path, turn_deadline_s=2.0)
  world.load(decoder)

  def fail(_):
    raise error

  fake.hooks[fake.generate_path] = fail
  turn = one_turn(decoder)
  assert text in turn.problem
  assert len(turn.tokens) == 0
  del fake.hooks[fake.generate_path]
  assert one_turn(decoder).problem == ''


def tokens_name(fake):
  return 'token_ids' if fake.kind == 'vllm' else 'output_ids'


def set_tokens(part, name, tokens):
  """Replaces ids and what is said of each."""
  part[name] = tokens
  if name == 'token_ids':
    part['logprobs'] = {
      'content': [{'token_id': t, 'logprob': -1.0} for t in tokens]
    }
  else:
    part['meta_info']['output_token_logprobs'] = [
      [-1.0, t, None] for t in tokens
    ]


@pytest.mark.parametrize(
  'tokens, text',
  [
    ([], '0 tokens came'),
    ([1] * 5, '5 tokens came; allowed: 1 to 4'),
    ([1, 2], 'ended after 2 of 4 tokens at 2'),
    ([1, 99, 2, 3], 'go on after one of the stop ids'),
    ([1, 2, 3, 200], r'must be in [0, 200)'),
    ([1, 2, 3, -1], r'must be in [0, 200)'),
  ],
)
def test_turns_that_are_none_are_named(fake, decoder, tokens, text):
  world.load(decoder)
  hook(fake, lambda part: set_tokens(part, tokens_name(fake), tokens))
  assert text in one_turn(decoder).problem


def test_log_probs_of_other_tokens_are_refused(fake, decoder):
  world.load(decoder)

  def change(part):
    part[tokens_name(fake)] = part[tokens_name(fake)][:-1]

  hook(fake, change)
  assert 'log-probs of other tokens' in one_turn(decoder).problem


def test_missing_log_probs_are_refused(fake, decoder):
  world.load(decoder)

  def change(part):
    if fake.kind == 'vllm':
      part['logprobs'] = None
    else:
      del part['meta_info']['output_token_logprobs']

  hook(fake, change)
  assert 'the answer is not what' in one_turn(decoder).problem


def test_missing_kept_sets_are_refused(fake, decoder):
  world.load(decoder)

  def change(part):
    if fake.kind == 'vllm':
      for entry in part['logprobs']['content']:
        # Nothing is said to be cut off, and half of the mass is missing.
        entry['top_logprobs'] = [
          {'token_id': entry['token_id'], 'logprob': -3.0}
        ]
    else:
      del part['meta_info']['output_token_sampling_mask']

  hook(fake, change)
  problem = one_turn(decoder, sampling=TOP_K, seed=5).problem
  assert 'more ids were kept' in problem or 'sampling_mask' in problem


def test_a_server_with_other_weights_ends_the_engine(fake, decoder):
  world.load(decoder)
  fake.label = 'default'
  begin(decoder)
  with pytest.raises(errors.EngineLost, match="'default'"):
    world.turns(decoder, 1)


def test_a_server_that_is_gone_ends_the_engine(fake, decoder):
  world.load(decoder)
  fake.close()
  begin(decoder)
  with pytest.raises(errors.EngineLost, match='cannot be reached'):
    world.turns(decoder, 1)


def test_a_new_version_restarts_what_was_being_generated(fake, decoder):
  world.load(decoder)

  def stall_version_0(answer):
    if fake.label.startswith('0-'):
      raise world.Silence
    return answer

  fake.hooks[fake.generate_path] = stall_version_0
  begin(decoder)
  world.wait_until(lambda: fake.paths()[-1] == fake.generate_path)
  params = world.load(decoder, 1)
  (turn,) = world.turns(decoder, 1)
  assert fake.abandoned == [fake.generate_path]
  expected = world.log_distribution(params, 12, temperature=0.7)
  np.testing.assert_allclose(turn.logprobs[0], expected[turn.tokens[0]], 1e-5)
  decoder.append(0, PROMPT)
  (turn,) = world.turns(decoder, 1)
  assert turn.problem == ''


def test_what_a_server_cannot_honour_is_refused(tmp_path):
  with world.running(world.FakeVllm, mode='raw_logprobs') as fake:
    decoder = world.connect(fake, tmp_path)
    world.load(decoder)
    with pytest.raises(ValueError, match='temperature'):
      decoder.open(0, seed=0, sampling=SAMPLING)
    plain = dataclasses.replace(TOP_K, temperature=1.0)
    turn = one_turn(decoder, sampling=plain)
    assert decoder.logprob_kind is types.LogprobKind.RAW
    assert turn.kept is None
    assert turn.problem == ''
  with world.running(world.FakeVllm, max_logprobs=20) as fake:
    decoder = world.connect(fake, tmp_path)
    for sampling, needed in (
      (dataclasses.replace(SAMPLING, top_p=0.9), 200),
      (dataclasses.replace(SAMPLING, top_k=21), 21),
    ):
      with pytest.raises(ValueError, match=f'--max-logprobs {needed}'):
        decoder.open(0, seed=0, sampling=sampling)
  with world.running(world.FakeSglang, most_kept=8) as fake:
    decoder = world.connect(fake, tmp_path)
    for sampling in (BOTH, dataclasses.replace(SAMPLING, top_p=0.9)):
      with pytest.raises(ValueError, match='top_k'):
        decoder.open(0, seed=0, sampling=sampling)


def test_a_server_that_cannot_serve_the_run_is_refused(tmp_path):
  with world.running(world.FakeVllm) as fake:
    with pytest.raises(ValueError, match='257 tokens exceeds the 256'):
      world.connect(fake, tmp_path, max_context=257)
    fake.routes.pop('/server_info')
    with pytest.raises(errors.EngineRefused, match='404'):
      world.connect(fake, tmp_path)
  tied = dataclasses.replace(world.CONFIG, tie_word_embeddings=True)
  with world.running(world.FakeVllm, device='cpu') as fake:
    world.connect(fake, tmp_path)
    with pytest.raises(errors.EngineRefused, match='tie_word_embeddings'):
      engine_lib.connect(
        fake.address,
        tied,
        num_slots=1,
        max_context=8,
        max_turn_tokens=4,
        stop_ids=(99,),
        directory=tmp_path,
        turn_deadline_s=1.0,
      )


def test_a_server_that_was_left_paused_goes_on(fake, tmp_path):
  fake.paused = True
  decoder = world.connect(fake, tmp_path)
  world.load(decoder)
  assert one_turn(decoder).problem == ''


@pytest.mark.parametrize('address', ['', 'vllm', 'trt:http://host:1', 'http'])
def test_addresses_are_of_a_known_kind(address, tmp_path):
  with pytest.raises(ValueError, match=r'vllm or sglang|must be http'):
    engine_lib.connect(address, world.CONFIG)


def test_ids_that_servers_do_not_survive_are_not_sent(fake, decoder):
  world.load(decoder)
  decoder.open(0, seed=0, sampling=SAMPLING)
  for ids in ([200], [-1], [], [1] * world.CONTEXT):
    with pytest.raises(ValueError, match=r'200\)|at least one|no room'):
      decoder.append(0, np.array(ids, np.int32))
  assert fake.paths()[-1] != fake.generate_path


def test_seeds_that_do_not_count_are_said(tmp_path, caplog):
  with world.running(world.FakeSglang, seeds=False) as fake:
    world.connect(fake, tmp_path)
  assert 'does not keep seeds' in caplog.text
