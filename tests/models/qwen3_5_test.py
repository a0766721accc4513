import jax
import jax.numpy as jnp
import numpy as np

from spopp_jax.models import dense, parameters, qwen3_5


def test_layers_that_are_all_linear_decode_as_whole_rows_do():
  config = qwen3_5.Config(
    vocab_size=23,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=12,
    layer_types=('linear_attention',) * 2,
    partial_rotary_factor=0.5,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
  )
  graphdef, _ = parameters.graph(config)
  decoder = parameters.bind(graphdef, parameters.initial(config, 0))
  tokens = jax.random.randint(jax.random.key(0), (1, 9), 0, 23)
  positions = jnp.arange(9)[None]
  whole = decoder.hidden(tokens, positions, jnp.ones((1, 9), jnp.int32))
  caches = dense.empty_caches(config, 1, 9)
  pieces = []
  for start, end in ((0, 4), (4, 5), (5, 9)):
    piece, caches = decoder.extend(
      tokens[:, start:end], positions[:, start:end], caches
    )
    pieces.append(piece)
  np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=1e-5)
