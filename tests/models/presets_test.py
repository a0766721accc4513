import dataclasses
import math

import pytest

from spopp_jax.models import config_files, dense, parameters, presets


@pytest.mark.parametrize(
  'name, count',
  [
    ('Qwen3.5-0.8B', 752_393_024),
    ('Qwen3.5-2B', 1_881_825_088),
    ('Qwen3-1.7B', 1_720_574_976),
    ('Llama-3.2-3B', 3_212_749_824),
  ],
)
def test_models_have_their_number_of_parameters(name, count):
  _, shapes = parameters.graph(presets.MODELS[name])
  assert sum(math.prod(shape.shape) for shape in shapes.values()) == count


@pytest.mark.parametrize('name', presets.MODELS)
def test_sizes_come_back_from_their_own_config_file(name):
  model = presets.MODELS[name]
  assert config_files.from_fields(config_files.to_fields(model)) == model
  assert presets.fits(model, name)
  longer = dataclasses.replace(model, max_position_embeddings=12)
  assert presets.fits(longer, name)
  for change in ({'rope_theta': 2e6}, {'hidden_size': 64}):
    assert not presets.fits(dataclasses.replace(model, **change), name)


def test_another_family_of_the_same_sizes_is_another_model():
  model = presets.MODELS['Qwen3.5-0.8B']
  fields = {field.name for field in dataclasses.fields(dense.DecoderConfig)}
  plain = dense.DecoderConfig(
    **{k: v for k, v in vars(model).items() if k in fields}
  )
  assert not presets.fits(plain, 'Qwen3.5-0.8B')
