"""What the program says a learner needs, without a weight."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PUBLISHED = {
  'alfworld_qwen35_0p8b': 752_393_024,
  'alfworld_qwen35_2b': 1_881_825_088,
  'math_tir_qwen35_0p8b': 752_393_024,
  'tetpo_qwen3_1p7b': 1_720_574_976,
  'tetpo_llama32_3b': 3_212_749_824,
}
DEVICES = {'gpu8': 8, 'tpu16': 16}


def dry_run(tmp_path, config, *overrides, timeout_s=110):
  command = [
    sys.executable,
    ROOT / 'experiments' / 'train.py',
    f'--config={ROOT}/configs/{config}',
    '--config.run.dry_run=True',
    f'--config.run.directory={tmp_path}',
    *(f'--config.{override}' for override in overrides),
  ]
  return subprocess.run(
    command, capture_output=True, text=True, timeout=timeout_s, check=False
  )


def small(tmp_path, *overrides):
  """A Qwen3.5 of four layers on a mesh, from a config.json alone."""
  (tmp_path / 'config.json').write_text(
    """{"model_type": "qwen3_5_text", "vocab_size": 64, "hidden_size": 16,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 32, "tie_word_embeddings": true,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8}"""
  )
  return dry_run(
    tmp_path,
    'quickstart.py',
    f'cold_start.policy={tmp_path}',
    'mesh.data=2',
    'mesh.fsdp=2',
    'learner.remat=full',
    'learner.row_buckets=(4,)',
    'learner.minibatches=1',
    *overrides,
  )


def test_it_tells_sizes_shardings_memory_and_operations(tmp_path):
  result = small(tmp_path)
  assert result.returncode == 0, result.stderr
  text = result.stdout
  assert 'qwen3_5 decoder' in text
  assert '4 devices: data 2, fsdp 2, tensor 1' in text
  rows = {
    line.split(' | ')[0].removeprefix('| '): line.split(' | ')[1:4]
    for line in text.splitlines()
    if line.startswith('| model.')
  }
  assert rows['model.layers.*.linear_attn.in_proj_qkv.weight'] == [
    '3',
    '48 x 16',
    'tensor, fsdp',
  ]
  assert rows['model.layers.*.self_attn.o_proj.weight'] == [
    '1',
    '16 x 16',
    'fsdp, tensor',
  ]
  assert rows['model.norm.weight'] == ['1', '16', '-']
  assert re.search(r'needs [\d.e-]+ GiB a device', text)
  assert re.search(r'takes [\d.]+e\+\d+ operations', text)
  # Keys and values of one layer, states and inputs of three, of 96 slots.
  size = 96 * 4 * (2 * 192 * 8 + 3 * (3 * 48 + 2 * 8 * 8))
  assert f'keep {size / 2**30:.3g} GiB of cache' in text
  assert not (tmp_path / 'quickstart').exists()


def test_a_step_that_does_not_fit_is_refused_with_advice(tmp_path):
  result = small(tmp_path, 'mesh.memory_gib=0.0001')
  assert result.returncode == 1
  assert result.stdout == ''
  assert re.search(r'needs [\d.]+ GiB a device, has 0.0001 GiB', result.stderr)
  assert 'raise mesh.fsdp (now 2)' in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize('devices', DEVICES)
@pytest.mark.parametrize('name', PUBLISHED)
def test_published_experiments_fit_their_devices(tmp_path, name, devices):
  result = dry_run(tmp_path, f'{name}.py:{devices}', timeout_s=480)
  assert result.returncode == 0, result.stderr
  assert f'decoder, {PUBLISHED[name]:,} parameters' in result.stdout
  assert f'{DEVICES[devices]} devices' in result.stdout


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_experiments_need_weights_to_begin(tmp_path, name):
  result = dry_run(tmp_path, f'{name}.py', 'run.dry_run=False')
  assert result.returncode == 2
  words = 'cold_start.policy must name' if 'alf' in name else 'environment.name'
  assert words in result.stderr


def test_unknown_devices_are_refused(tmp_path):
  result = dry_run(tmp_path, 'alfworld_qwen35_2b.py:gpu9')
  assert result.returncode == 2
  assert "'gpu9'" in result.stderr
  assert 'gpu8, tpu16' in result.stderr
