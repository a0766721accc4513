"""Lies that a trajectory or a request can tell, each of one broken rule.

Each takes (rng, message) and changes the message.
"""

import math
import zlib

import hostile
import numpy as np

from spopp_jax.sampler import sampler_pb2

_WIRE = {1: np.uint8, 2: np.dtype('<i4'), 3: np.dtype('<f4'), 4: '<i8'}


def _arrays(message):
  arrays = [message.tokens, message.action_mask, message.behaviour_logprobs]
  if message.HasField('kept'):
    arrays += [message.kept.ids, message.kept.offsets, message.kept.log_mass]
  return arrays


def _seal(message):
  """Makes the crc fit, as a liar would."""
  crc = 0
  for array in _arrays(message):
    crc = zlib.crc32(array.data, crc)
  message.payload_crc32 = crc


def _edit(message, array, change):
  """Changes the elements of an array and makes length and crc fit."""
  values = np.frombuffer(array.data, _WIRE[array.dtype]).copy()
  values = change(values)
  array.length, array.data = len(values), values.tobytes()
  _seal(message)


def _put(index, value):
  def change(values):
    values[index] = value
    return values

  return change


def _dtype(rng, message):
  array = hostile.pick(rng, _arrays(message))
  array.dtype = hostile.pick(
    rng, [d for d in (0, 1, 2, 3, 4, 99, -1) if d != array.dtype]
  )


def _length(rng, message):
  array = hostile.pick(rng, _arrays(message))
  n = array.length
  array.length = hostile.pick(
    rng, [v for v in (0, n + 1, 2 * n, 2**31, 2**32 - 1) if v != n]
  )


def _size(rng, message):
  array = hostile.pick(rng, _arrays(message))
  cut = int(rng.integers(1, len(array.data) + 1)) if array.data else 0
  array.data = (
    array.data[cut:]
    if cut and rng.integers(2)
    else (array.data + bytes(int(rng.integers(1, 20))))
  )
  _seal(message)


def _shorter(rng, message):
  _edit(
    message, hostile.pick(rng, _arrays(message)), lambda values: values[:-1]
  )


def _damaged(rng, message):
  array = hostile.pick(rng, _arrays(message))
  data = bytearray(array.data)
  data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
  array.data = bytes(data)


def _swapped(rng, message):
  data = message.tokens.data
  message.tokens.data = data[4:8] + data[:4] + data[8:]


def _crc(rng, message):
  message.payload_crc32 ^= 1 << int(rng.integers(32))


def _token(rng, message):
  value = hostile.pick(rng, [-1, hostile.VOCAB_SIZE, 2**31 - 1, -(2**31)])
  _edit(message, message.tokens, _put(int(rng.integers(8)), value))


def _mask_value(rng, message):
  value = int(rng.integers(2, 256))
  _edit(message, message.action_mask, _put(int(rng.integers(8)), value))
  if rng.integers(2):
    message.num_actions = sum(message.action_mask.data)


def _mask_hides_an_action(rng, message):
  _edit(message, message.action_mask, _put(hostile.pick(rng, [2, 3, 5, 6]), 0))
  if rng.integers(2):
    message.num_actions -= 1


def _logprob(rng, message):
  value = hostile.pick(rng, [math.nan, math.inf, -math.inf, 1e-3, 3e38])
  at = hostile.pick(rng, [2, 3, 5, 6])
  _edit(message, message.behaviour_logprobs, _put(at, value))


def _logprob_outside(rng, message):
  value = hostile.pick(rng, [math.nan, math.inf, -1.0, 1e-30])
  at = hostile.pick(rng, [0, 1, 4, 7])
  _edit(message, message.behaviour_logprobs, _put(at, value))


def _too_long(rng, message):
  count = hostile.MAX_TOKENS + int(rng.integers(1, 50))
  more = count - message.tokens.length
  for array in _arrays(message)[:3]:
    _edit(
      message, array, lambda v: np.concatenate([v, np.zeros(more, v.dtype)])
    )


def _kept_offset(rng, message):
  value = hostile.pick(rng, [-1, 13, 2**62, -(2**63), 2**63 - 1])
  at = int(rng.integers(5))
  _edit(message, message.kept.offsets, _put(at, value))


