import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spopp_jax.models import dense, layers, parameters

CONFIG = dense.DecoderConfig(
  vocab_size=23,
  hidden_size=16,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=6,
  intermediate_size=20,
)
LENGTHS = (7, 4, 9, 1, 5)


def make_parameters(config=CONFIG, seed=0):
  """Random parameters; the norms' weights are not one."""
  rng = np.random.default_rng(seed)
  _, shapes = parameters.graph(config)
  return {
    name: rng.normal(
      name.endswith('norm.weight'), shapes[name].shape[-1] ** -0.5, shape
    ).astype(np.float32)
    for name, shape in sorted((k, v.shape) for k, v in shapes.items())
  }


def make_decoder(config=CONFIG, seed=0):
  graphdef, _ = parameters.graph(config)
  return parameters.bind(graphdef, make_parameters(config, seed))


@functools.partial(jax.jit, static_argnames='config')
def forward(config, params, tokens, positions, segments):
  decoder = parameters.bind(parameters.graph(config)[0], params)
  return decoder.logits(decoder.hidden(tokens, positions, segments))


@jax.jit
def extend(params, tokens, positions, caches):
  decoder = parameters.bind(parameters.graph(CONFIG)[0], params)
  hidden, caches = decoder.extend(tokens, positions, caches)
  return decoder.logits(hidden), caches


def sequences(seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, 23, n).astype(np.int32) for n in LENGTHS]


def lay(rows, width=24):
  """Returns tokens, positions and segment_ids of sequences in rows."""
  shape = (len(rows), width)
  tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
  for r, row in enumerate(rows):
    start = 0
    for segment, sequence in enumerate(row, start=1):
      span = slice(start, start + len(sequence))
      tokens[r, span] = sequence
      positions[r, span] = np.arange(len(sequence))
      segments[r, span] = segment
      start = span.stop
  return tokens, positions, segments


def alone(params, sequence, config=CONFIG):
  """Logits [T, V] of one sequence by itself."""
  rows = lay([[sequence], []])
  return np.asarray(forward(config, params, *rows))[0, : len(sequence)]


def test_a_token_does_not_see_later_ones():
  params = make_parameters()
  sequence = sequences()[2]
  before = alone(params, sequence)
  changed = sequence.copy()
  changed[5] = (changed[5] + 1) % 23
  after = alone(params, changed)
  np.testing.assert_array_equal(after[:5], before[:5])
  assert (np.abs(after[5:] - before[5:]).max(axis=1) > 1e-3).all()


def test_packed_rows_equal_one_sequence_a_row():
  params = make_parameters()
  a, b, c, d, e = sequences()
  logits = np.asarray(forward(CONFIG, params, *lay([[a, b], [c, d, e]])))
  for row, start, sequence in (
    (0, 0, a),
    (0, 7, b),
    (1, 0, c),
    (1, 9, d),
    (1, 10, e),
  ):
    np.testing.assert_allclose(
      logits[row, start : start + len(sequence)],
      alone(params, sequence),
      atol=1e-5,
    )


def test_packed_rows_give_the_same_parameter_gradients():
  params = make_parameters()
  a, b, c, d, e = sequences()

  @jax.jit
  @jax.grad
  def gradient(params, tokens, positions, segments):
    logits = forward(CONFIG, params, tokens, positions, segments)
    follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    logprobs = jnp.take_along_axis(
      jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1
    )[..., 0]
    return jnp.where(follows, logprobs, 0).sum()

  packed = gradient(params, *lay([[a, b], [c, d, e]]))
  pairs = [gradient(params, *lay([[x], [y]])) for x, y in ((a, b), (c, d))]
  last = gradient(params, *lay([[e], []]))
  for name in params:
    single = sum(pair[name] for pair in (*pairs, last))
    np.testing.assert_allclose(
      packed[name], single, rtol=1e-5, atol=1e-5, err_msg=name
    )
    assert np.abs(single).max() > 1e-3, name


