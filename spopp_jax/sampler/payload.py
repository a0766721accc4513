"""The arrays of a trajectory <-> packed bytes, checked in full on receipt."""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from spopp_jax import types
from spopp_jax.sampler import errors, kept_sets, sampler_pb2

# A float32 log-softmax may exceed 0 by its rounding, never by more.
LOGPROB_CEILING = 1e-5

_WIRE_DTYPES: dict[int, np.dtype] = {
  sampler_pb2.DTYPE_BOOL: np.dtype(np.uint8),
  sampler_pb2.DTYPE_INT32: np.dtype('<i4'),
  sampler_pb2.DTYPE_FLOAT32: np.dtype('<f4'),
  sampler_pb2.DTYPE_INT64: np.dtype('<i8'),
}


class Payload(NamedTuple):
  """The fields of `types.Trajectory` with these names."""

  tokens: np.ndarray
  action_mask: np.ndarray
  behaviour_logprobs: np.ndarray
  kept: types.KeptIds | None


def encode(trajectory: types.Trajectory) -> dict[str, Any]:
  """Returns the fields of a Trajectory message that hold or guard arrays."""
  tokens = _encode_array(trajectory.tokens, sampler_pb2.DTYPE_INT32)
  mask = _encode_array(trajectory.action_mask, sampler_pb2.DTYPE_BOOL)
  logprobs = _encode_array(
    trajectory.behaviour_logprobs, sampler_pb2.DTYPE_FLOAT32
  )
  arrays = [tokens, mask, logprobs]
  kept = None
  if trajectory.kept is not None:
    ids = _encode_array(trajectory.kept.ids, sampler_pb2.DTYPE_INT32)
    offsets = _encode_array(trajectory.kept.offsets, sampler_pb2.DTYPE_INT64)
    arrays += [ids, offsets]
    mass = None
    if trajectory.kept.log_mass is not None:
      mass = _encode_array(trajectory.kept.log_mass, sampler_pb2.DTYPE_FLOAT32)
      arrays.append(mass)
    kept = sampler_pb2.KeptIds(ids=ids, offsets=offsets, log_mass=mass)
  return {
    'tokens': tokens,
    'action_mask': mask,
    'behaviour_logprobs': logprobs,
    'kept': kept,
    'num_actions': trajectory.num_actions,
    'payload_crc32': _crc32(arrays),
  }


def decode(
  message: sampler_pb2.Trajectory,
  *,
  max_tokens: int,
  vocab_size: int,
  check: errors.Checker,
) -> Payload:
  """Reads and checks the arrays of a trajectory.

  Args:
    message: what arrived.
    max_tokens: the most tokens a trajectory may have.
    vocab_size: number of the model's ids.
    check: refuses in the request's name.

  Raises:
    InvalidMessage: an array is missing, damaged or outside what is allowed.
  """
  has_kept = message.HasField('kept')
  wire = [message.tokens, message.action_mask, message.behaviour_logprobs]
  if has_kept:
    wire += [message.kept.ids, message.kept.offsets]
    if message.kept.HasField('log_mass'):
      wire.append(message.kept.log_mass)
  crc = _crc32(wire)
  check.that(
    crc == message.payload_crc32,
    'payload_crc32',
    f'{message.payload_crc32:08x}',
    f'{crc:08x}, the crc32 of the arrays that arrived',
  )
  tokens = _decode_array(wire[0], 'tokens', sampler_pb2.DTYPE_INT32, check)
  mask = _decode_array(wire[1], 'action_mask', sampler_pb2.DTYPE_BOOL, check)
  logprobs = _decode_array(
    wire[2], 'behaviour_logprobs', sampler_pb2.DTYPE_FLOAT32, check
  )
  _check_ids(tokens, 'tokens', vocab_size, check)
  _check_mask(message.action_mask.data, tokens.size, message.num_actions, check)
  actions = mask.view(bool)
  _check_logprobs(logprobs, actions, check)
  check.that(
    tokens.size <= max_tokens,
    'tokens.length',
    tokens.size,
    f'at most the context of {max_tokens} tokens',
  )
  kept = None
  if has_kept:
    kept = _decode_kept(message.kept, tokens[actions], vocab_size, check)
  return Payload(
    tokens.astype(np.int32, copy=False),
    actions,
    logprobs.astype(np.float32, copy=False),
    kept,
  )


