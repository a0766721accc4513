"""Host records <-> messages of sampler.proto, checked in full on receipt."""

import math
import re
import zlib

import numpy as np

from spopp_jax import types
from spopp_jax.sampler import base, errors, sampler_pb2

CONTRACT_VERSION = 2
SCHEMA_VERSION = 1

# A float32 log-softmax may exceed 0 by its rounding, never by more.
LOGPROB_CEILING = 1e-5

_MAX_ID_CHARACTERS = 256
_CHECKSUM = re.compile(r'[0-9a-f]{64}')
_WIRE_DTYPES: dict[int, np.dtype] = {
  sampler_pb2.DTYPE_BOOL: np.dtype(np.uint8),
  sampler_pb2.DTYPE_INT32: np.dtype('<i4'),
  sampler_pb2.DTYPE_FLOAT32: np.dtype('<f4'),
}


def encode_request(request: base.Request) -> sampler_pb2.Request:
  """Returns the message of a request.

  Raises:
    InvalidMessage: a field is outside what the receiver would accept.
  """
  try:
    message = sampler_pb2.Request(
      request_id=request.request_id,
      task_id=request.task_id,
      policy_version=request.policy_version,
      seed=request.seed,
      sampling=_encode_sampling(request.sampling),
    )
  except (ValueError, TypeError) as error:
    # protobuf refuses numbers outside a field's range and wrong types.
    raise errors.InvalidMessage(
      'request', f'not encodable ({error})', 'the types of sampler/base.py'
    ) from error
  decode_request(message)
  return message


def decode_request(message: sampler_pb2.Request) -> base.Request:
  """Reads and checks a request.

  Raises:
    InvalidMessage: a field is missing or outside what is allowed.
  """
  request_id = _request_id(message.request_id)
  check = _Checker(request_id)
  check.that(
    bool(message.task_id), 'task_id', repr(message.task_id), 'not empty'
  )
  version = message.policy_version
  check.that(version >= 0, 'policy_version', version, '>= 0')
  return base.Request(
    request_id=request_id,
    task_id=message.task_id,
    policy_version=version,
    seed=message.seed,
    sampling=_decode_sampling(message.sampling, check),
  )


def encode_trajectory(trajectory: types.Trajectory) -> sampler_pb2.Trajectory:
  """Returns the message of a finished request.

  Args:
    trajectory: arrays [T]; `reward` is sent only when the status is OK.

  Returns:
    The message; it is not checked here but by its receiver.
  """
  tokens = _encode_array(trajectory.tokens, sampler_pb2.DTYPE_INT32)
  mask = _encode_array(trajectory.action_mask, sampler_pb2.DTYPE_BOOL)
  logprobs = _encode_array(
    trajectory.behaviour_logprobs, sampler_pb2.DTYPE_FLOAT32
  )
  has_reward = trajectory.status == types.Status.OK
  return sampler_pb2.Trajectory(
    schema_version=SCHEMA_VERSION,
    request_id=trajectory.request_id,
    task_id=trajectory.task_id,
    status=int(trajectory.status),  # type: ignore[arg-type]
    reward=float(trajectory.reward) if has_reward else None,
    policy_version=trajectory.policy_version,
    weights_checksum=trajectory.weights_checksum,
    tokens=tokens,
    action_mask=mask,
    behaviour_logprobs=logprobs,
    num_actions=trajectory.num_actions,
    payload_crc32=_payload_crc32(tokens, mask, logprobs),
    num_turns=trajectory.num_turns,
    sampling=_encode_sampling(trajectory.sampling),
    seconds=trajectory.seconds,
    detail=trajectory.detail,
  )


