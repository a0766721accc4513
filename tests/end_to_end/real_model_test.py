"""A pretrained kind of policy from its files to its files, by the program."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import small_tokenizers
import tiny_world

from spopp_jax.models import (
  parameters,
  policy_files,
  qwen3_5,
  tokenizer,
)
from spopp_jax.runner import metrics

CONFIG = qwen3_5.Config(
  vocab_size=400,
  hidden_size=32,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=16,
  intermediate_size=64,
  layer_types=(qwen3_5.LINEAR, qwen3_5.FULL),
  partial_rotary_factor=0.5,
  linear_num_key_heads=2,
  linear_num_value_heads=2,
  linear_key_head_dim=16,
  linear_value_head_dim=16,
  max_position_embeddings=777,
)
SETTINGS = (
  'run.name=real',
  'run.steps=2',
  'run.progress=False',
  'environment.num_tasks=8',
  'environment.step_limit=2',
  'model.chat_format=qwen3_5_nothink',
  'offline.rollouts_per_task=1',
  'evaluation.rollouts_per_task=1',
  'sampler.slots=8',
  'sampler.context_length=768',
  'sampler.max_turn_tokens=6',
  'sampler.min_p=0.01',
  'dispatch.batch_size=8',
  'dispatch.in_flight=8',
  # Nobody wins, which standardized would say nothing.
  'objective.measure=none',
  'learner.minibatches=1',
  'learner.microbatches=2',
  'learner.remat=full',
  'learner.row_length=768',
  'learner.row_buckets=(8,)',
  'mesh.data=1',
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize('rank', [0, 4])
def test_it_is_trained_and_written_back(tmp_path, rank):
  start = tmp_path / 'start'
  small_tokenizers.write(start, 'qwen', eos_token_id=[1, 2])
  words = tokenizer.load(start)
  params = {k: np.asarray(v) for k, v in parameters.initial(CONFIG, 0).items()}
  policy_files.save(start, policy_files.Policy(CONFIG, params, words))
  result = subprocess.run(
    [
      sys.executable,
      tiny_world.ROOT / 'experiments' / 'train.py',
      f'--config={tiny_world.ROOT}/configs/common.py',
      *(f'--config.{setting}' for setting in SETTINGS),
      f'--config.cold_start.policy={start}',
      f'--config.lora.rank={rank}',
      f'--config.run.directory={tmp_path}',
    ],
    capture_output=True,
    text=True,
    timeout=380,
    check=False,
    env={**os.environ, 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'},
  )
  assert result.returncode == 0, result.stderr
  assert 'a step of 1 x 8 x 768 tokens on 1 devices needs' in result.stderr
  run = tmp_path / 'real'
  records = metrics.read_metrics(run)
  assert [record['step'] for record in records] == [0, 1]
  for record in records:
    assert record['skipped_update'] == 0
    assert 0 < record['kept_mass_mean'] < 1
  # The first batch was sampled from the very weights that it is scored with.
  assert records[0]['log_ratio_abs_mean'] < 1e-4
  trained = policy_files.load(run / 'trained')
  assert trained.config == CONFIG
  moved = [
    name
    for name, value in trained.params.items()
    if not np.array_equal(value, params[name])
  ]
  adapted = [name for name in params if name.split('.')[-2].endswith('_proj')]
  if rank:
    assert (run / 'adapter' / 'adapter_config.json').exists()
    assert moved
    assert set(moved) <= {name for name in adapted if 'linear_attn' not in name}
  else:
    assert set(adapted) <= set(moved)
  fields = json.loads((run / 'trained' / 'config.json').read_text())
  assert fields['architectures'] == ['Qwen3_5ForCausalLM']
  assert fields['max_position_embeddings'] == 777
  for name, content in words.files.items():
    assert (run / 'trained' / name).read_bytes() == content
