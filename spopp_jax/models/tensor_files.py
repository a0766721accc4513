"""Parameters in safetensors files, one or several, as Hugging Face lays them.

A model in several files has `model.safetensors.index.json`, which says which
file holds which parameter.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

DTYPES = {
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype('<f2'),
  'F32': np.dtype('<f4'),
  'F64': np.dtype('<f8'),
  'I32': np.dtype('<i4'),
}
_SINGLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'


def encode(arrays: Mapping[str, np.ndarray]) -> bytes:
  """Returns a safetensors file with arrays in the order of their names.

  Raises:
    ValueError: an array has a dtype that is not in DTYPES.
  """
  for name, array in arrays.items():
    if array.dtype not in DTYPES.values():
      allowed = ', '.join(str(dtype) for dtype in DTYPES.values())
      raise ValueError(f'{name} has dtype {array.dtype}; allowed: {allowed}')
  # The serializer reads raw memory, so strided views must be copied first.
  return safetensors.numpy.save(
    {
      name: np.ascontiguousarray(arrays[name]).reshape(np.shape(arrays[name]))
      for name in sorted(arrays)
    },
    metadata={'format': 'pt'},
  )


def decode(data: bytes) -> dict[str, np.ndarray]:
  """Returns the arrays of a safetensors file, read-only.

  Raises:
    ValueError: the bytes are no such file, or hold another dtype.
  """
  try:
    # safetensors.numpy.load knows no bfloat16.
    return {
      name: np.frombuffer(tensor['data'], DTYPES[tensor['dtype']]).reshape(
        tensor['shape']
      )
      for name, tensor in safetensors.deserialize(data)
    }
  except KeyError as error:
    raise ValueError(
      f'there is an array of type {error}; allowed: {list(DTYPES)}'
    ) from error
  except safetensors.SafetensorError as error:
    raise ValueError(
      f'{len(data)} bytes are no safetensors file ({error})'
    ) from error


def write(
  directory: pathlib.Path,
  params: Mapping[str, np.ndarray],
  *,
  dtype: Any = np.float32,
  max_shard_bytes: int = 5 * 10**9,
) -> None:
  """Writes parameters to a directory, to several files if they are large.

  Args:
    directory: exists.
    params: name -> float array.
    dtype: of the files, for example `jnp.bfloat16`.
    max_shard_bytes: of a file, unless one array alone is larger.

  Raises:
    ValueError: a dtype that safetensors has not.
  """
  dtype = np.dtype(dtype)
  shards: list[list[str]] = [[]]
  filled = total = 0
  for name in sorted(params):
    size = params[name].size * dtype.itemsize
    if shards[-1] and filled + size > max_shard_bytes:
      shards.append([])
      filled = 0
    shards[-1].append(name)
    filled += size
    total += size
  files = [_SINGLE]
  if len(shards) > 1:
    count = len(shards)
    files = [
      f'model-{number:05d}-of-{count:05d}.safetensors'
      for number in range(1, count + 1)
    ]
  for file, names in zip(files, shards, strict=True):
    data = encode({name: params[name].astype(dtype) for name in names})
    (directory / file).write_bytes(data)
  if len(shards) > 1:
    index = {
      'metadata': {'total_size': total},
      'weight_map': {
        name: file
        for file, names in zip(files, shards, strict=True)
        for name in names
      },
    }
    text = json.dumps(index, indent=2, sort_keys=True)
    (directory / _INDEX).write_text(text + '\n')


def read(
  directory: pathlib.Path, dtype: Any = np.float32
) -> dict[str, np.ndarray]:
  """Returns the parameters of a directory by name, in one dtype.

  Raises:
    ValueError: a file is missing, damaged or not what the index says; named.
  """
  if (directory / _SINGLE).exists() or not (directory / _INDEX).exists():
    return _read_file(directory / _SINGLE, dtype)
  path = directory / _INDEX
  try:
    places = json.loads(path.read_text(encoding='utf-8'))['weight_map']
    files = sorted(set(places.values()))
    strange = [file for file in files if pathlib.Path(file).name != file]
  except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
    raise ValueError(f'cannot read the index {path}: {error!r}') from error
  if strange:
    raise ValueError(f'{path}: {strange[0]!r} must be a file beside it')
  params: dict[str, np.ndarray] = {}
  for file in files:
    found = _read_file(directory / file, dtype)
    expected = {name for name, place in places.items() if place == file}
    if found.keys() != expected:
      differing = sorted(found.keys() ^ expected)
      raise ValueError(
        f'{directory / file} and {path} disagree on {", ".join(differing[:5])}'
      )
    params |= found
  return params


def _read_file(path: pathlib.Path, dtype: Any) -> dict[str, np.ndarray]:
  try:
    arrays = decode(path.read_bytes())
  except (OSError, ValueError) as error:
    raise ValueError(f'cannot read the parameters {path}: {error}') from error
  return {name: array.astype(dtype) for name, array in arrays.items()}
