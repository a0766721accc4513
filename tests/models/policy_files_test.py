import dataclasses
import json
import re
import sys

import numpy as np
import pytest
import safetensors.numpy
import small_tokenizers

from spopp_jax.models import (
  config_files,
  dense,
  parameters,
  policy_files,
  qwen3_5,
  tensor_files,
  tokenizer,
  word_tokenizer,
)


def make_policy(vocab_size=None, words=None):
  words = words or word_tokenizer.WordTokenizer.build(
    ['go to desk 1, then look.']
  )
  config = dense.DecoderConfig(
    vocab_size=vocab_size or words.vocab_size,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=12,
    rope_theta=1e6,
    tie_word_embeddings=False,
  )
  rng = np.random.default_rng(0)
  _, abstract = parameters.graph(config)
  params = {
    name: rng.normal(size=value.shape).astype(np.float32)
    for name, value in abstract.items()
  }
  return policy_files.Policy(config, params, words)


@pytest.fixture
def saved(tmp_path):
  directory = tmp_path / 'a' / 'policy'
  policy_files.save(directory, make_policy())
  return directory


def test_every_bit_comes_back(saved):
  policy, got = make_policy(), policy_files.load(saved)
  assert got.config == policy.config
  assert got.tokenizer.fingerprint == policy.tokenizer.fingerprint
  assert got.params.keys() == policy.params.keys()
  for name, value in policy.params.items():
    assert got.params[name].dtype == value.dtype
    assert got.params[name].tobytes() == value.tobytes()
  assert {path.name for path in saved.iterdir()} == {
    'config.json',
    'model.safetensors',
    'tokenizer.json',
    'tokenizer_config.json',
  }


def test_tokenizer_files_go_through_unchanged(tmp_path):
  transformers = pytest.importorskip('transformers')
  source, exported = tmp_path / 'source', tmp_path / 'exported'
  built = small_tokenizers.write(source, 'qwen', eos_token_id=[366, 364])
  # Files that this project does not read are someone's too.
  (source / 'special_tokens_map.json').write_text('{"eos_token":"<|im_end|>"}')
  (source / 'README.md').write_text('not a file of the tokenizer')
  policy = make_policy(words=tokenizer.load(source))
  policy_files.save(exported, policy)
  policy_files.save(tmp_path / 'again', policy_files.load(exported))
  for directory in (exported, tmp_path / 'again'):
    assert {path.name for path in directory.iterdir()} == {
      *('config.json', 'model.safetensors', 'tokenizer.json'),
      *('tokenizer_config.json', 'special_tokens_map.json'),
      *('chat_template.jinja', 'generation_config.json'),
    }
    for path in source.glob('*.j*'):
      assert (directory / path.name).read_bytes() == path.read_bytes()
  theirs = transformers.AutoTokenizer.from_pretrained(exported)
  text = 'You are <think>\nZürich</think> here<|im_end|>'
  assert theirs.encode(text) == built.encode(text).ids
  assert theirs.eos_token == '<|im_end|>'
  assert theirs.chat_template == small_tokenizers.TEMPLATE
  settings = transformers.GenerationConfig.from_pretrained(exported)
  assert settings.eos_token_id == [366, 364]
  got = policy_files.load(exported).tokenizer
  assert got.fingerprint == policy.tokenizer.fingerprint
  assert got.stop_ids == (364, 366)


def test_an_exported_template_renders(tmp_path):
  transformers = pytest.importorskip('transformers')
  pytest.importorskip('jinja2')
  small_tokenizers.write(tmp_path / 'source', 'qwen')
  words = tokenizer.load(tmp_path / 'source')
  policy_files.save(tmp_path / 'exported', make_policy(words=words))
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'exported')
  assert theirs.apply_chat_template(
    [{'role': 'user', 'content': 'Hi'}], tokenize=False
  ) == ('<|im_start|>user\nHi<|im_end|>\n')


def test_a_missing_transformers_is_named(tmp_path, monkeypatch):
  pytest.importorskip('transformers')
  small_tokenizers.write(tmp_path / 'source', 'qwen')
  words = tokenizer.load(tmp_path / 'source')
  policy_files.save(tmp_path / 'exported', make_policy(words=words))
  monkeypatch.setitem(sys.modules, 'transformers', None)
  with pytest.raises(
    policy_files.PolicyError, match=r'pip install spopp_jax\[models\]'
  ):
    policy_files.load(tmp_path / 'exported')


