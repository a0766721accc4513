"""Decoders against transformers' own, on small random parameters."""

import dataclasses
import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from spopp_jax.models import (
  config_files,
  dense,
  layers,
  parameters,
  tensor_files,
)

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
sys.path.insert(0, str(GOLDEN))
import make_hf_decoders  # noqa: E402

VARIANTS = tuple(make_hf_decoders.VARIANTS)
TOKENS = make_hf_decoders.tokens().astype(np.int32)
LENGTH = len(TOKENS)


@pytest.fixture(scope='module')
def recorded():
  with np.load(GOLDEN / 'hf_decoders.npz') as arrays:
    return dict(arrays)


def decoder_of(variant):
  config = config_files.from_fields(make_hf_decoders.fields(variant))
  graphdef, abstract = parameters.graph(config)
  shapes = {name: value.shape for name, value in abstract.items()}
  return config, graphdef, make_hf_decoders.random_parameters(shapes)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(graphdef, params, rows, positions, segments):
  decoder = parameters.bind(graphdef, params)
  return decoder.logits(decoder.hidden(rows, positions, segments))


@functools.partial(jax.jit, static_argnums=0)
def extend(graphdef, params, rows, positions, caches):
  decoder = parameters.bind(graphdef, params)
  hidden, caches = decoder.extend(rows, positions, caches)
  return decoder.logits(hidden), caches


@pytest.mark.parametrize('variant', VARIANTS)
def test_logits_and_gradients_are_those_of_transformers(variant, recorded):
  _, graphdef, params = decoder_of(variant)
  row, positions = TOKENS[None], np.arange(LENGTH, dtype=np.int32)[None]

  def loss(params):
    logits = logits_of(graphdef, params, row, positions, np.ones_like(row))[0]
    chosen = jnp.take_along_axis(
      jax.nn.log_softmax(logits[:-1]), TOKENS[1:, None], axis=1
    )
    return -chosen.mean(), logits

  (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(
    params
  )
  expected = recorded[f'{variant}/logits']
  assert np.abs(expected).max() > 2  # not near 0, where all models agree
  np.testing.assert_allclose(logits, expected, atol=5e-5)
  assert sorted(gradients) == recorded[f'{variant}/names'].tolist()
  sums = [
    [g.sum(), np.sqrt((g**2).sum())]
    for _, g in sorted((k, np.float64(v)) for k, v in gradients.items())
  ]
  wanted = recorded[f'{variant}/gradients']
  size = wanted[:, 1:]  # a sum cancels, so its digits are those of the size
  assert (np.abs(sums - wanted) < 1e-4 * size + 5e-6).all()


@pytest.mark.parametrize('variant', VARIANTS)
def test_packed_rows_and_cached_decoding_give_the_same(variant, recorded):
  config, graphdef, params = decoder_of(variant)
  expected = recorded[f'{variant}/logits']
  # Behind another segment in one row.
  other = 7
  row = np.concatenate([TOKENS[:other], TOKENS])[None]
  segments = np.repeat([1, 2], [other, LENGTH])[None].astype(np.int32)
  positions = np.concatenate([np.arange(other), np.arange(LENGTH)])[None]
  packed = logits_of(
    graphdef, params, row, positions.astype(np.int32), segments
  )
  np.testing.assert_allclose(packed[0, other:], expected, atol=5e-5)
  np.testing.assert_allclose(packed[0, :other], expected[:other], atol=5e-5)
  # In pieces through a cache.
  caches = dense.empty_caches(config, 1, LENGTH, shortest_piece=16)
  pieces = []
  for start, end in ((0, 17), (17, 18), (18, 33), (33, LENGTH)):
    positions = np.arange(start, end, dtype=np.int32)[None]
    logits, caches = extend(
      graphdef, params, TOKENS[None, start:end], positions, caches
    )
    pieces.append(logits[0])
  np.testing.assert_allclose(np.concatenate(pieces), expected, atol=5e-5)


@pytest.mark.parametrize(
  'variant, change',
  [
    *((variant, {'rope_theta': 2e4}) for variant in VARIANTS),
    ('llama32_tied', {'rope_scaling': None}),
    (
      'llama32_untied',
      {'rope_scaling': layers.RopeScaling(8.0, 1.0, 2.0, 16)},
    ),
    ('qwen3_untied', {'rms_norm_eps': 1e-5}),
  ],
)
def test_every_setting_shows_in_the_logits(variant, change, recorded):
  config, _, params = decoder_of(variant)
  graphdef, _ = parameters.graph(dataclasses.replace(config, **change))
  positions = np.arange(LENGTH, dtype=np.int32)[None]
  logits = logits_of(
    graphdef, params, TOKENS[None], positions, np.ones_like(positions)
  )
  assert np.abs(logits[0] - recorded[f'{variant}/logits']).max() > 1e-3


def test_the_record_is_what_transformers_computes_now(recorded):
  pytest.importorskip('torch')
  pytest.importorskip('transformers')
  for variant in VARIANTS:
    logits, gradients = make_hf_decoders.reference(variant)
    np.testing.assert_allclose(logits, recorded[f'{variant}/logits'], atol=1e-5)
    assert sorted(gradients) == recorded[f'{variant}/names'].tolist()


@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize('variant', VARIANTS)
def test_transformers_reads_what_is_exported(
  tmp_path, variant, dtype, recorded
):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  config, graphdef, params = decoder_of(variant)
  fields = config_files.to_fields(config)
  (tmp_path / 'config.json').write_text(json.dumps(fields))
  tensor_files.write(tmp_path, params, dtype=dtype, max_shard_bytes=2_000)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, dtype=torch.float32, attn_implementation='eager'
  )
  with torch.no_grad():
    theirs = model(torch.from_numpy(TOKENS[None].astype(np.int64))).logits[0]
  positions = np.arange(LENGTH, dtype=np.int32)[None]
  ours = logits_of(
    graphdef,
    tensor_files.read(tmp_path),
    TOKENS[None],
    positions,
    np.ones_like(positions),
  )
  np.testing.assert_allclose(ours[0], theirs.numpy(), atol=5e-5)
  if dtype == np.float32:
    np.testing.assert_allclose(
      theirs.numpy(), recorded[f'{variant}/logits'], atol=5e-5
    )


@pytest.mark.parametrize('variant', VARIANTS)
def test_sizes_come_back_from_either_spelling(variant):
  config, _, _ = decoder_of(variant)
  fields = config_files.to_fields(config)
  assert config_files.from_fields(json.loads(json.dumps(fields))) == config
  if 'rope_parameters' in fields:
    fields |= fields.pop('rope_parameters')
  else:
    rope = {**(fields.pop('rope_scaling') or {'rope_type': 'default'})}
    rope['rope_theta'] = fields.pop('rope_theta')
    fields['rope_parameters'] = rope
  assert config_files.from_fields(fields) == config
  assert config_files.from_sizes(dataclasses.asdict(config)) == config
