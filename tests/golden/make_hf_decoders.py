"""Makes hf_decoders.npz: what transformers computes for small random decoders.

  python make_hf_decoders.py          # needs torch and transformers

Parameters are normal numbers of numpy's generator, drawn by sorted name. Kept
are the logits of one sequence and, of the mean cross-entropy of its next
tokens, every parameter's gradient as its sum and its root sum of squares.
"""

import pathlib

import numpy as np

VOCAB, LENGTH = 29, 40
SIZES = {
  'vocab_size': VOCAB,
  'hidden_size': 16,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 8,
  'intermediate_size': 20,
  'max_position_embeddings': 64,
}
# Short enough that frequencies of all three bands occur within LENGTH.
LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 16,
}
VARIANTS = {
  'qwen3_tied': {
    'model_type': 'qwen3',
    'tie_word_embeddings': True,
    'rope_theta': 1e6,
    'rms_norm_eps': 1e-6,
  },
  'qwen3_untied': {
    'model_type': 'qwen3',
    'tie_word_embeddings': False,
    'rope_theta': 1e4,
    'rms_norm_eps': 1e-3,
  },
  'smollm2': {
    'model_type': 'llama',
    'tie_word_embeddings': True,
    'rope_theta': 1e5,
    'rms_norm_eps': 1e-5,
  },
  'llama32_tied': {
    'model_type': 'llama',
    'tie_word_embeddings': True,
    'rope_theta': 5e5,
    'rope_scaling': LLAMA3,
    'rms_norm_eps': 1e-5,
  },
  'llama32_untied': {
    'model_type': 'llama',
    'tie_word_embeddings': False,
    'rope_theta': 1e4,
    'rope_scaling': {**LLAMA3, 'factor': 32.0, 'high_freq_factor': 2.0},
    'rms_norm_eps': 1e-5,
  },
  # Every key head serves two value heads; the widths all differ.
  'qwen3_5_tied': {
    'model_type': 'qwen3_5_text',
    'tie_word_embeddings': True,
    'rope_parameters': {
      'rope_type': 'default',
      'rope_theta': 1e6,
      'partial_rotary_factor': 0.5,
    },
    'layer_types': ['linear_attention', 'full_attention'],
    'rms_norm_eps': 1e-6,
    'linear_conv_kernel_dim': 4,
    'linear_num_key_heads': 2,
    'linear_num_value_heads': 4,
    'linear_key_head_dim': 6,
    'linear_value_head_dim': 10,
  },
  'qwen3_5_untied': {
    'model_type': 'qwen3_5_text',
    'tie_word_embeddings': False,
    'rope_parameters': {
      'rope_type': 'default',
      'rope_theta': 1e4,
      'partial_rotary_factor': 0.25,
    },
    'num_hidden_layers': 4,
    'head_dim': 16,
    'layer_types': [*['linear_attention'] * 3, 'full_attention'],
    'rms_norm_eps': 1e-3,
    'linear_conv_kernel_dim': 3,
    'linear_num_key_heads': 3,
    'linear_num_value_heads': 3,
    'linear_key_head_dim': 8,
    'linear_value_head_dim': 4,
  },
}


def fields(variant):
  """Returns the config.json of a variant."""
  return {**SIZES, 'hidden_act': 'silu', **VARIANTS[variant]}


def random_parameters(shapes, seed=0):
  """Returns float32 parameters by name; no weight has its usual value."""
  rng = np.random.default_rng(seed)
  return {
    name: rng.normal(
      name.endswith('norm.weight'), shape[-1] ** -0.5, shape
    ).astype(np.float32)
    for name, shape in sorted(shapes.items())
  }


def tokens():
  return np.random.default_rng(1).integers(VOCAB, size=LENGTH)


def reference(variant):
  """Returns logits [LENGTH, VOCAB] and gradients by name, of transformers."""
  import torch
  import transformers
  from transformers.models.qwen3_5 import modeling_qwen3_5

  # Its chunked form subtracts cumulated decays and loses digits by that.
  modeling_qwen3_5.torch_chunk_gated_delta_rule = (
    modeling_qwen3_5.torch_recurrent_gated_delta_rule
  )
  config = transformers.AutoConfig.for_model(**fields(variant))
  config._attn_implementation = 'eager'
  model = transformers.AutoModelForCausalLM.from_config(config).float()
  tied = VARIANTS[variant]['tie_word_embeddings']
  state = {
    name: value
    for name, value in model.state_dict().items()
    if not (tied and name == 'lm_head.weight')
  }
  params = random_parameters({k: tuple(v.shape) for k, v in state.items()})
  left = model.load_state_dict(
    {k: torch.from_numpy(v) for k, v in params.items()}, strict=False
  )
  assert not left.unexpected_keys
  model.tie_weights()
  ids = torch.from_numpy(tokens())[None]
  logits = model(ids).logits[0]
  torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
  gradients = {
    name: value.grad.numpy()
    for name, value in model.named_parameters()
    if name in params
  }
  return logits.detach().numpy(), gradients


def main():
  arrays = {}
  for variant in VARIANTS:
    logits, gradients = reference(variant)
    arrays[f'{variant}/logits'] = logits
    arrays[f'{variant}/names'] = np.array(sorted(gradients))
    arrays[f'{variant}/gradients'] = np.array(
      [
        [g.sum(dtype=np.float64), np.sqrt(np.square(g, dtype=np.float64).sum())]
        for _, g in sorted(gradients.items())
      ]
    )
  np.savez_compressed(
    pathlib.Path(__file__).with_name('hf_decoders.npz'), **arrays
  )


if __name__ == '__main__':
  main()
