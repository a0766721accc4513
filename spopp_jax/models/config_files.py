"""config.json as Hugging Face writes it <-> the sizes of a decoder.

Both spellings of the rotary settings are read, `rope_theta` with `rope_scaling`
and `rope_parameters`; the first is written, which every reader knows.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from spopp_jax.models import dense, layers

_ARCHITECTURES = {'qwen3': 'Qwen3ForCausalLM', 'llama': 'LlamaForCausalLM'}
# Settings that a decoder of this project has one value of.
_FIXED = {
  'hidden_act': 'silu',
  'attention_bias': False,
  'mlp_bias': False,
  'use_sliding_window': False,
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
  rope = dict(fields.get('rope_parameters') or {})
  rope |= fields.get('rope_scaling') or {}
  theta = rope.pop('rope_theta', None) or fields.get('rope_theta', 10_000.0)
  return dense.DecoderConfig(
    **sizes,
    num_key_value_heads=fields.get('num_key_value_heads') or heads,
    head_dim=fields.get('head_dim') or sizes['hidden_size'] // heads,
    rope_theta=theta,
    rms_norm_eps=fields.get('rms_norm_eps', 1e-6),
    tie_word_embeddings=fields.get('tie_word_embeddings', False),
    qk_norm=kind == 'qwen3',
    rope_scaling=_scaling(rope),
  )


def to_fields(config: dense.DecoderConfig) -> dict[str, Any]:
  """Returns the fields of the config.json of a decoder."""
  fields = dataclasses.asdict(config)
  kind = 'qwen3' if fields.pop('qk_norm') else 'llama'
  if fields['rope_scaling'] is not None:
    fields['rope_scaling'] |= {'rope_type': 'llama3'}
  return {
    'architectures': [_ARCHITECTURES[kind]],
    'model_type': kind,
    **_FIXED,
    **fields,
  }


def _scaling(rope: dict[str, Any]) -> layers.RopeScaling | None:
  kind = rope.pop('rope_type', None) or rope.pop('type', None) or 'default'
  rope.pop('type', None)
  if kind == 'default':
    return None
  if kind != 'llama3':
    raise ValueError(f'rope_type ({kind!r}) must be default or llama3')
  try:
    return layers.RopeScaling(**rope)
  except TypeError as error:
    raise ValueError(f'rope_scaling ({rope}): {error}') from error
