"""Weights are taken, or those from before are back, or the engine ends."""

import external_world as world
import numpy as np
import pytest

from spopp_jax import types
from spopp_jax.sampler import errors

SAMPLING = types.SamplingParams(max_turn_tokens=1)
PROMPT = np.array([12], np.int32)


@pytest.fixture(params=world.KINDS, ids=lambda kind: kind.kind)
def fake(request):
  with world.running(request.param) as server:
    yield server


@pytest.fixture
def decoder(fake, tmp_path):
  return world.connect(fake, tmp_path)


def refuse(fake, path, *, times=None):
  """Has a path answer 500, `times` times."""
  left = [times]

  def fail(answer):
    if left[0] == 0:
      return answer
    left[0] = left[0] and left[0] - 1
    raise world.Status(500, 'out of memory')

  fake.hooks[path] = fail


def generated_with(decoder):
  """Returns which weights, by seed, the next token was drawn with."""
  decoder.open(0, seed=1, sampling=SAMPLING)
  decoder.append(0, PROMPT)
  (turn,) = world.turns(decoder, 1)
  decoder.close(0)
  assert turn.problem == ''
  (seed,) = (
    seed
    for seed in range(3)
    if np.isclose(
      world.log_distribution(world.make_parameters(seed), 12, temperature=1.0)[
        turn.tokens[0]
      ],
      turn.logprobs[0],
      atol=1e-5,
    )
  )
  return seed


def test_weights_are_taken_in_order_and_old_ones_go(fake, decoder, tmp_path):
  for version in (0, 1, 2):
    del fake.asked[:]
    world.load(decoder, version)
    assert decoder.policy_version == version
    assert decoder.weights_checksum == f'{version:064x}'
    assert [path.name for path in tmp_path.iterdir()] == [fake.label]
    assert generated_with(decoder) == version
  assert (
    fake.paths()[:6]
    == {
      'vllm': [
        '/pause?mode=abort',
        '/collective_rpc',
        '/reset_prefix_cache',
        '/update_weight_version',
        '/weight_info',
        '/resume',
      ],
      'sglang': [
        '/pause_generation',
        '/update_weights_from_disk',
        '/flush_cache',
        '/model_info',
        '/continue_generation',
        '/generate',
      ],
    }[fake.kind]
  )


@pytest.mark.parametrize('version', [0, 1])
def test_a_refused_update_leaves_what_was(fake, decoder, tmp_path, version):
  if version:
    world.load(decoder, 0)
  refuse(fake, fake.update_path, times=1)
  with pytest.raises(ValueError, match='out of memory') as caught:
    world.load(decoder, version)
  assert decoder.policy_version == version - 1
  assert not fake.paused
  kept = [path.name for path in tmp_path.iterdir()]
  if version:
    assert 'back at 0-' in str(caught.value)
    assert kept == [fake.label]
    assert generated_with(decoder) == 0
  else:
    assert kept == []
  world.load(decoder, 2)
  assert generated_with(decoder) == 2


@pytest.mark.parametrize('part', ['cache', 'label', 'pause'])
def test_no_step_may_fail(fake, decoder, part):
  world.load(decoder, 0)
  path = {
    'vllm': {
      'cache': '/reset_prefix_cache',
      'label': '/update_weight_version',
      'pause': '/pause',
    },
    'sglang': {
      'cache': '/flush_cache',
      'label': '/model_info',
      'pause': '/pause_generation',
    },
  }[fake.kind][part]
  refuse(fake, path, times=1)
  with pytest.raises(ValueError, match='out of memory'):
    world.load(decoder, 1)
  assert generated_with(decoder) == 0


def test_a_cache_that_stays_is_no_success(tmp_path):
  with world.running(world.FakeVllm) as fake:
    decoder = world.connect(fake, tmp_path)
    world.load(decoder, 0)
    fake.hooks['/reset_prefix_cache'] = lambda _: {'success': False}
    with pytest.raises(errors.EngineLost, match='prefix cache'):
      world.load(decoder, 1)


def test_a_version_that_the_server_does_not_say_is_not_active(fake, decoder):
  world.load(decoder, 0)
  path = '/weight_info' if fake.kind == 'vllm' else '/model_info'
  answers = iter(['something else', f'0-{0:064x}'])
  fake.hooks[path] = lambda _: {'weight_version': next(answers)}
  with pytest.raises(ValueError, match='something else'):
    world.load(decoder, 1)
  assert decoder.policy_version == 0
  del fake.hooks[path]
  assert generated_with(decoder) == 0


@pytest.mark.parametrize('resume', [False, True])
def test_what_is_not_known_ends_the_engine(fake, decoder, resume):
  world.load(decoder, 0)
  path = fake.update_path
  if resume:
    path = '/resume' if fake.kind == 'vllm' else '/continue_generation'
  refuse(fake, path)
  with pytest.raises(errors.EngineLost, match=r'not known|does not resume'):
    world.load(decoder, 1)


def test_a_late_update_is_taken_back(fake, tmp_path):
  decoder = world.connect(fake, tmp_path, update_deadline_s=2.0)
  world.load(decoder, 0)

  def stall(_):
    del fake.hooks[fake.update_path]
    raise world.Silence

  fake.hooks[fake.update_path] = stall
  with pytest.raises(ValueError, match='no answer within'):
    world.load(decoder, 1)
  assert generated_with(decoder) == 0


def test_what_does_not_fit_is_refused_before_the_server_is_asked(fake, decoder):
  world.load(decoder, 0)
  del fake.asked[:]
  params = world.make_parameters(1)
  params.pop('model.norm.weight')
  with pytest.raises(ValueError, match=r'model\.norm\.weight'):
    decoder.load(params, version=1, checksum='c')
  assert not fake.asked


def test_a_full_disk_is_a_refusal(fake, tmp_path):
  directory = tmp_path / 'weights'
  decoder = world.connect(fake, directory)
  directory.rmdir()
  directory.write_text('not a directory')
  with pytest.raises(ValueError, match='cannot be written'):
    world.load(decoder, 0)
  with pytest.raises(ValueError, match='cannot hold weights'):
    world.connect(fake, directory)


def test_what_an_earlier_engine_left_goes_and_nothing_else(fake, tmp_path):
  world.load(world.connect(fake, tmp_path), 5)
  (tmp_path / 'notes').mkdir()
  assert len(list(tmp_path.iterdir())) == 2
  world.connect(fake, tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ['notes']
