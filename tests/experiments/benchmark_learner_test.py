import sys

import benchmark
import benchmark_learner
import benchmark_libraries
import benchmark_policies
import benchmark_report as report
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax import types
from spopp_jax.models import dense, parameters

CONFIG = dense.DecoderConfig(
  vocab_size=128,
  hidden_size=16,
  num_hidden_layers=1,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=8,
  intermediate_size=16,
  rope_theta=1e6,
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch, jax_settings):
  jax.config.update('jax_disable_most_optimizations', True)
  monkeypatch.setattr(report, '_PAUSE_S', 0.0)


def episode(tokens, mask, reward):
  mask = np.array(mask, bool)
  return types.Trajectory(
    request_id=str(tokens),
    task_id='0',
    status=types.Status.OK,
    policy_version=0,
    weights_checksum='',
    num_turns=1,
    sampling=types.SamplingParams(),
    tokens=np.array(tokens, np.int32),
    action_mask=mask,
    behaviour_logprobs=np.zeros(len(mask), np.float32),
    reward=reward,
  )


PLAYED = [
  episode([5, 6, 7, 8, 9], [0, 0, 1, 0, 1], 1.0),
  episode([3, 4], [0, 1], 0.0),
]


def test_padding_is_on_both_sides_of_the_first_action():
  wide = benchmark_learner.padded(PLAYED, 99)
  np.testing.assert_array_equal(wide.prompts, [[5, 6], [99, 3]])
  np.testing.assert_array_equal(wide.completions, [[7, 8, 9], [4, 99, 99]])
  # Advantages 1/2 and -1/2 over three trained tokens.
  sixth = 1 / 6
  np.testing.assert_allclose(
    wide.weights, [[sixth, 0, sixth], [-sixth, 0, 0]], rtol=1e-6
  )


def test_rows_are_as_few_as_they_can_be():
  batch = benchmark_learner.packed(PLAYED, 7)
  np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 8, 9, 3, 4]])
  assert benchmark_learner.packed(PLAYED, 6).tokens.shape == (2, 6)


def test_the_loss_is_that_of_the_padded_episodes():
  params = benchmark_policies.random_policy(CONFIG, 0)
  step = benchmark_learner.packed_step(
    CONFIG,
    params,
    benchmark_learner.packed(PLAYED, 8),
    benchmark_learner.advantages(PLAYED),
  )
  loss, embedding, norm, _ = step()
  # Each episode alone, with all logits: no packing, padding or chunks.
  decoder = parameters.bind(parameters.graph(CONFIG)[0], params)
  expected = 0.0
  for played, advantage in zip(PLAYED, (0.5, -0.5), strict=True):
    tokens = jnp.asarray(played.tokens)[None]
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = decoder.hidden(tokens, positions, jnp.ones_like(tokens))
    logprobs = jax.nn.log_softmax(decoder.logits(hidden)[0])
    for place in np.flatnonzero(played.action_mask):
      expected -= advantage * logprobs[place - 1, played.tokens[place]] / 3
  np.testing.assert_allclose(loss, expected, rtol=1e-4)
  assert float(norm) > np.linalg.norm(embedding) > 0


def test_torch_has_the_same_loss_and_gradient():
  pytest.importorskip('torch')
  with benchmark_libraries.loaded('tiny', CONFIG, '') as libraries:
    compared = benchmark_learner.versions(libraries, PLAYED, 8)
    assert benchmark_libraries.HUGGING_FACE in compared
    benchmark_learner.check('work', compared)


def test_the_report_has_a_row_for_each_library(capsys, monkeypatch):
  monkeypatch.delitem(sys.modules, 'benchmark_transformers', raising=False)
  monkeypatch.setitem(sys.modules, 'torch', None)
  monkeypatch.setattr(benchmark_policies, 'SIZES', {'tiny': CONFIG})
  benchmark.main(['benchmark.py', 'learner', '--scale=0.01', '--repeats=1'])
  output, _ = capsys.readouterr()
  (row,) = [line for line in output.splitlines() if '(d = 16' in line]
  cells = [cell.strip() for cell in row.strip('|').split('|')]
  assert cells[2] == report.OURS
  useful, outer = (int(cells[i].replace(',', '')) for i in (1, 3))
  assert 0 < useful <= outer
  assert outer % 192 == 0
  assert cells[6:] == ['1.00', '1.00', '']


def test_another_gradient_is_not_timed():
  version = lambda *result: benchmark_libraries.returning(lambda: result)
  ours = {report.OURS: version(1.0, np.ones(3), 2.0, 'more')}
  benchmark_learner.check('w', ours | {'a': version(1.0, np.ones(3), 2.0)})
  with pytest.raises(
    report.Disagreement, match=r'w: .* of b differs by 1.0e-0'
  ):
    benchmark_learner.check(
      'w', ours | {'b': version(1.0, 1.001 * np.ones(3), 2.0)}
    )
