"""Snapshots in chunks that a broken connection does not send twice."""

import hashlib
import threading
import zlib
from collections.abc import Iterator

import numpy as np

from spopp_jax.sampler import errors, sampler_pb2, weights

CHUNK_BYTES = 512 * 1024


def header(
  snapshot: weights.Snapshot, session_id: str, directory: str = ''
) -> sampler_pb2.PublishPart:
  """Returns the first part of a publication."""
  return sampler_pb2.PublishPart(
    header=sampler_pb2.PublishHeader(
      policy_version=snapshot.version,
      weights_checksum=snapshot.checksum,
      size_bytes=snapshot.size_bytes,
      session_id=session_id,
      directory=directory,
    )
  )


def chunk(offset: int, data: bytes) -> sampler_pb2.PublishPart:
  """Returns the part that carries `data` from byte `offset` on."""
  return sampler_pb2.PublishPart(
    chunk=sampler_pb2.Chunk(offset=offset, crc32=zlib.crc32(data), data=data)
  )


def parts(
  snapshot: weights.Snapshot, session_id: str, held_bytes: int
) -> Iterator[sampler_pb2.PublishPart]:
  """Yields the parts of a publication.

  Args:
    snapshot: what to send.
    session_id: of the caller.
    held_bytes: how much of it the service has.

  Raises:
    PublicationError: the snapshot's file is gone; before the first part.
  """
  # Opened at once: within a call the error would reach nobody.
  source = snapshot.open()

  def generate() -> Iterator[sampler_pb2.PublishPart]:
    with source:
      yield header(snapshot, session_id)
      source.seek(held_bytes)
      offset = held_bytes
      while data := source.read(CHUNK_BYTES):
        yield chunk(offset, data)
        offset += len(data)

  return generate()


class Incoming:
  """A snapshot on its way, over as many calls as it takes; thread-safe.

  Attributes:
    key: its version, checksum and size in bytes.
  """

  def __init__(self, version: int, checksum: str, size_bytes: int):
    self.key = (version, checksum, size_bytes)
    self._size_bytes = size_bytes
    self._data = bytearray()
    self._sha256 = hashlib.sha256()
    self._lock = threading.Lock()
    self._turn = 0

  def take_turn(self) -> tuple[int, int]:
    """Lets the caller go on; whoever did before cannot any more.

    Returns:
      Its turn, and how many bytes are held.
    """
    with self._lock:
      self._turn += 1
      return self._turn, len(self._data)

  @property
  def is_whole(self) -> bool:
    """Whether as many bytes have arrived as were announced."""
    with self._lock:
      return len(self._data) == self._size_bytes

  def append(self, turn: int, part: sampler_pb2.Chunk) -> None:
    """Takes the next bytes; after an error those before it are still held.

    Raises:
      PublicationError: its offset or crc is wrong, there are more bytes than
        announced, or it is another caller's turn.
    """
    with self._lock:
      held, end = len(self._data), part.offset + len(part.data)
      crc32 = zlib.crc32(part.data)
      if turn != self._turn:
        raise errors.PublicationError('another call goes on with this snapshot')
      if part.offset != held or not part.data:
        raise errors.PublicationError(
          f'a chunk of {len(part.data)} bytes has offset {part.offset}; '
          f'allowed: {held}, the number of bytes held, and a byte at least; '
          'ask Resume where to go on'
        )
      if crc32 != part.crc32:
        raise errors.PublicationError(
          f'crc32 of the chunk at offset {part.offset} is {crc32}, announced '
          f'was {part.crc32}; send it again'
        )
      if end > self._size_bytes:
        raise errors.PublicationError(
          f'at least {end} bytes arrived of {self._size_bytes} announced; '
          'publish again'
        )
      self._data += part.data
      self._sha256.update(part.data)

  def finish(self) -> dict[str, np.ndarray]:
    """Verifies the whole.

    Returns:
      name -> array.

    Raises:
      PublicationError: length or checksum differ from what was announced, or it
        is no safetensors file.
    """
    with self._lock:
      _, checksum, size_bytes = self.key
      arrived = self._sha256.hexdigest()
      if len(self._data) != size_bytes:
        raise errors.PublicationError(
          f'{len(self._data)} bytes arrived of {size_bytes} announced; publish '
          'again'
        )
      if arrived != checksum:
        raise errors.PublicationError(
          f'the sha256 of what arrived is {arrived}, announced was '
          f'{errors.shown(checksum)}; publish again'
        )
      return weights.from_bytes(bytes(self._data))
