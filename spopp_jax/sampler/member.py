"""One service of a pool: its connection, what it owes, what happens to it."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from spopp_jax import types
from spopp_jax.sampler import base, errors, weights

# Requests a service holds for each that it decodes: while one answer travels
# the next episode can begin.
_REQUESTS_A_SLOT = 2
# Time without a connection that is worth a word.
_NOTICE_S = 15.0
_LOG = logging.getLogger(__name__)


class Source(Protocol):
  """A service, as `SamplerClient` and `LocalSampler` offer it."""

  @property
  def service(self) -> Any:
    """What it said of itself last: a `handshake.Description`."""

  @property
  def lost(self) -> errors.SamplerError | None:
    """Why there is no connection; None while there is one."""

  def submit(self, requests: Sequence[base.Request]) -> None:
    """Sends requests."""

  def receive(self, arrival: Any) -> types.Trajectory | None:
    """Takes in what it delivered."""

  def install(
    self, snapshot: weights.Snapshot, *, interrupt: bool = False
  ) -> str:
    """Transfers and activates a snapshot."""

  def reconnect(self, deadline_s: float, *, new_session: bool = False) -> None:
    """Restores the connection."""

  def close(self) -> None:
    """Ends it."""


# Connects to one service; what that delivers goes to the function given.
Connect = Callable[[Callable[[Any], None]], Source]


@dataclasses.dataclass(eq=False)
class Member:
  """What a pool knows of one service.

  Attributes:
    name: its address.
    connect: makes its source.
    source: the connection; None before the first.
    connected: it can be sent something.
    installing: a snapshot is on its way to it.
    leaving: it gets no more requests and goes once it owes none.
    version: its active snapshot; -1 for none.
    owes: the requests it was sent, oldest first, each with the time then.
    losses_in_a_row: losses since its last answer.
    connections: how many it has had; news of an earlier one counts no more.
    missing_since_s: since when it is not connected, if it is not.
  """

  name: str
  connect: Connect
  source: Source | None = None
  connected: bool = False
  installing: bool = False
  leaving: bool = False
  version: int = -1
  owes: dict[str, tuple[base.Request, float]] = dataclasses.field(
    default_factory=dict
  )
  losses_in_a_row: int = 0
  connections: int = 0
  missing_since_s: float = 0.0
  _noticed_s: float = 0.0

  @property
  def was_noticed(self) -> bool:
    """Whether its absence was spoken of since the last look at it."""
    return self._noticed_s > 0

  def notice_absence(self, now: float) -> None:
    """Logs that it is not connected, ever more rarely."""
    missing_s = now - self.missing_since_s
    if self.connected or missing_s < _NOTICE_S:
      self._noticed_s = 0.0
    elif missing_s >= 2 * self._noticed_s:
      self._noticed_s = missing_s
      _LOG.warning(
        '%s is not connected since %.0f s; it joins when it answers',
        self.name,
        missing_s,
      )

  @property
  def room(self) -> int:
    """Requests that it still takes."""
    if self.source is None or not self.connected or self.leaving:
      return 0
    service = self.source.service
    window = min(service.max_pending, _REQUESTS_A_SLOT * service.num_slots)
    return window - len(self.owes)


class Event(NamedTuple):
  """Something that happened to a member.

  Attributes:
    member: whose; None for what the pool is asked.
    kind: which.
    content: what arrived, the new source, the number of the connection with
      the version or the error, why there is no connection, or the requests.
  """

  member: Member | None
  kind: Literal['arrival', 'joined', 'installed', 'failed', 'submitted']
  content: Any


class Events(Protocol):
  """Where events wait; `queue.SimpleQueue` is one."""

  def put(self, item: Event) -> None:
    """Adds one; called from any thread."""

  def get(self, block: bool = True, timeout: float | None = None) -> Event:
    """Returns the oldest; raises queue.Empty without one in time."""
