"""What both sides must agree on before the first rollout."""

import dataclasses
import re

from spopp_jax.sampler import codec, errors, options, sampler_pb2

_SESSION_ID = re.compile(r'[0-9a-f]{32}')


@dataclasses.dataclass(frozen=True)
class Expectation:
  """What a runner needs its service to be.

  Attributes:
    tokenizer_fingerprint: of the runner's tokenizer and template.
    model_fingerprint: of the architecture whose parameters it publishes.
    tasks_fingerprint: of its task ids (`rollout.tasks_fingerprint`).
    max_context_tokens: the longest trajectory that it can take.
    vocab_size: number of ids of its model; replies with others are refused.
  """

  tokenizer_fingerprint: str
  model_fingerprint: str
  tasks_fingerprint: str
  max_context_tokens: int
  vocab_size: int


@dataclasses.dataclass(frozen=True)
class Description:
  """What a service says of itself; fields as in HandshakeReply."""

  tokenizer_fingerprint: str
  model_fingerprint: str
  tasks_fingerprint: str
  num_tasks: int
  max_context_tokens: int
  num_slots: int
  max_pending: int
  active_policy_version: int
  active_weights_checksum: str


def limits_to_message(
  limits: options.ChannelLimits,
) -> sampler_pb2.ChannelLimits:
  """Returns the message of channel limits."""
  return sampler_pb2.ChannelLimits(**dataclasses.asdict(limits))


def request(
  limits: options.ChannelLimits, session_id: str
) -> sampler_pb2.HandshakeRequest:
  """Returns what a caller opens with; `session_id` is a uuid4 in hex."""
  return sampler_pb2.HandshakeRequest(
    contract_version=codec.CONTRACT_VERSION,
    limits=limits_to_message(limits),
    session_id=session_id,
  )


def reply(
  description: Description, limits: options.ChannelLimits
) -> sampler_pb2.HandshakeReply:
  """Returns what a service answers."""
  return sampler_pb2.HandshakeReply(
    contract_version=codec.CONTRACT_VERSION,
    limits=limits_to_message(limits),
    **dataclasses.asdict(description),
  )


def check_contract(
  message: sampler_pb2.HandshakeRequest | sampler_pb2.HandshakeReply,
  limits: options.ChannelLimits,
) -> None:
  """Compares contract and channel limits of the other side with our own.

  Raises:
    HandshakeRefused: they differ; the text names both values.
  """
  pairs = [
    ('contract_version', message.contract_version, codec.CONTRACT_VERSION)
  ]
  pairs += [
    (name, getattr(message.limits, name), ours)
    for name, ours in dataclasses.asdict(limits).items()
  ]
  for name, theirs, ours in pairs:
    if theirs != ours:
      raise errors.HandshakeRefused(
        f'{name} is {ours} here and {theirs} on the other side; run the same '
        'spopp_jax with the same sampler settings on both'
      )


def check_session_id(session_id: str) -> None:
  """Raises HandshakeRefused for what is no uuid4 in hex."""
  if not _SESSION_ID.fullmatch(session_id):
    raise errors.HandshakeRefused(
      f'session_id is {errors.shown(session_id)!r}; allowed: 32 digits 0-9 '
      'and a-f, drawn once for the life of a runner'
    )


def check_description(description: Description, expected: Expectation) -> None:
  """Compares a service with what a runner needs.

  Raises:
    HandshakeRefused: it does not fit; the text names both values.
  """
  advice = {
    'tokenizer_fingerprint': 'give both sides the same tokenizer files',
    'model_fingerprint': 'give both sides the same model configuration',
    'tasks_fingerprint': 'give both sides the same tasks',
  }
  for name, remedy in advice.items():
    ours, theirs = getattr(expected, name), getattr(description, name)
    if ours != theirs:
      raise errors.HandshakeRefused(
        f'{name} is {ours} at the runner and {theirs} at the service; {remedy}'
      )
  if description.max_context_tokens > expected.max_context_tokens:
    raise errors.HandshakeRefused(
      f'max_context_tokens is {expected.max_context_tokens} at the runner and '
      f'{description.max_context_tokens} at the service; the service must not '
      'hold longer trajectories than the runner can take'
    )
  for name in ('num_slots', 'max_pending', 'max_context_tokens'):
    if getattr(description, name) < 1:
      raise errors.HandshakeRefused(
        f'{name} of the service is {getattr(description, name)}; allowed: at '
        'least 1, or it could never be asked anything'
      )


def describe(message: sampler_pb2.HandshakeReply) -> Description:
  """Reads a service's answer."""
  return Description(
    **{
      field.name: getattr(message, field.name)
      for field in dataclasses.fields(Description)
    }
  )