def _decode_kept(
  message: sampler_pb2.KeptIds,
  sampled: np.ndarray,
  vocab_size: int,
  check: errors.Checker,
) -> types.KeptIds:
  ids = _decode_array(message.ids, 'kept.ids', sampler_pb2.DTYPE_INT32, check)
  offsets = _decode_array(
    message.offsets, 'kept.offsets', sampler_pb2.DTYPE_INT64, check
  )
  mass = None
  if message.HasField('log_mass'):
    mass = _decode_array(
      message.log_mass, 'kept.log_mass', sampler_pb2.DTYPE_FLOAT32, check
    ).astype(np.float32)
  kept = types.KeptIds(ids.astype(np.int32), offsets.astype(np.int64), mass)
  _check_ids(kept.ids, 'kept.ids', vocab_size, check)
  fault = kept_sets.problem(kept, sampled)
  check.that(
    fault is None,
    'kept',
    f'one that {fault}',
    'offsets that rise from 0 to the number of ids, one more than there are '
    'action tokens, sets of distinct ids with their own token, and log masses '
    'of at most 0',
  )
  return kept


# Few passes over the arrays: numpy gives the interpreter's lock away in each,
# and may get it back late where other threads work.


def _check_ids(
  ids: np.ndarray, field: str, vocab_size: int, check: errors.Checker
) -> None:
  # As unsigned numbers negative ids are large: one look finds all wrong ones.
  unsigned = ids.view(np.uint32)
  if unsigned.max(initial=0) >= vocab_size:
    check.that(
      False,
      field,
      ids[unsigned >= vocab_size][:1],
      f'ids in [0, {vocab_size}), the vocabulary',
    )


def _check_mask(
  mask: bytes, num_tokens: int, num_actions: int, check: errors.Checker
) -> None:
  check.that(
    len(mask) == num_tokens,
    'action_mask.length',
    len(mask),
    f'{num_tokens}, the number of tokens',
  )
  ones = mask.count(1)
  check.that(
    ones + mask.count(0) == num_tokens,
    'action_mask',
    'another byte among them',
    '0 or 1',
  )
  check.that(
    ones == num_actions,
    'action_mask',
    f'{ones} ones',
    f'{num_actions}, the number of sampled tokens (num_actions)',
  )


def _check_logprobs(
  logprobs: np.ndarray, actions: np.ndarray, check: errors.Checker
) -> None:
  check.that(
    logprobs.size > 0 or actions.size == 0,
    'behaviour_logprobs',
    'empty: sampler returned no log-probs',
    f'{actions.size} values; have the sampler return log-probs',
  )
  check.that(
    logprobs.size == actions.size,
    'behaviour_logprobs.length',
    logprobs.size,
    f'{actions.size}, the number of tokens',
  )
  if not _are_logprobs(logprobs):
    problem = logprob_problem(logprobs[actions])
    check.that(
      problem is None,
      'behaviour_logprobs',
      problem,
      'finite and <= 0 at action tokens',
    )
  check.that(
    not logprobs[~actions].any(),
    'behaviour_logprobs',
    'not 0 outside the action mask',
    '0 where the mask is 0',
  )


def _are_logprobs(values: np.ndarray) -> bool:
  """Whether all are finite and at most 0 up to the rounding of float32."""
  # A minimum or maximum of which one is NaN is NaN, and compares as False.
  low, high = values.min(initial=0), values.max(initial=0)
  return bool(low > -np.inf and high <= LOGPROB_CEILING)


def logprob_problem(logprobs: np.ndarray) -> str | None:
  """Names the first value that is no log-probability.

  Args:
    logprobs: [k] float32; nats.

  Returns:
    The value in words, or None when all are finite and at most 0 up to the
    rounding of float32.
  """
  if _are_logprobs(logprobs):
    return None
  wrong = ~np.isfinite(logprobs) | (logprobs > LOGPROB_CEILING)
  index = int(np.argmax(wrong))
  return f'{float(logprobs[index])} at action {index}'


def _encode_array(array: np.ndarray, dtype: int) -> sampler_pb2.Array:
  data = np.asarray(array).astype(_WIRE_DTYPES[dtype]).tobytes()
  return sampler_pb2.Array(
    dtype=dtype,  # type: ignore[arg-type]
    length=len(array),
    data=data,
  )


def _decode_array(
  message: sampler_pb2.Array, field: str, dtype: int, check: errors.Checker
) -> np.ndarray:
  if message.dtype != dtype:
    name = sampler_pb2.DType.Name(dtype)
    check.that(False, f'{field}.dtype', message.dtype, name)
  wire_dtype, data = _WIRE_DTYPES[dtype], message.data
  expected = message.length * wire_dtype.itemsize
  check.that(
    len(data) == expected,
    f'{field}.data',
    f'{len(data)} bytes',
    f'{expected} bytes for {message.length} elements',
  )
  return np.frombuffer(data, wire_dtype)


def _crc32(arrays: Sequence[sampler_pb2.Array]) -> int:
  crc = 0
  for array in arrays:
    crc = zlib.crc32(array.data, crc)
  return crc