def decode_trajectory(
  message: sampler_pb2.Trajectory, *, max_tokens: int
) -> types.Trajectory:
  """Reads and checks a finished request; nothing is padded or repaired.

  Args:
    message: what arrived.
    max_tokens: the most tokens a trajectory may have; the service's context.

  Returns:
    The trajectory; `reward` is NaN when the status is not OK.

  Raises:
    InvalidMessage: a field is missing, damaged or outside what is allowed.
  """
  request_id = _request_id(message.request_id)
  check = _Checker(request_id)
  check.that(
    message.schema_version == SCHEMA_VERSION,
    'schema_version',
    message.schema_version,
    f'{SCHEMA_VERSION}; run the same spopp_jax on both sides',
  )
  status = _decode_status(message.status, check)
  tokens, mask, logprobs = _decode_payload(message, max_tokens, check)
  check.that(
    status != types.Status.OK or message.num_actions > 0,
    'num_actions',
    0,
    'at least 1 when the status is OK',
  )
  has_weights = message.num_actions > 0 or message.weights_checksum
  check.that(
    not has_weights or _CHECKSUM.fullmatch(message.weights_checksum),
    'weights_checksum',
    repr(message.weights_checksum),
    '64 hex digits, or empty when nothing was generated',
  )
  check.that(
    math.isfinite(message.seconds) and message.seconds >= 0,
    'seconds',
    message.seconds,
    'finite and >= 0',
  )
  return types.Trajectory(
    request_id=request_id,
    task_id=message.task_id,
    status=status,
    reward=_decode_reward(message, status, check),
    policy_version=message.policy_version,
    weights_checksum=message.weights_checksum,
    tokens=tokens,
    action_mask=mask,
    behaviour_logprobs=logprobs,
    num_turns=message.num_turns,
    sampling=_decode_sampling(message.sampling, check),
    seconds=message.seconds,
    detail=message.detail,
  )


class _Checker:
  """Raises InvalidMessage in the name of one request."""

  def __init__(self, request_id: str):
    self.request_id = request_id

  def that(
    self, holds: object, field: str, value: object, allowed: str
  ) -> None:
    if not holds:
      raise errors.InvalidMessage(
        field, value, allowed, request_id=self.request_id
      )


def _request_id(value: str) -> str:
  if not 1 <= len(value) <= _MAX_ID_CHARACTERS:
    raise errors.InvalidMessage(
      'request_id',
      f'{len(value)} characters long',
      f'1 to {_MAX_ID_CHARACTERS} characters',
    )
  return value


def _decode_status(value: int, check: _Checker) -> types.Status:
  known = [int(status) for status in types.Status]
  check.that(value in known, 'status', value, f'{known[0]} to {known[-1]}')
  return types.Status(value)


def _decode_reward(
  message: sampler_pb2.Trajectory, status: types.Status, check: _Checker
) -> float:
  has_reward = message.HasField('reward')
  if status != types.Status.OK:
    check.that(
      not has_reward, 'reward', message.reward, f'absent with {status.name}'
    )
    return math.nan
  check.that(has_reward, 'reward', 'absent', 'in [0, 1] with OK')
  check.that(0 <= message.reward <= 1, 'reward', message.reward, 'in [0, 1]')
  return message.reward


def _encode_sampling(
  sampling: types.SamplingParams,
) -> sampler_pb2.SamplingParams:
  return sampler_pb2.SamplingParams(
    temperature=sampling.temperature,
    top_p=sampling.top_p,
    top_k=sampling.top_k,
    max_turn_tokens=sampling.max_turn_tokens,
    max_turns=sampling.max_turns,
  )


def _decode_sampling(
  message: sampler_pb2.SamplingParams, check: _Checker
) -> types.SamplingParams:
  temperature, top_p = message.temperature, message.top_p
  check.that(
    math.isfinite(temperature) and temperature > 0,
    'sampling.temperature',
    temperature,
    'finite and > 0',
  )
  check.that(0 < top_p <= 1, 'sampling.top_p', top_p, 'in (0, 1]')
  for name in ('max_turn_tokens', 'max_turns'):
    value = getattr(message, name)
    check.that(value >= 1, f'sampling.{name}', value, '>= 1')
  return types.SamplingParams(
    temperature=temperature,
    top_p=top_p,
    top_k=message.top_k,
    max_turn_tokens=message.max_turn_tokens,
    max_turns=message.max_turns,
  )