def test_segments_do_not_leak():
  params = make_parameters()
  a, b, c, _, _ = sequences()
  before = forward(CONFIG, params, *lay([[a, b, c], []]))
  after = forward(CONFIG, params, *lay([[a, (b + 5) % 23, c], []]))
  np.testing.assert_array_equal(after[0, :7], before[0, :7])
  np.testing.assert_array_equal(after[0, 11:20], before[0, 11:20])
  assert np.abs(after[0, 7:11] - before[0, 7:11]).max() > 1e-2


@pytest.mark.parametrize('chunks', [(12,), (1,) * 12, (5, 1, 4, 1, 1)])
def test_cached_decoding_equals_the_full_forward(chunks):
  params = make_parameters()
  tokens = np.random.default_rng(1).integers(0, 23, (2, 12)).astype(np.int32)
  expected = np.stack([alone(params, row) for row in tokens])
  caches = dense.empty_caches(CONFIG, 2, 14, shortest_piece=3)
  start, outputs = 0, []
  for size in chunks:
    span = np.arange(start, start + size, dtype=np.int32)
    logits, caches = extend(
      params, tokens[:, span], np.stack([span, span]), caches
    )
    outputs.append(logits)
    start += size
  np.testing.assert_allclose(
    np.concatenate(outputs, axis=1), expected, atol=1e-5
  )


def test_ragged_starts_and_absent_tokens():
  params = make_parameters()
  _, b, c, _, _ = sequences()  # 4 and 9 tokens
  caches = dense.empty_caches(CONFIG, 2, 10)
  absent = 10
  tokens = np.zeros((2, 7), np.int32)
  positions = np.full((2, 7), absent, np.int32)
  for row, (sequence, head) in enumerate(((b, 3), (c, 7))):
    tokens[row, :head] = sequence[:head]
    positions[row, :head] = np.arange(head)
  _, caches = extend(params, tokens, positions, caches)
  # Row 0 has one token left, row 1 two: the second is absent from row 0.
  tokens = np.array([[b[3], 22], [c[7], c[8]]], np.int32)
  positions = np.array([[3, absent + 5], [7, 8]], np.int32)
  logits, caches = extend(params, tokens, positions, caches)
  np.testing.assert_allclose(logits[0, 0], alone(params, b)[3], atol=1e-5)
  np.testing.assert_allclose(logits[1], alone(params, c)[7:], atol=1e-5)
  for cache in caches:
    (keys,), (values,) = cache
    for array in (keys.swapaxes(2, 3), values):
      written = np.asarray(array).any(axis=(1, 3))  # [B, T]
      np.testing.assert_array_equal(written[0], np.arange(10) < 4)
      np.testing.assert_array_equal(written[1], np.arange(10) < 9)


def test_what_a_cache_holds_at_later_positions_is_not_read():
  params = make_parameters()
  tokens = sequences()[1][None]
  positions = np.arange(4, dtype=np.int32)[None]
  empty = dense.empty_caches(CONFIG, 1, 8)
  clean, _ = extend(params, tokens, positions, empty)
  dirty = jax.tree.map(lambda x: x + 7.0, empty)
  stale, _ = extend(params, tokens, positions, dirty)
  np.testing.assert_array_equal(stale, clean)


def test_query_heads_share_the_key_heads_in_order():
  # Repeating every key and value head for its group of queries gives the
  # multi-head layer that computes the same.
  params = make_parameters()
  repeated = dict(params)
  for name, value in params.items():
    if name.endswith(('k_proj.weight', 'v_proj.weight')):
      heads = value.reshape(2, 6, 16)
      repeated[name] = np.repeat(heads, 2, axis=0).reshape(24, 16)
  full = dataclasses.replace(CONFIG, num_key_value_heads=4)
  parameters.check(full, repeated)
  sequence = sequences()[2]
  np.testing.assert_allclose(
    alone(params, sequence), alone(repeated, sequence, full), atol=1e-5
  )


