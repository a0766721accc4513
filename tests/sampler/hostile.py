"""Honest trajectories and requests, and ways to make them lie.

A lie (`hostile_lies`) knows by itself that it is one; what a receiver says of
it plays no part here. Only damage to the bytes may leave a message as it was,
or change what is the sender's own word; `differences` tells which.
"""

import dataclasses

import messages
import numpy as np

from spopp_jax import types
from spopp_jax.sampler import base, codec

CHECKSUM = messages.CHECKSUM
LATER = 'cd' * 32
MAX_TOKENS = 100
VOCAB_SIZE = 1000
PLAIN = types.SamplingParams(max_turn_tokens=4, max_turns=6)
TRUNCATED = dataclasses.replace(PLAIN, top_k=3)
KINDS = ('plain', 'truncated', 'spans', 'empty', 'failed')
# No receiver can know better than the sender.
SENDERS_WORD = {'reward', 'num_turns', 'seconds', 'detail', 'logprob_kind'}


def request(number, kind='plain', request_id=None):
  """Returns what an honest trajectory of that kind answers."""
  return base.Request(
    request_id or f'r{number}',
    f'task-{number % 7}',
    3,
    number,
    TRUNCATED if kind == 'truncated' else PLAIN,
    crosses_versions=kind == 'spans',
  )


def honest(asked, kind):
  """Returns the answer to a request; its arrays follow from the seed."""
  rng = np.random.default_rng(asked.seed)
  whole = types.Trajectory(
    request_id=asked.request_id,
    task_id=asked.task_id,
    status=types.Status.OK,
    reward=float(rng.integers(2)),
    policy_version=asked.policy_version,
    weights_checksum=CHECKSUM,
    tokens=rng.integers(10, 900, 8).astype(np.int32),
    action_mask=np.array([0, 0, 1, 1, 0, 1, 1, 0], bool),
    behaviour_logprobs=np.zeros(8, np.float32),
    num_turns=2,
    sampling=asked.sampling,
    seconds=0.5,
  )
  sampled = whole.tokens[whole.action_mask]
  whole.behaviour_logprobs[whole.action_mask] = -rng.uniform(0.1, 4.0, 4)
  if kind == 'truncated':
    sets = messages.csr(
      *([t, t + 1, t + 2] for t in sampled.tolist()), log_mass=[-0.5] * 4
    )
    return dataclasses.replace(whole, kept=sets)
  if kind == 'spans':
    first = types.VersionSpan(3, CHECKSUM, 1)
    return dataclasses.replace(
      whole, spans=(first, types.VersionSpan(4, LATER, 3))
    )
  if kind == 'plain':
    return whole
  none = base.unanswered(asked, types.Status.CONTEXT_LIMIT, 'too long')
  none = dataclasses.replace(none, weights_checksum=CHECKSUM)
  if kind == 'empty':
    return none
  return dataclasses.replace(none, status=types.Status.ENV_ERROR)


def differences(ours, theirs):
  """Returns the names of the fields that are not the same to the bit."""

  def bits(value):
    if isinstance(value, types.KeptIds):
      return bits(value.ids), bits(value.offsets)
    if isinstance(value, np.ndarray):
      return value.dtype, value.shape, value.tobytes()
    return repr(value)

  names = [field.name for field in dataclasses.fields(types.Trajectory)]
  return {
    name
    for name in names
    if bits(getattr(ours, name)) != bits(getattr(theirs, name))
  }


def pick(rng, choices):
  """Returns one of the choices."""
  return choices[rng.integers(len(choices))]


def tell(rng, message, lies):
  """Returns a copy that breaks one rule, and the name of the lie."""
  copy = type(message)()
  copy.CopyFrom(message)
  lie = pick(rng, lies)
  lie(rng, copy)
  return copy, lie.__name__


def damage(rng, data):
  """Returns bytes with flipped bits, a piece too few or too many."""
  way, at = rng.integers(4), int(rng.integers(len(data)))
  if way == 0:
    return data[:at]
  if way == 1:
    return data[:at] + rng.bytes(int(rng.integers(1, 9))) + data[at:]
  damaged = bytearray(data)
  for _ in range(int(rng.integers(1, 4))):
    damaged[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
  return bytes(damaged)


def answers(count):
  """Returns (request, honest trajectory, its message, kind) of every kind."""
  made = []
  for number in range(count):
    kind = KINDS[number % len(KINDS)]
    asked = request(number, kind)
    trajectory = honest(asked, kind)
    made.append((asked, trajectory, codec.encode_trajectory(trajectory), kind))
  return made
