"""Host records <-> messages of sampler.proto, checked in full on receipt."""

import dataclasses
import enum
import math
import re
from typing import TypeVar

from spopp_jax import types
from spopp_jax.sampler import base, errors, payload, sampler_pb2

CONTRACT_VERSION = 6
SCHEMA_VERSION = 3

_MAX_ID_CHARACTERS = 256
_MAX_TEXT_CHARACTERS = 4096
_CHECKSUM = re.compile(r'[0-9a-f]{64}')
_Closed = TypeVar('_Closed', bound=enum.IntEnum)


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
      crosses_versions=request.crosses_versions,
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
  check = errors.Checker(request_id)
  check.that(
    bool(message.task_id), 'task_id', repr(message.task_id), 'not empty'
  )
  _check_text(message.task_id, 'task_id', check)
  version = message.policy_version
  check.that(version >= 0, 'policy_version', version, '>= 0')
  return base.Request(
    request_id=request_id,
    task_id=message.task_id,
    policy_version=version,
    seed=message.seed,
    sampling=_decode_sampling(message.sampling, check),
    crosses_versions=message.crosses_versions,
  )


def encode_trajectory(trajectory: types.Trajectory) -> sampler_pb2.Trajectory:
  """Returns the message of a finished request.

  Args:
    trajectory: arrays [T]; `reward` is sent only when the status is OK.

  Returns:
    The message; it is not checked here but by its receiver.
  """
  has_reward = trajectory.status == types.Status.OK
  return sampler_pb2.Trajectory(
    schema_version=SCHEMA_VERSION,
    request_id=trajectory.request_id,
    task_id=trajectory.task_id,
    status=int(trajectory.status),  # type: ignore[arg-type]
    reward=float(trajectory.reward) if has_reward else None,
    policy_version=trajectory.policy_version,
    weights_checksum=trajectory.weights_checksum,
    num_turns=trajectory.num_turns,
    sampling=_encode_sampling(trajectory.sampling),
    seconds=trajectory.seconds,
    detail=trajectory.detail,
    logprob_kind=int(trajectory.logprob_kind),  # type: ignore[arg-type]
    spans=[
      sampler_pb2.VersionSpan(**dataclasses.asdict(span))
      for span in trajectory.spans
    ],
    **payload.encode(trajectory),
  )


def decode_trajectory(
  message: sampler_pb2.Trajectory, *, max_tokens: int, vocab_size: int
) -> types.Trajectory:
  """Reads and checks a finished request; nothing is padded or repaired.

  Args:
    message: what arrived.
    max_tokens: the most tokens a trajectory may have; the service's context.
    vocab_size: number of the model's ids.

  Returns:
    The trajectory; `reward` is NaN when the status is not OK.

  Raises:
    InvalidMessage: a field is missing, damaged or outside what is allowed.
  """
  request_id = _request_id(message.request_id)
  check = errors.Checker(request_id)
  check.that(
    message.schema_version == SCHEMA_VERSION,
    'schema_version',
    message.schema_version,
    f'{SCHEMA_VERSION}; run the same spopp_jax on both sides',
  )
  status = _member(types.Status, message.status, 'status', check)
  sampling = _decode_sampling(message.sampling, check)
  check.that(
    sampling.truncated or not message.HasField('kept'),
    'kept',
    'there',
    'absent, since top_p is 1, top_k is 0 and min_p is 0',
  )
  _check_text(message.task_id, 'task_id', check)
  _check_text(message.detail, 'detail', check)
  arrays = payload.decode(
    message, max_tokens=max_tokens, vocab_size=vocab_size, check=check
  )
  _check_origin(message, status, check)
  return types.Trajectory(
    request_id=request_id,
    task_id=message.task_id,
    status=status,
    reward=_decode_reward(message, status, check),
    policy_version=message.policy_version,
    weights_checksum=message.weights_checksum,
    num_turns=message.num_turns,
    sampling=sampling,
    seconds=message.seconds,
    detail=message.detail,
    logprob_kind=_member(
      types.LogprobKind, message.logprob_kind, 'logprob_kind', check
    ),
    spans=_decode_spans(message, check),
    **arrays._asdict(),
  )


def _request_id(value: str) -> str:
  if not 1 <= len(value) <= _MAX_ID_CHARACTERS:
    raise errors.InvalidMessage(
      'request_id',
      f'{len(value)} characters long',
      f'1 to {_MAX_ID_CHARACTERS} characters',
    )
  return value


def _check_text(value: str, field: str, check: errors.Checker) -> None:
  check.that(
    len(value) <= _MAX_TEXT_CHARACTERS,
    field,
    f'{len(value)} characters long',
    f'at most {_MAX_TEXT_CHARACTERS} characters',
  )


def _member(
  allowed: type[_Closed], value: int, field: str, check: errors.Checker
) -> _Closed:
  """Reads a value of a closed set, which is numbered without gaps."""
  try:
    return allowed(value)
  except ValueError:
    known = [int(member) for member in allowed]
    check.that(False, field, value, f'{known[0]} to {known[-1]}')
    raise


def _check_origin(
  message: sampler_pb2.Trajectory, status: types.Status, check: errors.Checker
) -> None:
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


def _decode_spans(
  message: sampler_pb2.Trajectory, check: errors.Checker
) -> tuple[types.VersionSpan, ...]:
  spans = tuple(
    types.VersionSpan(
      span.policy_version, span.weights_checksum, span.num_actions
    )
    for span in message.spans
  )
  if not spans:
    return ()
  versions = [span.policy_version for span in spans]
  check.that(
    len(spans) > 1 and versions == sorted(set(versions)),
    'spans.policy_version',
    versions,
    'several, rising',
  )
  first = (message.policy_version, message.weights_checksum)
  check.that(
    (spans[0].policy_version, spans[0].weights_checksum) == first,
    'spans',
    f'from version {versions[0]} on',
    f'from policy_version {first[0]} and its checksum on',
  )
  lengths = [span.num_actions for span in spans]
  check.that(
    min(lengths) >= 1 and sum(lengths) == message.num_actions,
    'spans.num_actions',
    lengths,
    f'positive, {message.num_actions} in sum',
  )
  for span in spans:
    check.that(
      _CHECKSUM.fullmatch(span.weights_checksum),
      'spans.weights_checksum',
      repr(span.weights_checksum),
      '64 hex digits',
    )
  return spans


def _decode_reward(
  message: sampler_pb2.Trajectory, status: types.Status, check: errors.Checker
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
    min_p=sampling.min_p,
  )


def _decode_sampling(
  message: sampler_pb2.SamplingParams, check: errors.Checker
) -> types.SamplingParams:
  temperature, top_p = message.temperature, message.top_p
  check.that(
    math.isfinite(temperature) and temperature > 0,
    'sampling.temperature',
    temperature,
    'finite and > 0',
  )
  check.that(0 < top_p <= 1, 'sampling.top_p', top_p, 'in (0, 1]')
  check.that(
    0 <= message.min_p <= 1, 'sampling.min_p', message.min_p, 'in [0, 1]'
  )
  for name in ('max_turn_tokens', 'max_turns'):
    value = getattr(message, name)
    check.that(value >= 1, f'sampling.{name}', value, '>= 1')
  return types.SamplingParams(
    temperature=temperature,
    top_p=top_p,
    top_k=message.top_k,
    max_turn_tokens=message.max_turn_tokens,
    max_turns=message.max_turns,
    min_p=message.min_p,
  )
