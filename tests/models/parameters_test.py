import dataclasses
import re

import jax
import numpy as np
import pytest

from spopp_jax.models import dense, layers, parameters

CONFIG = dense.DecoderConfig(
  vocab_size=11,
  hidden_size=8,
  num_hidden_layers=1,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=4,
  intermediate_size=12,
)
SHAPES = {
  'model.embed_tokens.weight': (11, 8),
  'model.layers.0.input_layernorm.weight': (8,),
  'model.layers.0.mlp.down_proj.weight': (8, 12),
  'model.layers.0.mlp.gate_proj.weight': (12, 8),
  'model.layers.0.mlp.up_proj.weight': (12, 8),
  'model.layers.0.post_attention_layernorm.weight': (8,),
  'model.layers.0.self_attn.k_norm.weight': (4,),
  'model.layers.0.self_attn.k_proj.weight': (4, 8),
  'model.layers.0.self_attn.o_proj.weight': (8, 8),
  'model.layers.0.self_attn.q_norm.weight': (4,),
  'model.layers.0.self_attn.q_proj.weight': (8, 8),
  'model.layers.0.self_attn.v_proj.weight': (4, 8),
  'model.norm.weight': (8,),
}


def numbered():
  """Parameters of which no two values are equal."""
  values, start = {}, 0
  for name, shape in SHAPES.items():
    size = int(np.prod(shape))
    values[name] = np.arange(start, start + size, dtype=np.float32)
    values[name] = values[name].reshape(shape)
    start += size
  return values


def test_the_graph_gives_every_name_its_shape():
  _, abstract = parameters.graph(CONFIG)
  assert {name: value.shape for name, value in abstract.items()} == SHAPES
  assert {value.dtype for value in abstract.values()} == {np.dtype('float32')}


def test_initial_parameters_have_these_shapes_and_follow_the_seed():
  first, again, other = (parameters.initial(CONFIG, s) for s in (0, 0, 1))
  assert {name: value.shape for name, value in first.items()} == SHAPES
  for name, value in first.items():
    np.testing.assert_array_equal(value, again[name])
    if not name.endswith('norm.weight'):
      assert (np.asarray(value) != np.asarray(other[name])).all(), name


@pytest.mark.parametrize('seed', [0, 1])
def test_bound_parameters_stand_under_their_names(seed):
  graphdef, _ = parameters.graph(CONFIG)
  values = numbered()
  names = list(values)
  np.random.default_rng(seed).shuffle(names)  # the order does not matter
  decoder = parameters.bind(graphdef, {name: values[name] for name in names})
  layer = decoder.model.layers[0]
  for name, weight in (
    ('model.embed_tokens.weight', decoder.model.embed_tokens.weight),
    ('model.norm.weight', decoder.model.norm.weight),
    ('model.layers.0.mlp.up_proj.weight', layer.mlp.up_proj.weight),
    ('model.layers.0.self_attn.k_norm.weight', layer.self_attn.k_norm.weight),
  ):
    np.testing.assert_array_equal(weight[...], values[name])


def test_eleven_layers_keep_their_order():
  config = dataclasses.replace(CONFIG, num_hidden_layers=11)
  graphdef, abstract = parameters.graph(config)
  values = {
    name: np.zeros(value.shape, np.float32) for name, value in abstract.items()
  }
  for i in range(11):
    values[f'model.layers.{i}.input_layernorm.weight'] += i
  decoder = parameters.bind(graphdef, values)
  for i, block in enumerate(decoder.model.layers):
    np.testing.assert_array_equal(block.input_layernorm.weight[...], i)


def test_binding_is_traceable_and_differentiable():
  graphdef, _ = parameters.graph(CONFIG)

  @jax.jit
  @jax.grad
  def gradient(values):
    return (parameters.bind(graphdef, values).model.norm.weight[...] ** 2).sum()

  values = numbered()
  got = gradient(values)
  assert got.keys() == values.keys()
  for name, value in got.items():
    expected = 2 * values[name] if name == 'model.norm.weight' else 0
    np.testing.assert_array_equal(value, expected)


def test_check_accepts_the_right_and_names_all_that_is_wrong():
  values = numbered()
  parameters.check(CONFIG, values)
  values['lm_head.weight'] = values.pop('model.norm.weight')
  values['model.embed_tokens.weight'] = np.zeros((8, 11), np.float32)
  with pytest.raises(ValueError, match='do not fit') as caught:
    parameters.check(CONFIG, values)
  assert str(caught.value) == (
    'parameters do not fit the model: missing model.norm.weight; '
    'model.embed_tokens.weight has shape (8, 11), the model needs (11, 8); '
    'surplus lm_head.weight'
  )


@pytest.mark.parametrize('name', SHAPES)
def test_check_looks_at_every_shape(name):
  values = numbered()
  values[name] = values[name][None]
  with pytest.raises(ValueError, match=re.escape(name)):
    parameters.check(CONFIG, values)


def test_the_fingerprint_changes_with_every_size():
  changes = {
    'vocab_size': 12,
    'hidden_size': 9,
    'num_hidden_layers': 2,
    'num_attention_heads': 3,
    'num_key_value_heads': 2,
    'head_dim': 6,
    'intermediate_size': 13,
    'rope_theta': 1e6,
    'rms_norm_eps': 1e-5,
    'tie_word_embeddings': False,
    'qk_norm': False,
    'rope_scaling': layers.RopeScaling(8.0, 1.0, 4.0, 16),
    'max_position_embeddings': 9,
  }
  assert changes.keys() == {f.name for f in dataclasses.fields(CONFIG)}
  configs = [
    CONFIG,
    *(dataclasses.replace(CONFIG, **{k: v}) for k, v in changes.items()),
  ]
  prints = [parameters.fingerprint(config) for config in configs]
  assert len(set(prints)) == len(prints)
  assert prints[0] == parameters.fingerprint(dataclasses.replace(CONFIG))
  assert re.fullmatch('[0-9a-f]{64}', prints[0])
