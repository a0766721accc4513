"""Chunks: their offsets, their crc, and whose turn it is."""

import threading
import zlib

import numpy as np
import pytest

from spopp_jax.sampler import errors, sampler_pb2, transfer, weights

SESSION = '5e' * 16
PARAMS = {'w': np.arange(3, dtype=np.float32)}
DATA = weights.to_bytes(PARAMS)


def incoming(data=DATA, **changes):
  fields = {
    'version': 1,
    'checksum': weights.checksum(data),
    'size_bytes': len(data),
  }
  return transfer.Incoming(**{**fields, **changes})


def piece(start, stop):
  return transfer.chunk(start, DATA[start:stop]).chunk


@pytest.mark.parametrize('size', [1, 2**19, 2**19 + 1, 2**20, 2**20 + 7])
@pytest.mark.parametrize('held', [0, 1, 2**19])
def test_parts_are_a_header_and_the_bytes_that_are_not_held(size, held):
  held = min(held, size)
  data = bytes(np.arange(size, dtype=np.uint32).astype(np.uint8))
  snapshot = weights.Snapshot(4, weights.checksum(data), size, data=data)
  header, *chunks = transfer.parts(snapshot, SESSION, held)
  assert header.header == sampler_pb2.PublishHeader(
    policy_version=4,
    weights_checksum=snapshot.checksum,
    size_bytes=size,
    session_id=SESSION,
  )
  position = held
  for part in chunks:
    assert part.chunk.offset == position
    assert part.chunk.crc32 == zlib.crc32(part.chunk.data)
    assert 0 < len(part.chunk.data) <= 2**19
    position += len(part.chunk.data)
  assert b''.join(part.chunk.data for part in chunks) == data[held:]
  assert len(chunks) == -(-(size - held) // 2**19)


def test_a_file_that_is_gone_is_said_before_the_first_part(tmp_path):
  snapshot = weights.Snapshot(4, '', 1, path=tmp_path / 'gone')
  with pytest.raises(errors.PublicationError, match='gone'):
    transfer.parts(snapshot, SESSION, 0)


def test_what_arrives_over_two_turns_is_whole():
  one = incoming()
  turn, held = one.take_turn()
  assert held == 0
  one.append(turn, piece(0, 7))
  one.append(turn, piece(7, 30))
  turn, held = one.take_turn()
  assert held == 30
  one.append(turn, piece(30, len(DATA)))
  result = one.finish()
  np.testing.assert_array_equal(result['w'], PARAMS['w'])


@pytest.mark.parametrize(
  'part, words',
  [
    (piece(8, 20), r'12 bytes has offset 8; allowed: 7'),
    (piece(6, 20), r'14 bytes has offset 6; allowed: 7'),
    (piece(0, 7), r'7 bytes has offset 0; allowed: 7'),
    (piece(7, 7), r'0 bytes has offset 7; .*a byte at least'),
    (
      sampler_pb2.Chunk(offset=7, crc32=1, data=DATA[7:20]),
      rf'crc32 of the chunk at offset 7 is {zlib.crc32(DATA[7:20])}, .* was 1',
    ),
    (
      transfer.chunk(7, DATA[7:] + b'x').chunk,
      rf'at least {len(DATA) + 1} bytes arrived of {len(DATA)}',
    ),
  ],
)
def test_a_wrong_chunk_is_refused_and_what_was_before_stays(part, words):
  one = incoming()
  turn, _ = one.take_turn()
  one.append(turn, piece(0, 7))
  with pytest.raises(errors.PublicationError, match=words):
    one.append(turn, part)
  turn, held = one.take_turn()
  assert held == 7
  one.append(turn, piece(7, len(DATA)))
  assert one.finish().keys() == {'w'}


def test_who_lost_the_turn_brings_nothing_any_more():
  one = incoming()
  old, _ = one.take_turn()
  one.append(old, piece(0, 7))
  new, _ = one.take_turn()
  with pytest.raises(errors.PublicationError, match='another call goes on'):
    one.append(old, piece(7, 20))
  one.append(new, piece(7, len(DATA)))
  one.finish()


def test_many_writers_at_once_leave_one_whole():
  one = incoming()

  def write():
    turn, held = one.take_turn()
    try:
      for start in range(held, len(DATA)):
        one.append(turn, piece(start, start + 1))
    except errors.PublicationError:
      pass

  threads = [threading.Thread(target=write) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(10)
  write()
  assert one.finish().keys() == {'w'}


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'size_bytes': len(DATA) + 1}, f'{len(DATA)} bytes arrived of'),
    ({'checksum': '0' * 64}, f'what arrived is {weights.checksum(DATA)}'),
  ],
)
def test_what_is_not_as_announced_is_refused(changes, words):
  one = incoming(**changes)
  turn, _ = one.take_turn()
  one.append(turn, piece(0, len(DATA)))
  with pytest.raises(errors.PublicationError, match=words):
    one.finish()
