"""What is to be sent at once travels in one message of the rollout stream."""

import dataclasses
import math
from collections.abc import Iterable, Iterator

import numpy as np

from spopp_jax import types
from spopp_jax.sampler import codec, sampler_pb2

# Of what is joined; a single answer may be longer.
_JOINED_BYTES = 2**20
_FRAME_BYTES = 8  # of an entry of a repeated field, at most


def replies(
  trajectories: Iterable[types.Trajectory], max_bytes: int
) -> Iterator[sampler_pb2.RolloutReply]:
  """Yields the answers to requests in few messages, none too long.

  Args:
    trajectories: what the requests came to.
    max_bytes: the most that a message may take.

  Yields:
    Replies with the messages of the trajectories, in order. When kept sets
    make one too long alone, SAMPLER_ERROR without arrays stands in its place:
    part of the sets would be none.
  """
  reply, size = sampler_pb2.RolloutReply(), 0
  for trajectory in trajectories:
    message = _fitting(trajectory, max_bytes)
    added = message.ByteSize() + _FRAME_BYTES
    if size and size + added > min(max_bytes, _JOINED_BYTES):
      yield reply
      reply, size = sampler_pb2.RolloutReply(), 0
    reply.trajectories.append(message)
    size += added
  if size:
    yield reply


def rollout_messages(
  messages: Iterable[sampler_pb2.RolloutMessage], max_bytes: int
) -> Iterator[sampler_pb2.RolloutMessage]:
  """Yields messages of a caller, neighbours of one kind joined.

  Args:
    messages: in the order in which they are to be taken in.
    max_bytes: the most that a message may take.
  """
  joined, size, kind = sampler_pb2.RolloutMessage(), 0, None
  for message in messages:
    added, part = message.ByteSize(), message.WhichOneof('part')
    fits = size + added <= min(max_bytes, _JOINED_BYTES)
    if size and (part != kind or not fits):
      yield joined
      joined, size = sampler_pb2.RolloutMessage(), 0
    joined.MergeFrom(message)
    size, kind = size + added, part
  if size:
    yield joined


def _fitting(
  trajectory: types.Trajectory, max_bytes: int
) -> sampler_pb2.Trajectory:
  """Returns a trajectory's message, or one that says that it is too long."""
  message = codec.encode_trajectory(trajectory)
  size = message.ByteSize() + _FRAME_BYTES
  if size <= max_bytes:
    return message
  return codec.encode_trajectory(
    dataclasses.replace(
      trajectory,
      status=types.Status.SAMPLER_ERROR,
      reward=math.nan,
      tokens=np.zeros(0, np.int32),
      action_mask=np.zeros(0, bool),
      behaviour_logprobs=np.zeros(0, np.float32),
      kept=None,
      spans=(),
      detail=f'the answer has {size} bytes, a message at most {max_bytes}: '
      'lower top_k or top_p, so that fewer ids are kept, or raise '
      'max_message_bytes on both sides',
    )
  )
