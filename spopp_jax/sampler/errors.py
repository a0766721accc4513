"""What can go wrong between a runner and a sampler service."""

_SHOWN_CHARACTERS = 200


def shown(value: object) -> str:
  """Returns a value in words, cut to a length that a log line can bear."""
  text = str(value)
  if len(text) <= _SHOWN_CHARACTERS:
    return text
  return f'{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)'


class SamplerError(Exception):
  """Base of everything this boundary raises."""


class SamplerLost(SamplerError):
  """The service is gone or unreachable; `reconnect` and submit again."""


class SamplerTimeout(SamplerError):
  """Nothing finished within the time allowed; the service still answers."""


class NothingOutstanding(SamplerTimeout):
  """There is nothing to wait for; submit first."""


class SamplerSilent(SamplerError):
  """A service does not answer some requests and no other can be asked."""


class HandshakeRefused(SamplerError):
  """The two sides do not fit together; no rollout was run."""


class CredentialsUnusable(SamplerError):
  """A file of this end's credentials is missing or not what it should be."""


class SessionEnded(SamplerError):
  """A call names a session that the service does not work for (any more)."""


class QueueFull(SamplerError):
  """More requests were submitted than the service holds at a time."""


class PublicationError(SamplerError):
  """A snapshot was not taken; the version active before still generates."""


class SnapshotUnseen(PublicationError):
  """The directory of a snapshot is not to be seen from here."""


class EngineError(SamplerError):
  """The server that an external engine stands in front of fails it."""


class EngineLost(EngineError):
  """That server is gone, or has weights that nobody knows; nothing goes on."""


class EngineRefused(EngineError):
  """That server did not do what one call asked; others may fare better."""


class InvalidMessage(SamplerError):
  """A message breaks the contract of sampler.proto.

  Attributes:
    field: name of the field as in sampler.proto.
    request_id: whose message it is; '' when that cannot be read.
  """

  def __init__(
    self, field: str, value: object, allowed: str, *, request_id: str = ''
  ):
    whose = f' of request {request_id}' if request_id else ''
    super().__init__(f'{field}{whose} is {shown(value)}; allowed: {allowed}')
    self.field = field
    self.request_id = request_id


class Checker:
  """Raises InvalidMessage in the name of one request."""

  def __init__(self, request_id: str):
    self.request_id = request_id

  def that(
    self, holds: object, field: str, value: object, allowed: str
  ) -> None:
    """Refuses a field unless `holds`; arguments as of InvalidMessage."""
    if not holds:
      raise InvalidMessage(field, value, allowed, request_id=self.request_id)
