import contextlib
import json
import socket
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from spopp_jax.runner import frames

arrays = npst.arrays(
  st.sampled_from([np.bool_, np.int32, np.float32, np.uint8, np.int64]),
  npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
  elements={'allow_nan': False},
)


@contextlib.contextmanager
def connected(timeout_s=5.0):
  with contextlib.ExitStack() as stack:
    ends = [stack.enter_context(end) for end in socket.socketpair()]
    for end in ends:
      end.settimeout(timeout_s)
    yield ends


@given(
  st.dictionaries(st.text(max_size=5), arrays, max_size=3),
  st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)
def test_what_is_sent_arrives(contents, values):
  with connected() as (here, there):
    frames.send(here, 'update', values, contents)
    frames.send(here, 'end')
    frame = frames.receive(there)
    assert (frame.kind, frame.values) == ('update', values)
    assert list(frame.arrays) == list(contents)
    for name, array in contents.items():
      assert frame.arrays[name].dtype == array.dtype
      np.testing.assert_array_equal(frame.arrays[name], array)
    assert frames.receive(there) == ('end', {}, {})


def test_arrays_without_order_and_of_short_floats_arrive():
  import ml_dtypes

  strided = np.arange(24.0).reshape(4, 6).T[::2]
  short = np.array([1.5, -2.0], ml_dtypes.bfloat16)
  with connected() as (here, there):
    frames.send(here, 'init', arrays={'a': strided, 'b': short})
    got = frames.receive(there).arrays
  np.testing.assert_array_equal(got['a'], strided)
  assert got['b'].dtype == short.dtype
  assert got['b'].tolist() == [1.5, -2.0]


def raw(header, body=b''):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  return struct.pack('!IQ', len(text), len(body)) + text + body


def entry(*described):
  return {'kind': 'x', 'values': {}, 'arrays': list(described)}


@pytest.mark.parametrize(
  'data, words',
  [
    (b'GET / HTTP/1.1\r\nHost: x\r\n\r\n', 'a header of'),
    (raw(b'not json'), 'JSONDecodeError'),
    (raw(b'\xff\xfe'), 'UnicodeDecodeError'),
    (raw([1, 2]), 'TypeError'),
    (raw({'kind': 'x'}), 'values'),
    (raw({'kind': 'x', 'values': 3, 'arrays': []}), 'ValueError'),
    (raw(entry(['a', 'float32', [2]]), b'1234'), '8 bytes announced, 4 sent'),
    (raw(entry(['a', 'no such', [1]]), b'1'), 'TypeError'),
    (raw(entry(['a', 'uint8', [-1]]), b''), 'ValueError'),
    (raw(entry(['a', 'O', [1]]), b'12345678'), 'ValueError'),
    (raw(entry(['a', 'uint8', [101]]), bytes(101)), 'allowed are 100'),
  ],
)
def test_what_is_no_frame_is_refused(data, words):
  with connected() as (here, there):
    here.sendall(data)
    with pytest.raises(frames.BrokenFrame, match=words):
      frames.receive(there, max_bytes=100)


@pytest.mark.parametrize('sent', [0, 5, 20])
def test_an_end_in_the_middle_is_told(sent):
  with connected() as (here, there):
    here.sendall(raw(entry(['a', 'uint8', [9]]), bytes(9))[:sent])
    here.close()
    with pytest.raises(EOFError, match='closed'):
      frames.receive(there)


def test_silence_in_the_middle_is_not_waited_for():
  with connected(timeout_s=0.05) as (here, there):
    here.sendall(raw(entry())[:15])
    with pytest.raises(TimeoutError):
      frames.receive(there)
