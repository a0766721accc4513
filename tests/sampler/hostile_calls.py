"""Calls of a service that lie.

Each is (rpc, request or parts, the status that refuses it, words of the reason
if others are refused with that status too).
"""

import dataclasses
import hashlib

import grpc
import scripted

from spopp_jax.sampler import handshake, options, sampler_pb2, transfer, weights

Code = grpc.StatusCode
DATA = weights.to_bytes(scripted.params(1.5))
CHECKSUM = weights.checksum(DATA)
_OTHER = 'ef' * 32
_SESSIONS = ('', 'ab' * 16, 'x' * 100_000, '\u202e' * 32)


def _pick(rng, choices):
  return choices[rng.integers(len(choices))]


def _publish(code, *parts, **header):
  fields = {
    'policy_version': 1,
    'weights_checksum': CHECKSUM,
    'size_bytes': len(DATA),
    'session_id': scripted.SESSION,
    **header,
  }
  first = sampler_pb2.PublishPart(header=sampler_pb2.PublishHeader(**fields))
  return 'Publish', [first, *parts], code


def _whole(data=DATA):
  return transfer.chunk(0, data)


def _publish_header(rng):
  name, values, code = _pick(
    rng,
    [
      ('weights_checksum', ('', _OTHER, 'x' * 100_000), Code.DATA_LOSS),
      (
        'size_bytes',
        (0, len(DATA) + 1, len(DATA) - 1, 2**64 - 1),
        Code.DATA_LOSS,
      ),
      ('policy_version', (0, -1, -(2**63)), Code.FAILED_PRECONDITION),
      ('session_id', _SESSIONS, Code.ABORTED),
      (
        'directory',
        ('nowhere', '/nowhere/1', '/\0', 'x' * 100_000, '/dev/null'),
        Code.NOT_FOUND,
      ),
    ],
  )
  return _publish(code, _whole(), **{name: _pick(rng, values)})


def _publish_chunk(rng):
  part = _whole()
  at = int(rng.integers(len(DATA)))
  name, value, words = _pick(
    rng,
    [
      ('offset', 1, 'has offset 1'),
      ('offset', 2**64 - 1, 'has offset'),
      ('crc32', part.chunk.crc32 ^ (1 << int(rng.integers(32))), 'crc32'),
      ('data', b'', 'a byte at least'),
      ('data', DATA[:at] or b'x', 'crc32'),
      ('data', DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :], 'crc32'),
    ],
  )
  setattr(part.chunk, name, value)
  return *_publish(Code.DATA_LOSS, part), words


def _publish_more(rng):
  part = _whole(DATA + rng.bytes(1 + int(rng.integers(9))))
  return *_publish(Code.DATA_LOSS, part), 'at least'


def _publish_other_bytes(rng):
  """The chunks fit together, but not with the header, or are no weights."""
  at = int(rng.integers(len(DATA)))
  data = DATA[:at] + rng.bytes(1 + int(rng.integers(8))) + DATA[at:]
  honest_about = {}
  if rng.integers(2):
    checksum = hashlib.sha256(data).hexdigest()
    data = rng.bytes(len(data)) if rng.integers(2) else data[:at]
    checksum = hashlib.sha256(data).hexdigest()
    honest_about = {'weights_checksum': checksum, 'size_bytes': len(data)}
  parts = [_whole(data)] if data else []
  return _publish(Code.DATA_LOSS, *parts, **honest_about)


def _publish_parts(rng):
  # What is whole may be asked for again, so it is of no version that is.
  _, (header, chunk), _ = _publish(Code.OK, _whole(), policy_version=9)
  _, (bare,), _ = _publish(Code.OK, policy_version=8)
  parts, code = _pick(
    rng,
    [
      ([], Code.INVALID_ARGUMENT),
      ([chunk, header], Code.INVALID_ARGUMENT),
      ([sampler_pb2.PublishPart(), chunk], Code.INVALID_ARGUMENT),
      ([bare], Code.DATA_LOSS),
      ([bare, bare, chunk], Code.DATA_LOSS),
      ([header, chunk, chunk], Code.DATA_LOSS),
    ],
  )
  return 'Publish', parts, code


def _activate(rng):
  fields = {
    'policy_version': 1,
    'weights_checksum': CHECKSUM,
    'session_id': scripted.SESSION,
  }
  name, values, code = _pick(
    rng,
    [
      ('policy_version', (0, 1, 2, -1, 2**62), Code.FAILED_PRECONDITION),
      (
        'weights_checksum',
        ('', _OTHER, 'x' * 100_000),
        Code.FAILED_PRECONDITION,
      ),
      ('session_id', _SESSIONS, Code.ABORTED),
    ],
  )
  fields[name] = _pick(rng, values)
  request = sampler_pb2.ActivateRequest(
    **fields, interrupt=bool(rng.integers(2))
  )
  return 'Activate', request, code


def _resume(rng):
  request = sampler_pb2.ResumeRequest(
    policy_version=1,
    weights_checksum=CHECKSUM,
    size_bytes=len(DATA),
    session_id=_pick(rng, _SESSIONS),
  )
  return 'Resume', request, Code.ABORTED


def _shake_hands(rng):
  limits = options.ChannelLimits()
  other = dataclasses.replace(limits, max_message_bytes=2**63)
  request = handshake.request(
    _pick(rng, [limits, other]),
    _pick(rng, ['', 'X' * 32, 'a' * 33, 'x' * 9000]),
  )
  request.contract_version = _pick(rng, [0, 3, request.contract_version])
  return 'Handshake', request, Code.FAILED_PRECONDITION


CALLS = (
  _publish_header,
  _publish_chunk,
  _publish_more,
  _publish_other_bytes,
  _publish_parts,
  _activate,
  _resume,
  _shake_hands,
)
