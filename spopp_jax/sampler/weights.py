"""Policy snapshots as bytes: safetensors, a checksum, and chunks to send."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from spopp_jax.sampler import errors

CHUNK_BYTES = 512 * 1024

_DTYPES = {
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype('<f2'),
  'F32': np.dtype('<f4'),
  'F64': np.dtype('<f8'),
  'I32': np.dtype('<i4'),
}


class Snapshot(NamedTuple):
  """Parameters ready to be sent.

  Attributes:
    version: number of optimizer updates published.
    checksum: sha256 of `data`, 64 hex digits.
    data: bytes of a safetensors file.
  """

  version: int
  checksum: str
  data: bytes


def snapshot(params: Mapping[str, np.ndarray], version: int) -> Snapshot:
  """Serializes parameters; see `to_bytes`."""
  data = to_bytes(params)
  return Snapshot(version, checksum(data), data)


def to_bytes(params: Mapping[str, np.ndarray]) -> bytes:
  """Serializes parameters as a safetensors file.

  Args:
    params: name -> array of any shape, of 16, 32 or 64 bit floats, bfloat16
      or int32.

  Returns:
    The file's bytes; equal parameters give equal bytes in any order of names.

  Raises:
    ValueError: there are no parameters, or one has another dtype.
  """
  if not params:
    raise ValueError('params is empty; a snapshot needs at least one array')
  for name, array in params.items():
    if array.dtype not in _DTYPES.values():
      allowed = ', '.join(str(dtype) for dtype in _DTYPES.values())
      raise ValueError(f'{name} has dtype {array.dtype}; allowed: {allowed}')
  # The serializer reads raw memory, so strided views must be copied first.
  arrays = {
    name: np.ascontiguousarray(params[name]).reshape(np.shape(params[name]))
    for name in sorted(params)
  }
  return safetensors.numpy.save(arrays)


def from_bytes(data: bytes) -> dict[str, np.ndarray]:
  """Reads what `to_bytes` wrote.

  Args:
    data: bytes of a safetensors file.

  Returns:
    name -> array.

  Raises:
    PublicationError: the bytes are no safetensors file, or one with a dtype
      that `to_bytes` does not write.
  """
  try:
    # safetensors.numpy.load knows no bfloat16.
    return {
      name: np.frombuffer(tensor['data'], _DTYPES[tensor['dtype']]).reshape(
        tensor['shape']
      )
      for name, tensor in safetensors.deserialize(data)
    }
  except KeyError as error:
    raise errors.PublicationError(
      f'the snapshot has an array of type {error}; allowed: {list(_DTYPES)}'
    ) from error
  except safetensors.SafetensorError as error:
    raise errors.PublicationError(
      f'{len(data)} bytes are no safetensors file ({error}); publish again'
    ) from error


def checksum(data: bytes | bytearray) -> str:
  """Returns the sha256 of a snapshot's bytes, 64 hex digits."""
  return hashlib.sha256(data).hexdigest()


def assemble(
  pieces: Iterable[bytes], *, size_bytes: int, expected_checksum: str
) -> dict[str, np.ndarray]:
  """Puts a transferred snapshot together and verifies it.

  Args:
    pieces: the bytes in order, in pieces of any length.
    size_bytes: length of all of them.
    expected_checksum: their sha256, 64 hex digits.

  Returns:
    name -> array.

  Raises:
    PublicationError: length or checksum differ, or it is no safetensors file.
  """
  data = bytearray()
  for piece in pieces:
    data += piece
    if len(data) > size_bytes:
      break
  if len(data) != size_bytes:
    more = 'at least ' if len(data) > size_bytes else ''
    raise errors.PublicationError(
      f'{more}{len(data)} bytes arrived of {size_bytes} announced; publish '
      'again'
    )
  arrived = checksum(data)
  if arrived != expected_checksum:
    raise errors.PublicationError(
      f'the sha256 of what arrived is {arrived}, announced was '
      f'{expected_checksum}; publish again'
    )
  return from_bytes(bytes(data))


def chunks(data: bytes) -> Iterator[bytes]:
  """Yields `data` in order in pieces of at most `CHUNK_BYTES`."""
  for start in range(0, len(data), CHUNK_BYTES):
    yield data[start : start + CHUNK_BYTES]
