"""Llama-architecture models in GGUF files, dequantized to float32.

It needs the `gguf` package (`pip install spopp_jax[gguf]`), which knows the
file's layout and its quantizations.
"""

import pathlib
from typing import Any, NamedTuple

import numpy as np

from spopp_jax.models import dense, parameters

_ARCHITECTURE = 'llama'
_LAYER_NAMES = {
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'ffn_norm': 'post_attention_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}
_NAMES = {
  'token_embd.weight': 'model.embed_tokens.weight',
  'output_norm.weight': 'model.norm.weight',
  'output.weight': 'lm_head.weight',
}


class GgufModel(NamedTuple):
  """What a file holds.

  Attributes:
    config: sizes.
    params: float32 by Hugging Face's names.
    metadata: every other field of the file, by its GGUF name.
  """

  config: dense.DecoderConfig
  params: dict[str, np.ndarray]
  metadata: dict[str, Any]


def read(path: pathlib.Path) -> GgufModel:
  """Reads a file.

  Raises:
    ValueError: the file is damaged, of another architecture, or a tensor is
      missing, surplus, misshaped or of an unknown quantization; named.
    ModuleNotFoundError: the `gguf` package is not installed.
  """
  gguf = _package()
  try:
    reader = gguf.GGUFReader(path)
  except (OSError, ValueError, KeyError, IndexError) as error:
    raise ValueError(f'cannot read the GGUF file {path}: {error}') from error
  metadata = {key: field.contents() for key, field in reader.fields.items()}
  try:
    config = _config(metadata, {tensor.name for tensor in reader.tensors})
    params = {}
    for tensor in reader.tensors:
      name = _name(tensor.name)
      params[name] = _array(gguf, tensor, name, config)
    parameters.check(config, params)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error
  return GgufModel(config, params, metadata)


def _package() -> Any:
  try:
    import gguf
  except ModuleNotFoundError as error:
    if error.name != 'gguf':
      raise
    raise ModuleNotFoundError(
      'GGUF files are read by the package gguf: pip install spopp_jax[gguf]',
      name='gguf',
    ) from error
  return gguf


def _config(metadata: dict[str, Any], tensors: set[str]) -> dense.DecoderConfig:
  architecture = metadata.get('general.architecture')
  if architecture != _ARCHITECTURE:
    raise ValueError(
      f'general.architecture ({architecture!r}) must be {_ARCHITECTURE!r}'
    )
  if 'rope_freqs.weight' in tensors or metadata.get('llama.rope.scaling.type'):
    raise ValueError(
      'the rotary frequencies are scaled, by factors that do not say how; read '
      'the safetensors of this model'
    )

  def get(name: str) -> Any:
    if f'llama.{name}' not in metadata:
      raise ValueError(f'llama.{name} is missing')
    return metadata[f'llama.{name}']

  heads, width = get('attention.head_count'), get('embedding_length')
  return dense.DecoderConfig(
    vocab_size=get('vocab_size'),
    hidden_size=width,
    num_hidden_layers=get('block_count'),
    num_attention_heads=heads,
    num_key_value_heads=metadata.get('llama.attention.head_count_kv', heads),
    head_dim=metadata.get('llama.rope.dimension_count', width // heads),
    intermediate_size=get('feed_forward_length'),
    rope_theta=float(metadata.get('llama.rope.freq_base', 10_000.0)),
    # As the file has it: a float32, such as 9.999999747e-06.
    rms_norm_eps=float(get('attention.layer_norm_rms_epsilon')),
    tie_word_embeddings='output.weight' not in tensors,
    qk_norm=False,
    max_position_embeddings=metadata.get('llama.context_length', 32_768),
  )


def _name(name: str) -> str:
  if name in _NAMES:
    return _NAMES[name]
  block, _, rest = name.removeprefix('blk.').partition('.')
  kind = rest.removesuffix('.weight')
  if kind not in _LAYER_NAMES or not block.isdecimal():
    raise ValueError(f'surplus {name}: no tensor of a Llama')
  return f'model.layers.{block}.{_LAYER_NAMES[kind]}.weight'


def _array(
  gguf: Any, tensor: Any, name: str, config: dense.DecoderConfig
) -> np.ndarray:
  try:
    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
  except NotImplementedError as error:
    raise ValueError(
      f'{tensor.name} is quantized as {tensor.tensor_type.name}, which is not '
      'read'
    ) from error
  heads = {
    'q_proj': config.num_attention_heads,
    'k_proj': config.num_key_value_heads,
  }.get(name.split('.')[-2])
  if heads is not None:
    # GGUF pairs neighbours in the rotation, Hugging Face the two halves.
    pairs = array.reshape(heads, -1, 2, array.shape[-1])
    array = pairs.swapaxes(1, 2).reshape(array.shape)
  return np.ascontiguousarray(array, np.float32)
