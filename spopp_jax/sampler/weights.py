"""Policy snapshots as bytes: safetensors and a checksum."""

import hashlib
import io
import pathlib
from collections.abc import Mapping
from typing import BinaryIO, NamedTuple

import numpy as np

from spopp_jax.models import tensor_files
from spopp_jax.sampler import errors


class Snapshot(NamedTuple):
  """Parameters ready to be sent, in memory or in a file.

  Attributes:
    version: number of optimizer updates published.
    checksum: sha256 of its bytes, 64 hex digits.
    size_bytes: number of its bytes, those of a safetensors file.
    data: the bytes; None when they are in `path`.
    path: the file; None when they are in `data`.
  """

  version: int
  checksum: str
  size_bytes: int
  data: bytes | None = None
  path: pathlib.Path | None = None

  def open(self) -> BinaryIO:
    """Opens the bytes; what is open stays readable when the file goes.

    Raises:
      PublicationError: the file is gone.
    """
    if self.path is None:
      assert self.data is not None
      return io.BytesIO(self.data)
    try:
      return self.path.open('rb')
    except OSError as error:
      raise errors.PublicationError(
        f'cannot read {self.path} of version {self.version} ({error}); a '
        'version must be leased as long as it may be sent'
      ) from error


def snapshot(params: Mapping[str, np.ndarray], version: int) -> Snapshot:
  """Serializes parameters in memory; see `to_bytes`."""
  data = to_bytes(params)
  return Snapshot(version, checksum(data), len(data), data=data)


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
  return tensor_files.encode(params)


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
    return tensor_files.decode(data)
  except ValueError as error:
    raise errors.PublicationError(f'{error}; publish again') from error


def checksum(data: bytes) -> str:
  """Returns the sha256 of a snapshot's bytes, 64 hex digits."""
  return hashlib.sha256(data).hexdigest()