def _kept_unordered(rng, message):
  _edit(message, message.kept.offsets, lambda v: v[[0, 2, 1, 3, 4]])


def _kept_id(rng, message):
  value = hostile.pick(rng, [-1, hostile.VOCAB_SIZE, -(2**31), 2**31 - 1])
  _edit(message, message.kept.ids, _put(int(rng.integers(12)), value))


def _kept_twice(rng, message):
  at = 3 * int(rng.integers(4))
  _edit(message, message.kept.ids, lambda v: _put(at + 1, v[at])(v))


def _kept_without_own(rng, message):
  _edit(message, message.kept.ids, _put(3 * int(rng.integers(4)), 999))


def _kept_mass(rng, message):
  wrong = hostile.pick(rng, [math.nan, math.inf, -math.inf, 0.5])
  _edit(message, message.kept.log_mass, _put(int(rng.integers(4)), wrong))


def _kept_masses_of_more(rng, message):
  _edit(message, message.kept.log_mass, lambda v: np.append(v, v[:1]))


def _kept_uncalled(rng, message):
  message.sampling.top_k = 0


def _kept_at_plain(rng, message):
  message.kept.ids.dtype, message.kept.offsets.dtype = 2, 4


def _span_count(rng, message):
  span = hostile.pick(rng, message.spans)
  span.num_actions = hostile.pick(
    rng, [v for v in (0, 2, 4, 2**32 - 1) if v != span.num_actions]
  )


def _span_empty(rng, message):
  sizes = hostile.pick(rng, [(0, 4), (4, 0)])
  for span, size in zip(message.spans, sizes, strict=True):
    span.num_actions = size


def _span_version(rng, message):
  message.spans[1].policy_version = hostile.pick(rng, [3, 2, -1, -(2**63)])


def _span_first(rng, message):
  message.spans[0].policy_version = 2


def _span_checksum(rng, message):
  hostile.pick(rng, message.spans).weights_checksum = hostile.pick(
    rng, _NO_CHECKSUMS
  )


def _span_alone(rng, message):
  del message.spans[int(rng.integers(2))]


def _spans_uncalled(rng, message):
  message.spans.add(
    policy_version=3, weights_checksum=hostile.CHECKSUM, num_actions=4
  )


_NO_CHECKSUMS = ('', 'AB' * 32, 'a' * 63, 'a' * 65, 'g' * 64, '٣' * 64)
_NO_TEXT = 'é' * 4097
_HUGE = 'x' * 300_000


def _field(name, *values):
  """Returns a lie that puts one of the values, by a dotted name."""

  def lie(rng, message):
    *path, last = name.split('.')
    for part in path:
      message = getattr(message, part)
    setattr(message, last, hostile.pick(rng, values))

  lie.__name__ = f'_{name}'
  return lie


def _without(name):
  def lie(rng, message):
    message.ClearField(name)

  lie.__name__ = f'_without_{name}'
  return lie


