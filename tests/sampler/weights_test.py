"""Snapshots as bytes."""

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from spopp_jax.sampler import errors, weights

PARAMS = {
  'b.kernel': np.arange(6, dtype=np.float32).reshape(2, 3).T,
  'a.bias': np.array([1.5, -2.0], ml_dtypes.bfloat16),
  'c.scalar': np.array(7, np.int32),
}


def test_round_trip_keeps_values_shapes_and_dtypes():
  data = weights.to_bytes(PARAMS)
  result = weights.from_bytes(data)
  assert result.keys() == PARAMS.keys()
  for name, array in PARAMS.items():
    assert result[name].dtype == array.dtype
    np.testing.assert_array_equal(result[name], array)


def test_bytes_do_not_depend_on_the_order_of_names():
  backwards = dict(reversed(PARAMS.items()))
  assert weights.to_bytes(backwards) == weights.to_bytes(PARAMS)


def test_checksum_is_sha256():
  # FIPS 180-2, appendix B.1.
  assert weights.checksum(b'abc') == (
    'ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad'
  )


def test_every_value_changes_the_checksum():
  changed = {**PARAMS, 'c.scalar': np.array(8, np.int32)}
  assert weights.checksum(weights.to_bytes(changed)) != weights.checksum(
    weights.to_bytes(PARAMS)
  )


def test_a_snapshot_gives_its_bytes_from_memory_and_from_a_file(tmp_path):
  in_memory = weights.snapshot(PARAMS, 3)
  data = weights.to_bytes(PARAMS)
  with in_memory.open() as file:
    assert file.read() == data
  assert in_memory[:3] == (3, weights.checksum(data), len(data))
  path = tmp_path / 'params'
  path.write_bytes(data)
  in_file = in_memory._replace(data=None, path=path)
  with in_file.open() as file:
    path.unlink()
    assert file.read() == data
  with pytest.raises(errors.PublicationError, match='must be leased'):
    in_file.open()


def test_other_files_are_refused():
  with pytest.raises(errors.PublicationError, match='no safetensors file'):
    weights.from_bytes(b'not a snapshot at all')


def test_other_dtypes_are_refused_on_both_sides():
  with pytest.raises(ValueError, match='x has dtype complex64; allowed'):
    weights.to_bytes({'x': np.zeros(2, np.complex64)})
  foreign = safetensors.numpy.save({'x': np.zeros(2, np.int8)})
  with pytest.raises(errors.PublicationError, match="type 'I8'"):
    weights.from_bytes(foreign)


def test_empty_snapshot_is_refused():
  with pytest.raises(ValueError, match='params is empty'):
    weights.to_bytes({})
