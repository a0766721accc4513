"""What log-probs of servers speak of is measured, not believed."""

import external_world as world
import numpy as np
import pytest

from spopp_jax import types
from spopp_jax.sampler import errors
from spopp_jax.sampler.external import calls, semantics, sglang, vllm

PROCESSED, RAW = types.LogprobKind.PROCESSED, types.LogprobKind.RAW


def measure(fake):
  address = calls.Address(fake.url)
  server = (
    vllm.Vllm(address, world.CONFIG)
    if fake.kind == 'vllm'
    else sglang.Sglang(address)
  )
  server.facts()
  return semantics.measure(server, vocab_size=world.CONFIG.vocab_size)


@pytest.mark.parametrize(
  'kind, options, expected',
  [
    (world.FakeVllm, {}, (PROCESSED, True)),
    (world.FakeVllm, {'mask': True}, (PROCESSED, True)),
    (world.FakeVllm, {'max_logprobs': 20}, (PROCESSED, True)),
    (world.FakeVllm, {'mode': 'raw_logprobs'}, (RAW, False)),
    (world.FakeSglang, {}, (PROCESSED, True)),
    (world.FakeSglang, {'most_kept': 0}, (RAW, True)),
    (world.FakeSglang, {'most_kept': 0, 'original': True}, (RAW, False)),
    (world.FakeSglang, {'original': True}, (PROCESSED, False)),
  ],
)
def test_kinds_are_measured(kind, options, expected):
  with world.running(kind, **options) as fake:
    assert measure(fake) == expected


def test_log_probs_on_another_scale_are_refused():
  with world.running(world.FakeSglang) as fake:

    def squeeze(answer):
      # As if the temperature were squared.
      for row in answer['meta_info'].get('output_top_logprobs', ()):
        temperature = fake.asked[-1][1]['sampling_params']['temperature']
        for entry in row:
          entry[0] /= temperature
      return answer

    fake.hooks['/generate'] = squeeze
    with pytest.raises(errors.EngineRefused, match=r'0\.2[45]'):
      measure(fake)


def test_weights_that_tell_nothing_are_refused():
  with world.running(world.FakeVllm) as fake:
    fake.params = {world.EMBEDDING: np.zeros_like(fake.params[world.EMBEDDING])}
    with pytest.raises(errors.EngineRefused, match='weights of a policy'):
      measure(fake)


@pytest.mark.parametrize(
  'mode, declared, message',
  [
    ('raw_logprobs', 'processed_logprobs', 'not what its mode says'),
    ('processed_logprobs', 'raw_logprobs', 'RAW; measured: PROCESSED'),
    ('raw_logprobs', 'raw_logits', '--logprobs-mode raw_logits'),
  ],
)
def test_a_server_that_says_another_kind_is_refused(
  mode, declared, message, tmp_path
):
  with (
    world.running(world.FakeVllm, mode=mode, declared=declared) as fake,
    pytest.raises(errors.EngineRefused, match=message),
  ):
    world.connect(fake, tmp_path)