def test_tied_logits_use_the_embedding_and_untied_their_own_matrix():
  hidden = jnp.asarray(
    np.random.default_rng(0).normal(size=(1, 2, 16)), jnp.float32
  )
  tied = make_decoder()
  embedding = tied.model.embed_tokens.weight[...]
  np.testing.assert_allclose(
    tied.logits(hidden), hidden @ embedding.T, rtol=1e-5, atol=1e-5
  )
  config = dataclasses.replace(CONFIG, tie_word_embeddings=False)
  untied = make_decoder(config)
  logits = untied.logits(hidden)
  np.testing.assert_allclose(
    logits, hidden @ untied.lm_head.weight[...].T, rtol=1e-5, atol=1e-5
  )
  by_embedding = layers.logits(hidden, untied.model.embed_tokens.weight[...])
  assert np.abs(logits - by_embedding).max() > 0.1
  for decoder in (tied, untied):
    np.testing.assert_allclose(
      decoder.logits(hidden),
      hidden @ decoder.output_matrix().T,
      rtol=1e-5,
      atol=1e-5,
    )
  assert untied.logits(hidden.astype(jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize(
  'change, words',
  [
    ({'num_key_value_heads': 3}, r'num_attention_heads \(4\).*\(3\)'),
    ({'head_dim': 5}, r'head_dim \(5\) must be even'),
    ({'hidden_size': 0}, r'hidden_size \(0\) must be positive'),
    ({'rms_norm_eps': -1e-6}, r'rms_norm_eps \(-1e-06\)'),
    ({'rope_theta': float('nan')}, r'rope_theta \(nan\) must be positive'),
    ({'rope_theta': float('inf')}, r'rope_theta \(inf\).*finite'),
  ],
)
def test_impossible_sizes_are_refused(change, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(CONFIG, **change)


def hugging_face_names(num_layers):
  """The names in the safetensors files of Qwen3 with tied embeddings."""
  inside = (
    'input_layernorm',
    'mlp.down_proj',
    'mlp.gate_proj',
    'mlp.up_proj',
    'post_attention_layernorm',
    'self_attn.k_norm',
    'self_attn.k_proj',
    'self_attn.o_proj',
    'self_attn.q_norm',
    'self_attn.q_proj',
    'self_attn.v_proj',
  )
  return {
    'model.embed_tokens.weight',
    'model.norm.weight',
    *(
      f'model.layers.{i}.{name}.weight'
      for i in range(num_layers)
      for name in inside
    ),
  }


def test_parameter_names_are_those_of_hugging_face():
  assert parameters.graph(CONFIG)[1].keys() == hugging_face_names(2)
  untied = dataclasses.replace(CONFIG, tie_word_embeddings=False)
  assert parameters.graph(untied)[1].keys() == {
    *hugging_face_names(2),
    'lm_head.weight',
  }


def test_residual_branches_start_small_with_depth():
  deep = dataclasses.replace(CONFIG, num_hidden_layers=8, hidden_size=64)

  @jax.jit
  def weights():
    block = dense.Block(deep, 0, rngs=nnx.Rngs(0))
    return block.self_attn.o_proj.weight[...], block.mlp.down_proj.weight[...]

  for weight, inputs in zip(weights(), (24, 20), strict=True):
    deviation = float(weight.std()) * inputs**0.5
    np.testing.assert_allclose(deviation, 16**-0.5, rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize('tied', [True, False])
def test_logits_equal_those_of_transformers(tied):
  torch = pytest.importorskip(
    'torch', reason='torch runs the reference model of Hugging Face'
  )
  transformers = pytest.importorskip(
    'transformers', reason='transformers has the reference model'
  )
  config = dataclasses.replace(
    CONFIG, tie_word_embeddings=tied, rope_theta=1e6, head_dim=8
  )
  reference = transformers.Qwen3ForCausalLM(
    transformers.Qwen3Config(
      **{
        **dataclasses.asdict(config),
        'max_position_embeddings': 64,
        'attn_implementation': 'eager',
      }
    )
  ).eval()
  params = make_parameters(config)
  state = {k: torch.tensor(np.asarray(v)) for k, v in params.items()}
  if tied:
    state['lm_head.weight'] = state['model.embed_tokens.weight']
  reference.load_state_dict(state, strict=True)
  tokens = np.random.default_rng(0).integers(0, 23, 24).astype(np.int32)
  with torch.no_grad():
    expected = reference(torch.tensor(tokens[None]).long()).logits[0].numpy()
  got = alone(params, tokens, config)
  np.testing.assert_allclose(got, expected, atol=5e-5)
