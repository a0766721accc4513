import json
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from spopp_jax.models import tensor_files

INDEX = 'model.safetensors.index.json'


def make_params():
  rng = np.random.default_rng(0)
  shapes = {'a.weight': (4, 8), 'b.weight': (16,), 'c.weight': (3, 5, 2)}
  return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def assert_equal(got, expected):
  assert got.keys() == expected.keys()
  for name, value in expected.items():
    assert got[name].dtype == value.dtype
    np.testing.assert_array_equal(got[name], value)


def test_one_file_is_what_others_read(tmp_path):
  params = make_params()
  tensor_files.write(tmp_path, params)
  assert [path.name for path in tmp_path.iterdir()] == ['model.safetensors']
  assert_equal(
    safetensors.numpy.load_file(tmp_path / 'model.safetensors'), params
  )
  assert_equal(tensor_files.read(tmp_path), params)
  with safetensors.safe_open(tmp_path / 'model.safetensors', 'np') as file:
    assert file.metadata() == {'format': 'pt'}


def test_large_models_are_spread_over_files(tmp_path):
  params = make_params()
  # 128, 64 and 120 bytes; the second fits beside the first, the third not.
  tensor_files.write(tmp_path, params, max_shard_bytes=192)
  first, second = (f'model-0000{n}-of-00002.safetensors' for n in (1, 2))
  index = json.loads((tmp_path / INDEX).read_text())
  assert index == {
    'metadata': {'total_size': 312},
    'weight_map': {'a.weight': first, 'b.weight': first, 'c.weight': second},
  }
  found = safetensors.numpy.load_file(tmp_path / second)
  assert found.keys() == {'c.weight'}
  assert_equal(tensor_files.read(tmp_path), params)
  # An array larger than a file may be has one of its own.
  (tmp_path / 'tiny').mkdir()
  tensor_files.write(tmp_path / 'tiny', params, max_shard_bytes=1)
  assert len(list((tmp_path / 'tiny').glob('model-*-of-00003.*'))) == 3
  assert_equal(tensor_files.read(tmp_path / 'tiny'), params)


def test_short_floats_are_written_and_read(tmp_path):
  params = make_params()
  tensor_files.write(tmp_path, params, dtype=ml_dtypes.bfloat16)
  rounded = {k: v.astype(ml_dtypes.bfloat16) for k, v in params.items()}
  assert_equal(tensor_files.read(tmp_path, ml_dtypes.bfloat16), rounded)
  assert_equal(
    tensor_files.read(tmp_path),
    {k: v.astype(np.float32) for k, v in rounded.items()},
  )


@pytest.mark.parametrize(
  'harm, words',
  [
    ('missing', 'model-00002-of-00002.safetensors: .*No such file'),
    ('cut', 'model-00002-of-00002.safetensors: .* no safetensors file'),
    ('surplus', r'disagree on z\.weight'),
    ('moved', r'disagree on b\.weight'),
    ('outside', r"'\.\./x\.safetensors' must be a file beside it"),
    ('no map', 'cannot read the index .*weight_map'),
    ('no json', 'cannot read the index'),
  ],
)
def test_files_that_do_not_fit_together_are_refused(tmp_path, harm, words):
  tensor_files.write(tmp_path, make_params(), max_shard_bytes=192)
  last = tmp_path / 'model-00002-of-00002.safetensors'
  index = json.loads((tmp_path / INDEX).read_text())
  places = index['weight_map']
  match harm:
    case 'missing':
      last.unlink()
    case 'cut':
      last.write_bytes(last.read_bytes()[:20])
    case 'surplus':
      places['z.weight'] = last.name
    case 'moved':
      places['b.weight'] = last.name
    case 'outside':
      places['b.weight'] = '../x.safetensors'
    case 'no map':
      del index['weight_map']
  text = '{' if harm == 'no json' else json.dumps(index)
  (tmp_path / INDEX).write_text(text)
  with pytest.raises(ValueError, match=words) as caught:
    tensor_files.read(tmp_path)
  assert re.search(re.escape(str(tmp_path)), str(caught.value))


def test_an_empty_directory_and_strange_types_are_refused(tmp_path):
  with pytest.raises(ValueError, match=r'model\.safetensors: .*No such file'):
    tensor_files.read(tmp_path)
  with pytest.raises(ValueError, match='a has dtype uint8'):
    tensor_files.encode({'a': np.zeros(1, np.uint8)})
  data = safetensors.numpy.save({'a': np.zeros(1, np.uint8)})
  with pytest.raises(ValueError, match="'U8'"):
    tensor_files.decode(data)
