"""What SGLang is asked, and what is read of answers as it documents them."""

import copy

import external_world as world
import pytest

from spopp_jax import types
from spopp_jax.sampler import errors
from spopp_jax.sampler.external import calls, servers, sglang

# The fields of an answer that are read, with values to tell them apart.
ANSWER = {
  'text': '',
  'output_ids': [7, 8, 99],
  'meta_info': {
    'id': 'a',
    'finish_reason': {'type': 'stop', 'matched': 99},
    'prompt_tokens': 3,
    'completion_tokens': 3,
    'weight_version': '0-a',
    'output_token_logprobs': [
      [-1.0, 7, None],
      [-2.0, 8, None],
      [-3.0, 99, None],
    ],
    'output_token_sampling_mask': [[7, 1], [8], [2, 99, 3]],
    'output_token_sampling_logprobs': [-0.5, 0.0, -0.75],
  },
}


def prompt(**sampling):
  return servers.Prompt(
    tokens=(1, 2, 3),
    seed=5,
    sampling=types.SamplingParams(temperature=0.7, **sampling),
    budget=3,
    stop_ids=(99, 98),
    label='0-a',
  )


@pytest.fixture
def fake():
  with world.running(world.FakeSglang) as server:
    yield server


@pytest.fixture
def server(fake):
  server = sglang.Sglang(calls.Address(fake.url))
  server.facts()
  return server


def test_facts_are_read(server, fake):
  assert server.facts() == servers.Facts(256, None, keeps_seeds=True)
  fake.hooks['/server_info'] = lambda _: {'max_req_input_len': 77}
  assert server.facts() == servers.Facts(77, None, keeps_seeds=False)
  fake.hooks['/server_info'] = lambda _: 'hello'
  with pytest.raises(errors.EngineRefused, match='hello'):
    server.facts()


def test_untruncated_log_probs_come_without_a_mask(server):
  answer = server.read(ANSWER, prompt())
  assert answer.tokens == [7, 8, 99]
  assert answer.logprobs == [-1.0, -2.0, -3.0]
  assert answer.kept is None
  assert answer.label == '0-a'


def test_truncated_log_probs_come_with_their_mask(server):
  answer = server.read(ANSWER, prompt(top_k=4))
  assert answer.logprobs == [-0.5, 0.0, -0.75]
  assert answer.kept.ids.tolist() == [7, 1, 8, 2, 99, 3]
  assert answer.kept.offsets.tolist() == [0, 2, 3, 6]


def test_a_server_without_masks_tells_log_probs_before_truncation():
  with world.running(world.FakeSglang, most_kept=0) as fake:
    server = sglang.Sglang(calls.Address(fake.url))
    server.facts()
    answer = server.read(ANSWER, prompt(top_k=4))
    assert answer.logprobs == [-1.0, -2.0, -3.0]
    assert answer.kept is None
    assert server.refusal(prompt(top_p=0.9).sampling) == ''


@pytest.mark.parametrize(
  'change, text',
  [
    (
      lambda meta: meta['finish_reason'].update(type='abort', message='full'),
      "'abort': full",
    ),
    (
      lambda meta: meta.update(
        weight_versions=[
          {'version': '0-a', 'start': 0, 'end': 1},
          {'version': '1-b', 'start': 1, 'end': 3},
        ]
      ),
      '2 versions',
    ),
    (lambda meta: meta.pop('weight_version'), 'weight_version'),
    (lambda meta: meta.update(finish_reason=None), 'NoneType'),
  ],
)
def test_answers_that_cannot_be_used_are_refused(server, change, text):
  answer = copy.deepcopy(ANSWER)
  change(answer['meta_info'])
  with pytest.raises(errors.EngineRefused, match=text):
    server.read(answer, prompt())


def test_generation_is_asked_in_ids(server, fake):
  server.generation(prompt(top_k=4), deadline_s=world.WAIT_S).run()
  path, body = fake.asked[-1]
  assert path == '/generate'
  assert body == {
    'input_ids': [1, 2, 3],
    'extra_key': '0-a',
    'return_logprob': True,
    'return_sampling_mask': True,
    'sampling_params': {
      'temperature': 0.7,
      'top_p': 1.0,
      'top_k': 4,
      'sampling_seed': 5,
      'max_new_tokens': 3,
      'stop_token_ids': [99, 98],
      'no_stop_trim': True,
      'skip_special_tokens': False,
      'min_p': 0.0,
      'frequency_penalty': 0.0,
      'presence_penalty': 0.0,
      'repetition_penalty': 1.0,
    },
  }
  server.generation(prompt(), deadline_s=world.WAIT_S).run()
  _, body = fake.asked[-1]
  assert body['sampling_params']['top_k'] == -1
  assert 'return_sampling_mask' not in body