def _encode_array(array: np.ndarray, dtype: int) -> sampler_pb2.Array:
  data = np.asarray(array).astype(_WIRE_DTYPES[dtype]).tobytes()
  return sampler_pb2.Array(
    dtype=dtype,  # type: ignore[arg-type]
    length=len(array),
    data=data,
  )


def _decode_array(
  message: sampler_pb2.Array, field: str, dtype: int, check: _Checker
) -> np.ndarray:
  check.that(
    message.dtype == dtype,
    f'{field}.dtype',
    message.dtype,
    sampler_pb2.DType.Name(dtype),
  )
  wire_dtype = _WIRE_DTYPES[dtype]
  check.that(
    len(message.data) == message.length * wire_dtype.itemsize,
    f'{field}.data',
    f'{len(message.data)} bytes',
    f'{message.length * wire_dtype.itemsize} bytes for {message.length} '
    'elements',
  )
  return np.frombuffer(message.data, wire_dtype)


def _payload_crc32(*arrays: sampler_pb2.Array) -> int:
  crc = 0
  for array in arrays:
    crc = zlib.crc32(array.data, crc)
  return crc


def _decode_payload(
  message: sampler_pb2.Trajectory, max_tokens: int, check: _Checker
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  wire = (message.tokens, message.action_mask, message.behaviour_logprobs)
  crc = _payload_crc32(*wire)
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
  _check_payload(tokens, mask, logprobs, message.num_actions, check)
  check.that(
    tokens.size <= max_tokens,
    'tokens.length',
    tokens.size,
    f'at most the context of {max_tokens} tokens',
  )
  return (
    tokens.astype(np.int32),
    mask.astype(bool),
    logprobs.astype(np.float32),
  )


def _check_payload(
  tokens: np.ndarray,
  mask: np.ndarray,
  logprobs: np.ndarray,
  num_actions: int,
  check: _Checker,
) -> None:
  check.that(
    bool(np.all(tokens >= 0)), 'tokens', tokens.min(initial=0), 'ids >= 0'
  )
  check.that(
    mask.size == tokens.size,
    'action_mask.length',
    mask.size,
    f'{tokens.size}, the number of tokens',
  )
  check.that(
    bool(np.all(mask <= 1)), 'action_mask', mask.max(initial=0), '0 or 1'
  )
  check.that(
    int(mask.sum()) == num_actions,
    'action_mask',
    f'{int(mask.sum())} ones',
    f'{num_actions}, the number of sampled tokens (num_actions)',
  )
  check.that(
    logprobs.size > 0 or tokens.size == 0,
    'behaviour_logprobs',
    'empty: sampler returned no log-probs',
    f'{tokens.size} values; have the sampler return log-probs',
  )
  check.that(
    logprobs.size == tokens.size,
    'behaviour_logprobs.length',
    logprobs.size,
    f'{tokens.size}, the number of tokens',
  )
  actions = mask.astype(bool)
  problem = logprob_problem(logprobs[actions])
  check.that(
    problem is None,
    'behaviour_logprobs',
    problem,
    'finite and <= 0 at action tokens',
  )
  check.that(
    bool(np.all(logprobs[~actions] == 0)),
    'behaviour_logprobs',
    'not 0 outside the action mask',
    '0 where the mask is 0',
  )


def logprob_problem(logprobs: np.ndarray) -> str | None:
  """Names the first value that is no log-probability.

  Args:
    logprobs: [k] float32; nats.

  Returns:
    The value in words, or None when all are finite and at most 0 up to the
    rounding of float32.
  """
  wrong = ~np.isfinite(logprobs) | (logprobs > LOGPROB_CEILING)
  if not wrong.any():
    return None
  index = int(np.argmax(wrong))
  return f'{float(logprobs[index])} at action {index}'
