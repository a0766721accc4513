"""Reads what vLLM 0.32 itself has answered, and asks as it was asked then."""

import json
import pathlib

import external_world as world
import pytest

from spopp_jax import types
from spopp_jax.sampler import errors
from spopp_jax.sampler.external import calls, servers, vllm

GOLDEN = pathlib.Path(__file__).parents[2] / 'golden' / 'vllm_0_32.json'
RECORDED = json.loads(GOLDEN.read_text('utf-8'))


def prompt(top_k=0, budget=3):
  return servers.Prompt(
    tokens=(1, 2, 3),
    seed=5,
    sampling=types.SamplingParams(temperature=0.7, top_k=top_k),
    budget=budget,
    stop_ids=(95,),
    label='0-a',
  )


@pytest.fixture
def fake():
  with world.running(world.FakeVllm, device='cpu') as server:
    yield server


@pytest.fixture
def server(fake):
  fake.hooks['/server_info'] = lambda _: RECORDED['server_info']['answered']
  server = vllm.Vllm(calls.Address(fake.url), world.CONFIG)
  server.facts()
  return server


def test_facts_are_read(server):
  assert server.facts() == servers.Facts(
    256, types.LogprobKind.PROCESSED, keeps_seeds=True
  )


def test_a_plain_answer_is_read(server):
  answer = server.read(RECORDED['plain']['answered'], prompt())
  (choice,) = RECORDED['plain']['answered']['choices']
  assert answer.tokens == choice['token_ids']
  assert answer.logprobs == [
    entry['logprob'] for entry in choice['logprobs']['content']
  ]
  assert answer.kept is None
  assert answer.label == '1-c1'


def test_kept_sets_are_read_from_processed_log_probs(server):
  answer = server.read(RECORDED['top_k']['answered'], prompt(top_k=2, budget=2))
  assert answer.kept.offsets.tolist() == [0, 2, 4]
  (choice,) = RECORDED['top_k']['answered']['choices']
  for index, entry in enumerate(choice['logprobs']['content']):
    top = {t['token_id'] for t in entry['top_logprobs'] if t['rank'] <= 2}
    assert set(answer.kept.ids[2 * index : 2 * index + 2].tolist()) == top


def test_turns_that_were_aborted_are_refused(server):
  answer = json.loads(json.dumps(RECORDED['plain']['answered']))
  answer['choices'][0]['finish_reason'] = 'abort'
  with pytest.raises(errors.EngineRefused, match='abort'):
    server.read(answer, prompt())


@pytest.mark.parametrize('token', [1e400, 2**40, 'x', None, [1]])
def test_kept_ids_that_are_none_are_refused(server, fake, token):
  facts = json.loads(json.dumps(RECORDED['server_info']['answered']))
  facts['vllm_config']['model_config']['return_sampling_mask'] = True
  fake.hooks['/server_info'] = lambda _: facts
  server.facts()
  answer = json.loads(json.dumps(RECORDED['top_k']['answered']))
  answer['choices'][0]['sampling_mask'] = [[token], [68]]
  with pytest.raises(errors.EngineRefused, match='the answer is not what'):
    server.read(answer, prompt(top_k=2, budget=2))


def test_turns_of_two_versions_are_refused(server):
  answer = json.loads(json.dumps(RECORDED['plain']['answered']))
  answer['choices'][0]['weight_versions'] = [
    {'version': '0-a', 'start': 0, 'end': 1},
    {'version': '1-b', 'start': 1, 'end': 3},
  ]
  with pytest.raises(errors.EngineRefused, match='2 versions'):
    server.read(answer, prompt())


def test_generation_is_asked_as_it_was_recorded(server, fake):
  for name, wanted, logprobs in (
    ('plain', prompt(), 0),
    ('top_k', prompt(top_k=2, budget=2), 18),
  ):
    server.generation(wanted, deadline_s=world.WAIT_S).run()
    path, body = fake.asked[-1]
    recorded = RECORDED[name]
    assert recorded['call'] == f'POST {path}'
    expected = json.loads(json.dumps(recorded['asked']))
    # Recorded with fewer, so that the record is short.
    expected['sampling_params']['logprobs'] = logprobs
    assert body == expected


def test_weights_are_handed_over_as_it_was_recorded(server, fake, tmp_path):
  world.load(world.connect(fake, tmp_path))
  calls_made = [
    path for path, _ in fake.asked if 'generate' not in path and path != '/'
  ]
  recorded = [
    RECORDED[name]['call'].split()[1]
    for name in ('pause', 'reload', 'reset', 'label', 'info', 'resume')
  ]
  assert calls_made[-6:] == recorded
  bodies = dict(fake.asked)
  body = bodies['/collective_rpc']
  body['kwargs']['weights_path'] = 'weights'
  assert body == RECORDED['reload']['asked']
  assert bodies['/update_weight_version'].keys() == {'new_version'}


def shape(value):
  """Returns the keys of an answer, with the types of what they hold."""
  if isinstance(value, dict):
    return {key: shape(part) for key, part in value.items()}
  if isinstance(value, list):
    return [shape(value[0])] if value else []
  return type(value)


@pytest.mark.parametrize(
  'name', ['pause', 'reset', 'label', 'info', 'resume', 'server_info']
)
def test_the_fake_answers_in_the_recorded_shape(name, fake):
  recorded = RECORDED[name]
  method, path = recorded['call'].split()
  answer = calls.Call(
    calls.Address(fake.url),
    method,
    path,
    recorded['asked'],
    deadline_s=world.WAIT_S,
  ).run()
  assert shape(answer) == shape(recorded['answered'])


def test_the_fake_generates_in_the_recorded_shape(fake):
  body = RECORDED['top_k']['asked']
  answer = calls.Call(
    calls.Address(fake.url),
    'POST',
    fake.generate_path,
    body,
    deadline_s=world.WAIT_S,
  ).run()
  ours = answer['choices'][0]
  theirs = RECORDED['top_k']['answered']['choices'][0]
  assert ours.keys() <= theirs.keys()
  for name in ('token_ids', 'weight_versions', 'logprobs'):
    assert shape(ours[name]) == shape(theirs[name])
  length = [
    [len(e['top_logprobs']) for e in c['logprobs']['content']]
    for c in (ours, theirs)
  ]
  assert length[0] == length[1] == [4, 4]
