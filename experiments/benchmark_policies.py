"""Random policies that every library of a comparison loads from one place."""

import json
import pathlib

import numpy as np

from spopp_jax.models import config_files, dense, parameters, tensor_files

# Both are Qwen3, which transformers and tunix have too; tunix has this base of
# the rotary frequencies whatever its configuration says.
_THETA = 1_000_000.0
SIZES = {
  'tiny': dense.DecoderConfig(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    intermediate_size=192,
    rope_theta=_THETA,
  ),
  'small': dense.DecoderConfig(
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=768,
    rope_theta=_THETA,
  ),
}


def unused_id(config: dense.DecoderConfig) -> int:
  """Returns the id that no prompt has and that pads or ends nothing real."""
  return config.vocab_size - 1


def random_policy(
  config: dense.DecoderConfig, seed: int
) -> dict[str, np.ndarray]:
  """Returns parameters by name, [...] float32.

  The unused id has the logit 0, which the largest of the others is far above.
  """
  params = parameters.initial(config, seed)
  params = {name: np.array(value) for name, value in params.items()}
  params['model.embed_tokens.weight'][unused_id(config)] = 0
  return params


def export(
  directory: pathlib.Path,
  config: dense.DecoderConfig,
  params: dict[str, np.ndarray],
) -> None:
  """Writes config.json and model.safetensors to a directory that exists."""
  fields = config_files.to_fields(config)
  (directory / 'config.json').write_text(json.dumps(fields))
  tensor_files.write(directory, params)


def describe(config: dense.DecoderConfig) -> str:
  """Returns the sizes in words."""
  return (
    f'd = {config.hidden_size}, {config.num_hidden_layers} layers, '
    f'{config.vocab_size:,} ids'
  )
