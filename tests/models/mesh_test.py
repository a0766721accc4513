import logging

import jax
import numpy as np
import pytest

from spopp_jax.models import dense, mesh, parameters

P = jax.sharding.PartitionSpec
OUT_IN, IN_OUT, WHOLE = P('tensor', 'fsdp'), P('fsdp', 'tensor'), None
LAYER = 'model.layers.11.'


@pytest.fixture(scope='module')
def one():
  return mesh.DeviceMesh()


def spec(one, name, shape):
  shapes = {name: jax.ShapeDtypeStruct(shape, np.float32)}
  return one.parameters(shapes)[name].spec


@pytest.mark.parametrize(
  'name, shape, expected',
  [
    ('model.embed_tokens.weight', (24, 8), OUT_IN),
    ('lm_head.weight', (24, 8), OUT_IN),
    (LAYER + 'self_attn.q_proj.weight', (16, 8), OUT_IN),
    (LAYER + 'self_attn.k_proj.weight', (8, 8), OUT_IN),
    (LAYER + 'self_attn.v_proj.weight', (8, 8), OUT_IN),
    (LAYER + 'self_attn.o_proj.weight', (8, 16), IN_OUT),
    (LAYER + 'mlp.gate_proj.weight', (12, 8), OUT_IN),
    (LAYER + 'mlp.up_proj.weight', (12, 8), OUT_IN),
    (LAYER + 'mlp.down_proj.weight', (8, 12), IN_OUT),
    (LAYER + 'self_attn.q_norm.weight', (4,), WHOLE),
    (LAYER + 'input_layernorm.weight', (8,), WHOLE),
    ('model.norm.weight', (8,), WHOLE),
    (LAYER + 'linear_attn.in_proj_qkv.weight', (24, 8), OUT_IN),
    (LAYER + 'linear_attn.in_proj_z.weight', (8, 8), OUT_IN),
    (LAYER + 'linear_attn.in_proj_a.weight', (2, 8), OUT_IN),
    (LAYER + 'linear_attn.in_proj_b.weight', (2, 8), OUT_IN),
    (LAYER + 'linear_attn.out_proj.weight', (8, 8), IN_OUT),
    (LAYER + 'linear_attn.conv1d.weight', (24, 1, 4), WHOLE),
    (LAYER + 'self_attn.q_proj.lora_A.weight', (2, 8), P(None, 'fsdp')),
    (LAYER + 'self_attn.q_proj.lora_B.weight', (16, 2), P('tensor', None)),
    (LAYER + 'mlp.down_proj.lora_A.weight', (2, 12), P(None, 'tensor')),
    (LAYER + 'mlp.down_proj.lora_B.weight', (8, 2), P('fsdp', None)),
    (LAYER + 'linear_attn.A_log', (2,), WHOLE),
    (LAYER + 'linear_attn.dt_bias', (2,), WHOLE),
    (LAYER + 'linear_attn.norm.weight', (4,), WHOLE),
  ],
)
def test_the_rule_of_every_name(one, name, shape, expected):
  found = spec(one, name, shape)
  assert found == (P(*(None,) * len(shape)) if expected is None else expected)


@pytest.mark.parametrize('tied', [True, False])
def test_every_parameter_of_a_decoder_has_a_rule(one, tied):
  config = dense.DecoderConfig(8, 8, 1, 2, 1, 4, 8, tie_word_embeddings=tied)
  _, shapes = parameters.graph(config)
  assert one.parameters(shapes).keys() == shapes.keys()


@pytest.mark.parametrize(
  'name, shape',
  [
    ('model.layers.0.self_attn.w_proj.weight', (8, 8)),
    ('model.layers.0.self_attn.q_proj.weight', (8, 8, 8)),
    ('model.layers.0.self_attn.q_proj.bias', (8,)),
    ('model.layers.0.new_embed_tokens.weight', (8, 8)),
  ],
)
def test_a_parameter_without_a_rule_is_refused_by_name(one, name, shape):
  with pytest.raises(ValueError, match=name):
    spec(one, name, shape)


@pytest.mark.parametrize(
  'sizes, devices, expected',
  [
    ((0, 1, 1), 8, (8, 1, 1)),
    ((0, 2, 2), 8, (2, 2, 2)),
    ((4, 0, 1), 8, (4, 2, 1)),
    ((1, 2, 0), 8, (1, 2, 4)),
    ((2, 1, 1), 8, (2, 1, 1)),
    ((4, 2, 1), 8, (4, 2, 1)),
  ],
)
def test_the_rest_goes_to_the_axis_of_size_0(sizes, devices, expected):
  assert mesh.resolve(mesh.Sizes(*sizes), devices) == expected


@pytest.mark.parametrize(
  'sizes, words',
  [
    ((0, 0, 1), 'one of them 0'),
    ((-1, 1, 1), 'mesh.data .-1.'),
    ((0, 3, 1), 'divide the number of devices, 8'),
    ((4, 2, 2), 'be at most the number of devices, 8'),
    ((0, 16, 1), 'divide the number of devices, 8'),
  ],
)
def test_sizes_that_the_devices_do_not_have_are_refused(sizes, words):
  with pytest.raises(ValueError, match=words):
    mesh.resolve(mesh.Sizes(*sizes), 8)


def test_an_optimizers_state_lies_like_its_parameters(one):
  shapes = {'model.embed_tokens.weight': np.zeros((6, 4), np.float32)}
  parts = one.parameters(shapes)
  tree = {'mu': shapes, 'count': np.zeros(()), 'nu': [shapes]}
  found = one.like_parameters(tree, parts)
  assert found['mu']['model.embed_tokens.weight'].spec == OUT_IN
  assert found['nu'][0]['model.embed_tokens.weight'].spec == OUT_IN
  assert found['count'].spec == P()


def test_nothing_is_logged_where_all_divides(one, caplog):
  with caplog.at_level(logging.WARNING):
    spec(one, 'lm_head.weight', (23, 7))
  assert caplog.records == []


def test_without_a_mesh_activations_are_left_alone():
  values = np.ones((3, 2), np.float32)
  assert mesh.by_rows(values) is values
  assert mesh.by_words(values) is values
