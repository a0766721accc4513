import jax
import jax.numpy as jnp
import pytest

from spopp_jax.models import dense, parameters, rematerialization

CONFIG = dense.DecoderConfig(
  vocab_size=16,
  hidden_size=32,
  num_hidden_layers=4,
  num_attention_heads=2,
  num_key_value_heads=2,
  head_dim=16,
  intermediate_size=128,
)
SCHEDULER = 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED'
TOKENS = jax.ShapeDtypeStruct((4, 128), jnp.int32)


@pytest.fixture(scope='module')
def sizes():
  """Bytes of temporaries of a gradient's program, by choice."""
  graphdef, shapes = parameters.graph(CONFIG)

  def loss(choice, params, tokens):
    decoder = parameters.bind(graphdef, params)
    rematerialization.apply(decoder, choice)
    return decoder.hidden(tokens, tokens, tokens).sum()

  def size(choice):
    gradient = jax.grad(lambda *inputs: loss(choice, *inputs))
    # The CPU's usual scheduler begins the second forward pass with the first.
    compiled = (
      jax.jit(gradient)
      .lower(shapes, TOKENS)
      .compile({'xla_cpu_scheduler_type': SCHEDULER})
    )
    return compiled.memory_analysis().temp_size_in_bytes

  return {choice: size(choice) for choice in rematerialization.CHOICES}


def test_what_is_not_kept_takes_no_memory(sizes):
  # In bytes: queries, keys, values and the SwiGLU's three widths of 512
  # tokens, and the attention's [4, 2, 128, 128], of three blocks out of four.
  kept = 3 * 4 * (512 * 3 * 32 + 512 * 3 * 128 + 4 * 2 * 128 * 128)
  assert sizes['full'] < sizes['none'] - kept
  assert 1.5 * sizes['full'] < sizes['dots'] < sizes['none'] / 1.5


def test_an_unknown_choice_is_refused():
  with pytest.raises(ValueError, match=r"remat \('half'\) must be one of"):
    rematerialization.apply(None, 'half')
