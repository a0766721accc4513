"""config.json as Hugging Face writes it <-> the sizes of a decoder.

Both spellings of the rotary settings are read, `rope_theta` with `rope_scaling`
and `rope_parameters`. Written is the first, which every reader knows, and for
Qwen3.5 the second, which its readers alone know. Of a Qwen3.5 that also sees
pictures the text decoder is read.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from spopp_jax.models import dense, layers, qwen3_5

_ARCHITECTURES = {
  'qwen3': 'Qwen3ForCausalLM',
  'llama': 'LlamaForCausalLM',
  'qwen3_5_text': 'Qwen3_5ForCausalLM',
}
# Settings that a decoder of this project has one value of.
_FIXED = {
  'hidden_act': 'silu',
  'attention_bias': False,
  'mlp_bias': False,
  'use_sliding_window': False,
  'attn_output_gate': True,
  'mamba_ssm_dtype': 'float32',
}
# Of a Qwen3.5 alone; the defaults are those of its checkpoints.
_DELTA_NET = {
  'linear_conv_kernel_dim': 4,
  'linear_num_key_heads': 16,
  'linear_num_value_heads': 32,
  'linear_key_head_dim': 128,
  'linear_value_head_dim': 128,
}
_SIZES = (
  'vocab_size',
  'hidden_size',
  'num_hidden_layers',
  'num_attention_heads',
  'intermediate_size',
)


def read(path: pathlib.Path) -> dense.DecoderConfig:
  """Reads config.json.

  Raises:
    ValueError: it is no model that can be built here; names file and setting.
  """
  try:
    fields = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    raise ValueError(f'cannot read the model sizes {path}: {error}') from error
  if not isinstance(fields, dict):
    raise ValueError(f'{path}: not a JSON object')
  try:
    return from_fields(fields)
  except (TypeError, ValueError) as error:
    raise ValueError(f'{path}: {error}') from error


def from_fields(fields: Mapping[str, Any]) -> dense.DecoderConfig:
  """Returns the sizes that the fields of a config.json describe.

  Raises:
    ValueError: another kind of model, or a setting that is missing or has no
      counterpart here.
  """
  if fields.get('model_type') == 'qwen3_5':
    text = fields.get('text_config')
    if not isinstance(text, dict):
      raise ValueError(f'text_config ({text!r}) must be an object')
    # As in transformers the outer one counts.
    tied = fields.get('tie_word_embeddings', False)
    fields = {**text, 'tie_word_embeddings': tied}
  kind = fields.get('model_type')
  if kind not in _ARCHITECTURES:
    raise ValueError(
      f'model_type ({kind!r}) must be one of {", ".join(_ARCHITECTURES)}'
    )
  for name, value in _FIXED.items():
    if fields.get(name, value) != value:
      raise ValueError(f'{name} ({fields[name]!r}) must be {value!r}')
  missing = [name for name in _SIZES if name not in fields]
  if missing:
    raise ValueError(f'{", ".join(missing)} must be given')
  sizes = {name: fields[name] for name in _SIZES}
  heads = sizes['num_attention_heads']
  if heads == 0:
    raise ValueError(f'num_attention_heads ({heads}) must be positive')
  rope = _rope(fields)
  theta = rope.pop('rope_theta', None) or fields.get('rope_theta', 10_000.0)
  sizes |= {
    'num_key_value_heads': fields.get('num_key_value_heads') or heads,
    'head_dim': fields.get('head_dim') or sizes['hidden_size'] // heads,
    'rope_theta': theta,
    'rms_norm_eps': fields.get('rms_norm_eps', 1e-6),
    'tie_word_embeddings': fields.get('tie_word_embeddings', False),
    'qk_norm': kind != 'llama',
  }
  if 'max_position_embeddings' in fields:
    sizes['max_position_embeddings'] = fields['max_position_embeddings']
  if kind == 'qwen3_5_text':
    return _delta_net(fields, sizes, rope)
  return dense.DecoderConfig(**sizes, rope_scaling=_scaling(rope))


def to_fields(config: dense.DecoderConfig) -> dict[str, Any]:
  """Returns the fields of the config.json of a decoder."""
  fields = dataclasses.asdict(config)
  kind = 'qwen3' if fields.pop('qk_norm') else 'llama'
  if isinstance(config, qwen3_5.Config):
    kind = 'qwen3_5_text'
    del fields['rope_scaling']
    fields['rope_parameters'] = {
      'rope_type': 'default',
      'rope_theta': fields.pop('rope_theta'),
      'partial_rotary_factor': fields.pop('partial_rotary_factor'),
    }
  elif fields['rope_scaling'] is not None:
    fields['rope_scaling'] |= {'rope_type': 'llama3'}
  fixed = dict(_FIXED)
  if kind != 'qwen3_5_text':
    del fixed['attn_output_gate'], fixed['mamba_ssm_dtype']
  return {
    'architectures': [_ARCHITECTURES[kind]],
    'model_type': kind,
    **fixed,
    **fields,
  }


def from_sizes(values: Mapping[str, Any]) -> dense.DecoderConfig:
  """Returns the sizes that `dataclasses.asdict` gave, also after JSON.

  Raises:
    TypeError, ValueError: they are no sizes of a decoder.
  """
  if 'layer_types' in values:
    types = tuple(values['layer_types'])
    return qwen3_5.Config(**{**values, 'layer_types': types})
  scaling = values.get('rope_scaling')
  if scaling is not None:
    values = {**values, 'rope_scaling': layers.RopeScaling(**scaling)}
  return dense.DecoderConfig(**values)


def _delta_net(
  fields: Mapping[str, Any], sizes: dict[str, Any], rope: dict[str, Any]
) -> qwen3_5.Config:
  # Only pictures have a second and a third position.
  for name in ('mrope_section', 'mrope_interleaved'):
    rope.pop(name, None)
  share = rope.pop('partial_rotary_factor', None)
  if _scaling(rope) is not None:
    raise ValueError('Qwen3.5 has no rope_scaling')
  interval = fields.get('full_attention_interval', 4)
  if type(interval) is not int or interval < 1:
    raise ValueError(f'full_attention_interval ({interval!r}) must be positive')
  types = fields.get('layer_types') or [
    qwen3_5.LINEAR if layer % interval else qwen3_5.FULL
    for layer in range(1, sizes['num_hidden_layers'] + 1)
  ]
  return qwen3_5.Config(
    **sizes,
    layer_types=tuple(types),
    partial_rotary_factor=share or fields.get('partial_rotary_factor', 0.25),
    **{name: fields.get(name, value) for name, value in _DELTA_NET.items()},
  )


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Joins both spellings of the rotary settings, which must not differ."""
  joined: dict[str, Any] = {}
  for name in ('rope_parameters', 'rope_scaling'):
    said = fields.get(name) or {}
    if not isinstance(said, dict):
      raise ValueError(f'{name} ({said!r}) must be an object')
    said = dict(said)
    if 'type' in said:
      said.setdefault('rope_type', said.pop('type'))
    for key, value in said.items():
      if joined.setdefault(key, value) != value:
        raise ValueError(
          f'rope_scaling.{key} ({value!r}) must be that of rope_parameters '
          f'({joined[key]!r})'
        )
  return joined


def _scaling(rope: dict[str, Any]) -> layers.RopeScaling | None:
  kind = rope.pop('rope_type', None) or 'default'
  if kind == 'default':
    return None
  if kind != 'llama3':
    raise ValueError(f'rope_type ({kind!r}) must be default or llama3')
  try:
    return layers.RopeScaling(**rope)
  except TypeError as error:
    raise ValueError(f'rope_scaling ({rope}): {error}') from error
