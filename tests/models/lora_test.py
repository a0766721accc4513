import json

import jax
import numpy as np
import pytest

from spopp_jax.models import dense, lora, parameters, tensor_files

CONFIG = dense.DecoderConfig(
  vocab_size=11,
  hidden_size=8,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=4,
  intermediate_size=12,
)
ADAPTERS = lora.Config(rank=3, alpha=6.0, targets=('q_proj', 'down_proj'))
LAYERS = ('model.layers.0', 'model.layers.1')
TOKENS = np.arange(10, dtype=np.int32)[None]


def base():
  return jax.tree.map(np.asarray, parameters.initial(CONFIG, 0))


def trained():
  """Adapters whose B has moved away from 0."""
  rng = np.random.default_rng(3)
  return {
    name: rng.normal(0, 0.3, value.shape).astype('f4')
    for name, value in lora.initial(ADAPTERS, base()).items()
  }


def hidden(params, adapters=None):
  graphdef, _ = parameters.graph(CONFIG)
  decoder = parameters.bind(graphdef, params)
  if adapters is not None:
    lora.attach(decoder, ADAPTERS, adapters)
  return decoder.hidden(TOKENS, TOKENS, np.ones_like(TOKENS))


def test_the_targets_of_every_layer_get_their_shapes():
  found = {k: v.shape for k, v in lora.shapes(ADAPTERS, base()).items()}
  assert found == {
    f'{layer}.{stem}.lora_{part}.weight': shape
    for layer in LAYERS
    for stem, part, shape in (
      ('self_attn.q_proj', 'A', (3, 8)),
      ('self_attn.q_proj', 'B', (8, 3)),
      ('mlp.down_proj', 'A', (3, 12)),
      ('mlp.down_proj', 'B', (8, 3)),
    )
  }


def test_first_adapters_add_nothing_and_follow_the_seed():
  first = lora.initial(ADAPTERS, base())
  assert all(
    (value == 0).all() == name.endswith('B.weight')
    for name, value in first.items()
  )
  params = base()
  np.testing.assert_array_equal(hidden(params, first), hidden(params))
  other = lora.Config(rank=3, alpha=6.0, targets=ADAPTERS.targets, seed=1)
  name = 'model.layers.0.mlp.down_proj.lora_A.weight'
  assert (lora.initial(other, params)[name] != first[name]).all()
  assert np.abs(first[name]).max() <= 12**-0.5


def test_merged_is_the_base_and_the_scaled_product():
  params, adapters = base(), trained()
  merged = lora.merge(ADAPTERS, params, adapters)
  assert merged.keys() == params.keys()
  for name, value in params.items():
    stem = name.removesuffix('.weight')
    expected = value
    if stem.endswith(('q_proj', 'down_proj')):
      up = adapters[f'{stem}.lora_B.weight']
      # alpha / rank = 2.
      expected = value + 2 * (up @ adapters[f'{stem}.lora_A.weight'])
      assert (merged[name] != value).all()
    np.testing.assert_array_equal(merged[name], expected)


def test_attached_adapters_compute_what_the_merged_parameters_do():
  params, adapters = base(), trained()
  attached = hidden(params, adapters)
  merged = hidden(lora.merge(ADAPTERS, params, adapters))
  np.testing.assert_allclose(attached, merged, atol=2e-5)
  assert np.abs(attached - hidden(params)).max() > 0.1


@pytest.mark.parametrize('target', ['q_projection', 'embed_tokens', 'q_norm'])
def test_a_target_that_is_no_matrix_of_a_layer_is_refused(target):
  config = lora.Config(rank=1, alpha=1.0, targets=('q_proj', target))
  with pytest.raises(ValueError, match=rf"\['{target}'\] name no matrix") as e:
    lora.shapes(config, base())
  said = str(e.value).split('it has')[1]
  assert "'down_proj'" in said
  assert 'norm' not in said


@pytest.mark.parametrize(
  'change', [{'rank': 0}, {'alpha': 0.0}, {'targets': ()}]
)
def test_settings_without_meaning_are_refused(change):
  with pytest.raises(ValueError, match='must be at least 1'):
    lora.Config(**{'rank': 1, 'alpha': 1.0, 'targets': ('q_proj',), **change})


def test_saved_adapters_have_the_names_and_settings_of_peft(tmp_path):
  adapters = trained()
  lora.save(tmp_path / 'adapter', ADAPTERS, adapters, base_model='some/base')
  data = (tmp_path / 'adapter/adapter_model.safetensors').read_bytes()
  stored = tensor_files.decode(data)
  assert stored.keys() == {f'base_model.model.{name}' for name in adapters}
  for name, value in adapters.items():
    np.testing.assert_array_equal(stored[f'base_model.model.{name}'], value)
  settings = json.loads((tmp_path / 'adapter/adapter_config.json').read_text())
  assert settings['peft_type'] == 'LORA'
  assert (settings['r'], settings['lora_alpha']) == (3, 6.0)
  assert settings['target_modules'] == ['q_proj', 'down_proj']
  assert settings['base_model_name_or_path'] == 'some/base'
