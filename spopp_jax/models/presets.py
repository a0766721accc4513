"""Sizes of published models, as their config.json files give them."""

import dataclasses

from spopp_jax.models import dense, layers, qwen3_5

_LAYERS = 24
_QWEN3_5_0_8B = qwen3_5.Config(
  vocab_size=248_320,
  hidden_size=1024,
  num_hidden_layers=_LAYERS,
  num_attention_heads=8,
  num_key_value_heads=2,
  head_dim=256,
  intermediate_size=3584,
  rope_theta=1e7,
  rms_norm_eps=1e-6,
  tie_word_embeddings=True,
  layer_types=(*[qwen3_5.LINEAR] * 3, qwen3_5.FULL) * (_LAYERS // 4),
  partial_rotary_factor=0.25,
  linear_conv_kernel_dim=4,
  linear_num_key_heads=16,
  linear_num_value_heads=16,
  linear_key_head_dim=128,
  linear_value_head_dim=128,
  max_position_embeddings=262_144,
)
# Name -> sizes; the names are those of the model cards.
MODELS: dict[str, dense.DecoderConfig] = {
  'Qwen3.5-0.8B': _QWEN3_5_0_8B,
  'Qwen3.5-2B': qwen3_5.Config(
    **vars(_QWEN3_5_0_8B) | {'hidden_size': 2048, 'intermediate_size': 6144}
  ),
  'Qwen3-1.7B': dense.DecoderConfig(
    vocab_size=151_936,
    hidden_size=2048,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=6144,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=40_960,
  ),
  'Llama-3.2-3B': dense.DecoderConfig(
    vocab_size=128_256,
    hidden_size=3072,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=8192,
    rope_theta=5e5,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    qk_norm=False,
    rope_scaling=layers.RopeScaling(
      factor=32.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=8192,
    ),
    max_position_embeddings=131_072,
  ),
}


def fits(config: dense.DecoderConfig, name: str) -> bool:
  """Says whether sizes are those of a model, whatever length it is made for."""
  wanted = MODELS[name]
  length = wanted.max_position_embeddings
  return wanted == dataclasses.replace(config, max_position_embeddings=length)