def test_views_are_saved_as_they_read(tmp_path):
  # safetensors writes a buffer as it lies in memory.
  policy = make_policy()
  name = 'model.layers.0.mlp.up_proj.weight'
  turned = np.asfortranarray(policy.params[name])
  assert not turned.flags['C_CONTIGUOUS']
  policy_files.save(
    tmp_path, policy._replace(params={**policy.params, name: turned})
  )
  np.testing.assert_array_equal(
    policy_files.load(tmp_path).params[name], policy.params[name]
  )


def test_a_missing_directory_says_how_to_make_one(tmp_path):
  with pytest.raises(
    policy_files.PolicyError, match=r'nowhere is not.*cold_start\.py'
  ):
    policy_files.load(tmp_path / 'nowhere')


@pytest.mark.parametrize(
  'name', ['config.json', 'model.safetensors', 'tokenizer.json']
)
@pytest.mark.parametrize('harm', ['missing', 'cut', 'empty', 'binary'])
def test_a_broken_file_is_named(saved, name, harm):
  path = saved / name
  content = path.read_bytes()
  path.unlink()
  if harm != 'missing':
    half = content[: len(content) // 2]
    new = {'cut': half, 'empty': b'', 'binary': b'\xff\xfe' * 99}[harm]
    path.write_bytes(new)
  with pytest.raises(policy_files.PolicyError, match=re.escape(str(path))):
    policy_files.load(saved)


@pytest.mark.parametrize(
  'change, words',
  [
    ({'model_type': 'gpt2'}, r"model_type \('gpt2'\) must be one of qwen3, ll"),
    ({'model_type': None}, r'model_type \(None\) must be one of'),
    ({'model_type': 'llama'}, 'surplus model.layers.0.self_attn.k_norm'),
    ({'hidden_act': 'gelu'}, r"hidden_act \('gelu'\) must be 'silu'"),
    ({'attention_bias': True}, 'attention_bias'),
    ({'rope_scaling': {'rope_type': 'yarn'}}, 'must be default or llama3'),
    ({'rope_scaling': {'type': 'llama3', 'factor': 8.0}}, 'low_freq_factor'),
    ({'head_dim': 3}, r'head_dim \(3\) must be even'),
    ({'hidden_size': -8}, r'hidden_size \(-8\)'),
    ({'hidden_size': '8'}, r"hidden_size \('8'\) must be int"),
    ({'hidden_size': 8.0}, r'hidden_size \(8.0\) must be int'),
    ({'rope_theta': None}, r'rope_theta \(None\) must be int or float'),
    ({'tie_word_embeddings': 1}, r'\(1\) must be bool'),
  ],
)
def test_sizes_that_make_no_model_are_refused(saved, change, words):
  path = saved / 'config.json'
  path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
  with pytest.raises(policy_files.PolicyError, match=words) as caught:
    policy_files.load(saved)
  assert str(saved) in str(caught.value)


def test_a_config_that_is_no_object_is_refused(saved):
  (saved / 'config.json').write_text('[1, 2]')
  with pytest.raises(policy_files.PolicyError, match=r'config\.json'):
    policy_files.load(saved)


def test_parameters_of_another_model_are_refused(saved):
  path = saved / 'model.safetensors'
  params = safetensors.numpy.load_file(path)
  params['model.norm.weight'] = np.ones(9, np.float32)
  del params['lm_head.weight']
  safetensors.numpy.save_file(params, path)
  with pytest.raises(policy_files.PolicyError) as caught:
    policy_files.load(saved)
  for words in (str(saved), 'missing lm_head.weight', 'shape (9,)'):
    assert words in str(caught.value)


@pytest.mark.parametrize('value', [np.nan, -np.inf])
def test_parameters_that_are_no_numbers_are_refused(saved, value):
  path = saved / 'model.safetensors'
  params = safetensors.numpy.load_file(path)
  params['model.norm.weight'][1] = value
  safetensors.numpy.save_file(params, path)
  with pytest.raises(
    policy_files.PolicyError, match=r'first model\.norm\.weight'
  ):
    policy_files.load(saved)


def test_a_tokenizer_may_not_exceed_the_vocabulary(tmp_path):
  size = make_policy().tokenizer.vocab_size
  policy_files.save(tmp_path / 'more', make_policy(size + 3))  # padded is fine
  assert policy_files.load(tmp_path / 'more').config.vocab_size == size + 3
  policy_files.save(tmp_path / 'less', make_policy(size - 1))
  with pytest.raises(
    policy_files.PolicyError,
    match=f'less: the tokenizer has {size} ids.*{size - 1}',
  ):
    policy_files.load(tmp_path / 'less')


def qwen3_5_policy():
  config = qwen3_5.Config(
    vocab_size=make_policy().config.vocab_size,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=12,
    layer_types=('linear_attention', 'full_attention'),
    partial_rotary_factor=0.5,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
  )
  params = parameters.initial(config, 0)
  words = make_policy().tokenizer
  return policy_files.Policy(
    config, {k: np.asarray(v) for k, v in params.items()}, words
  )


def test_a_qwen3_5_that_sees_pictures_gives_its_text_decoder(tmp_path):
  policy = qwen3_5_policy()
  policy_files.save(tmp_path, policy)
  path = tmp_path / 'config.json'
  text = json.loads(path.read_text())
  tied = text.pop('tie_word_embeddings')
  whole = {
    'model_type': 'qwen3_5',
    'architectures': ['Qwen3_5ForConditionalGeneration'],
    'tie_word_embeddings': tied,
    'text_config': text,
    'vision_config': {'depth': 2},
  }
  path.write_text(json.dumps(whole))
  arrays = {
    name.replace('model.', 'model.language_model.', 1): value
    for name, value in policy.params.items()
  }
  extra = {'model.visual.blocks.0.weight', 'mtp.layers.0.mlp.up_proj.weight'}
  arrays |= {name: np.zeros((2, 3), np.float32) for name in extra}
  tensor_files.write(tmp_path, arrays)
  got = policy_files.load(tmp_path)
  assert got.config == policy.config
  assert got.params.keys() == policy.params.keys()
  for name, value in policy.params.items():
    np.testing.assert_array_equal(got.params[name], value)


def pictures(tied, text_tied, **text):
  fields = config_files.to_fields(qwen3_5_policy().config)
  return {
    'model_type': 'qwen3_5',
    'tie_word_embeddings': tied,
    'text_config': fields | {'tie_word_embeddings': text_tied} | text,
  }


@pytest.mark.parametrize('tied', [True, False])
def test_whether_words_are_tied_is_said_outside_of_the_text(tied):
  config = config_files.from_fields(pictures(tied, not tied))
  assert config.tie_word_embeddings == tied


@pytest.mark.parametrize(
  'fields, words',
  [
    ({'model_type': 'qwen3_5', 'text_config': None}, r'text_config \(None\)'),
    (
      pictures(True, True, layer_types=None, full_attention_interval=0),
      r'full_attention_interval \(0\)',
    ),
    (pictures(True, True, num_attention_heads=0), r'heads \(0\) must be'),
    (pictures(True, True, rope_parameters=[1]), r'rope_parameters \(\[1\]\)'),
    (
      pictures(True, True, rope_scaling={'type': 'linear', 'factor': 2.0}),
      r"rope_scaling.rope_type \('linear'\) must be that of rope_parameters",
    ),
  ],
)
def test_settings_that_contradict_or_are_none_are_named(fields, words):
  with pytest.raises(ValueError, match=words):
    config_files.from_fields(fields)


def test_what_ends_a_turn_is_in_the_file(tmp_path):
  policy_files.save(tmp_path, make_policy())
  fields = json.loads((tmp_path / 'config.json').read_text())
  assert fields['eos_token_id'] == [make_policy().tokenizer.end_id]


@pytest.mark.parametrize(
  'change, words',
  [
    ({'layer_types': ('linear_attention',)}, 'for each of 2 layers'),
    ({'layer_types': ('full_attention', 'window')}, 'window'),
    ({'partial_rotary_factor': 0.3}, r'partial_rotary_factor \(0.3\)'),
    ({'linear_num_value_heads': 3, 'linear_num_key_heads': 2}, 'multiple of'),
    ({'qk_norm': False}, 'normalizes'),
    ({'linear_key_head_dim': 0}, r'linear_key_head_dim \(0\)'),
  ],
)
def test_impossible_sizes_of_a_qwen3_5_are_refused(change, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(qwen3_5_policy().config, **change)