_NOT_POSITIVE = (0.0, -1.0, math.nan, math.inf, -math.inf)
_SAMPLING = (
  _field('sampling.temperature', *_NOT_POSITIVE),
  _field('sampling.top_p', 1 + 1e-9, 1e308, *_NOT_POSITIVE),
  _field('sampling.min_p', 1 + 1e-9, -1e-9, math.nan, math.inf),
  _field('sampling.max_turn_tokens', 0),
  _field('sampling.max_turns', 0),
  _without('sampling'),
)
_IDS = (_field('request_id', '', 'x' * 257, '\U0001f480' * 257, _HUGE),)
_ALL = (
  *_SAMPLING,
  *_IDS,
  _dtype,
  _length,
  _size,
  _crc,
  _field('schema_version', 0, 1, 2, 4, 2**32 - 1),
  _field('status', 0, 13, 99, -1, 2**31 - 1, -(2**31)),
  _field('seconds', math.nan, math.inf, -1.0, -1e308),
  _field('logprob_kind', 0, 3, -1, 2**31 - 1),
  _field('num_actions', 1, 5, 2**31, 2**32 - 1),
  _field('detail', _NO_TEXT, _HUGE),
  _field('task_id', _NO_TEXT, _HUGE),
)
_WITH_REWARD = (
  _field('reward', *_NOT_POSITIVE[1:], 1 + 1e-9, -1e-9, 2.0, 1e308, -1e308),
  _field('status', 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
  _field('weights_checksum', *_NO_CHECKSUMS),
  _without('reward'),
  _without('action_mask'),
  _shorter,
  _damaged,
  _swapped,
  _token,
  _mask_value,
  _mask_hides_an_action,
  _logprob,
  _logprob_outside,
  _too_long,
)
_WITHOUT_REWARD = (
  _field('reward', 0.0, 1.0, 0.5, math.nan, 1e308),
  _field('status', 1),
  _field('weights_checksum', *_NO_CHECKSUMS[1:]),
)
_KEPT = (
  _kept_offset,
  _kept_unordered,
  _kept_id,
  _kept_twice,
  _kept_without_own,
  _kept_mass,
  _kept_masses_of_more,
  _kept_uncalled,
)
_SPANS = (
  _span_count,
  _span_empty,
  _span_version,
  _span_first,
  _span_checksum,
  _span_alone,
)
# What a receiver refuses that knows neither the request nor the snapshots.
LIES = {
  'plain': (*_ALL, *_WITH_REWARD, _kept_at_plain, _spans_uncalled),
  'truncated': (*_ALL, *_WITH_REWARD, *_KEPT, _spans_uncalled),
  'spans': (*_ALL, *_WITH_REWARD, *_SPANS, _kept_at_plain),
  'empty': (*_ALL, *_WITHOUT_REWARD, _spans_uncalled),
  'failed': (*_ALL, *_WITHOUT_REWARD, _spans_uncalled),
}
REQUEST_LIES = (
  *_SAMPLING,
  *_IDS,
  _field('task_id', '', _NO_TEXT, _HUGE),
  _field('policy_version', -1, -(2**63)),
)


def _two_spans(rng, message):
  for version, checksum in ((3, hostile.CHECKSUM), (4, hostile.LATER)):
    message.spans.add(
      policy_version=version, weights_checksum=checksum, num_actions=2
    )


def _version_not_asked(rng, message):
  message.policy_version = 4
  message.weights_checksum = hostile.LATER


def _other_span(rng, message):
  message.spans[1].policy_version = hostile.pick(rng, [5, 2**62])


def _other_span_checksum(rng, message):
  message.spans[1].weights_checksum = hostile.pick(
    rng, [hostile.CHECKSUM, 'ef' * 32]
  )


def _other_first(rng, message):
  message.spans[0].policy_version = message.policy_version = 2


def _duplicate(rng, message):
  message.ClearField('reward')
  message.status = sampler_pb2.STATUS_DUPLICATE


def _kept_of_more(rng, message):
  message.sampling.top_k = 4


_OTHER_TASK = _field('task_id', 'task-9', 'task-1 ', '\u202e', '')
_OTHERS = (
  _OTHER_TASK,
  _version_not_asked,
  _field('policy_version', -1, 0, 2, 4, 5, 2**62, -(2**63)),
  _field('weights_checksum', hostile.LATER, 'ef' * 32),
  _field('num_turns', 7, 2**32 - 1),
  _field('sampling.temperature', 0.5, 1e308, 5e-324),
  _field('sampling.max_turns', 5, 2**32 - 1),
  _field('sampling.max_turn_tokens', 3, 2**32 - 1),
)
# What holds together, and is not what was asked or not by our snapshots.
FOREIGN_LIES = {
  'plain': (*_OTHERS, _two_spans, _duplicate),
  'truncated': (*_OTHERS, _two_spans, _duplicate, _kept_of_more),
  'spans': (
    _OTHER_TASK,
    _other_span,
    _other_span_checksum,
    _other_first,
    _duplicate,
  ),
  'empty': (*_OTHERS, _duplicate),
  'failed': (_OTHER_TASK, _duplicate),
}


def stranger(rng, message):
  """Answers what nobody asked."""
  message.request_id = hostile.pick(
    rng, ['nobody', f'{message.request_id} ', 'x' * 256, '\u202e']
  )
