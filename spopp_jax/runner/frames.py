"""Names, values and arrays over a socket, between the hosts of one learner.

A frame is two lengths, a JSON header and the arrays' bytes. No code travels:
unlike a pickle, a frame from a stranger can do no more than be refused.
"""

import json
import math
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_LENGTHS = struct.Struct('!IQ')
_MAX_HEADER_BYTES = 2**24
_READ_BYTES = 2**20


class BrokenFrame(ValueError):
  """What arrived is no frame."""


class Frame(NamedTuple):
  """One message.

  Attributes:
    kind: what it is about.
    values: JSON values by name.
    arrays: numpy arrays by name.
  """

  kind: str
  values: dict[str, Any]
  arrays: dict[str, np.ndarray]


def send(
  peer: socket.socket,
  kind: str,
  values: Mapping[str, Any] | None = None,
  arrays: Mapping[str, np.ndarray] | None = None,
) -> None:
  """Sends a frame.

  Raises:
    OSError: the connection is gone, or takes nothing for its timeout.
  """
  contents = {k: np.ascontiguousarray(v) for k, v in (arrays or {}).items()}
  header = json.dumps(
    {
      'kind': kind,
      'values': dict(values or {}),
      # ascontiguousarray makes scalars vectors; the shape is the original's.
      'arrays': [
        [k, v.dtype.name, np.shape((arrays or {})[k])]
        for k, v in contents.items()
      ],
    }
  ).encode()
  size = sum(x.nbytes for x in contents.values())
  peer.sendall(_LENGTHS.pack(len(header), size) + header)
  for array in contents.values():
    peer.sendall(array.reshape(-1).view(np.uint8).data)


def receive(peer: socket.socket, max_bytes: int | None = None) -> Frame:
  """Waits for a frame.

  Args:
    peer: a connected socket; its timeout holds for every part.
    max_bytes: of the arrays at most; None is any number.

  Raises:
    EOFError: the other end has closed.
    BrokenFrame: it sent something else.
    OSError: the connection is gone, or silent for its timeout.
  """
  header_bytes, size = _LENGTHS.unpack(_read(peer, _LENGTHS.size))
  if header_bytes > _MAX_HEADER_BYTES:
    raise BrokenFrame(f'a header of {header_bytes} bytes')
  if max_bytes is not None and size > max_bytes:
    raise BrokenFrame(f'arrays of {size} bytes, allowed are {max_bytes}')
  try:
    header = json.loads(_read(peer, header_bytes).decode())
    kind, values, entries = (header[k] for k in ('kind', 'values', 'arrays'))
    kinds = [(k, np.dtype(dtype), tuple(shape)) for k, dtype, shape in entries]
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in kinds]
    if any(dtype.hasobject for _, dtype, _ in kinds):
      raise ValueError('an array of objects')
    if min(sizes, default=0) < 0 or not isinstance(values, dict):
      raise ValueError(f'sizes {sizes}, values {values}')
    if sum(sizes) != size:
      raise ValueError(f'{sum(sizes)} bytes announced, {size} sent')
  except (ValueError, TypeError, KeyError) as error:
    raise BrokenFrame(f'{type(error).__name__}: {error}') from error
  arrays = {}
  for (name, dtype, shape), count in zip(kinds, sizes, strict=True):
    arrays[name] = np.frombuffer(_read(peer, count), dtype).reshape(shape)
  return Frame(kind, values, arrays)


def _read(peer: socket.socket, count: int) -> bytearray:
  data = bytearray(count)
  view = memoryview(data)
  while view:
    got = peer.recv_into(view, min(len(view), _READ_BYTES))
    if not got:
      raise EOFError('the other end has closed the connection')
    view = view[got:]
  return data
