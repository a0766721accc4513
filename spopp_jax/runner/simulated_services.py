"""Sampler services of a discrete-event simulation, behind a real pool.

Time is a number that jumps to the next thing to happen. All that happens
follows from a seed; how long an episode takes follows from its request's own.
"""

import collections
import dataclasses
import heapq
import itertools
import math
import queue
import random
import types as python_types
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from spopp_jax import types
from spopp_jax.sampler import base, errors, member, pool, retries, weights

Durations = Callable[[base.Request], float]
_TRUNCATED = (types.Status.CONTEXT_LIMIT, types.Status.LENGTH)
_FAILURES = (types.Status.ENV_ERROR, types.Status.TOOL_TIMEOUT, *_TRUNCATED)


@dataclasses.dataclass(frozen=True)
class Faults:
  """What goes wrong, as means and probabilities; all off by default.

  Attributes:
    crash_every_s: mean time to a crash of a service, which forgets everything.
    cut_every_s: mean time to the loss of its connection alone.
    down_s: mean time that it cannot be reached then.
    replaced_every_s: mean time to one service leaving and another joining.
    failed: share of tries that end without an outcome.
    repeated: share of replies that come twice.
    hanging: share of tries that take `hang_s` longer.
    hang_s: see above.
    latency_s: mean time that a message takes; messages overtake each other.
  """

  crash_every_s: float = math.inf
  cut_every_s: float = math.inf
  down_s: float = 3.0
  replaced_every_s: float = math.inf
  failed: float = 0.0
  repeated: float = 0.0
  hanging: float = 0.0
  hang_s: float = 0.0
  latency_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Site:
  """The services and the pool over them.

  Attributes:
    services: how many.
    slots: episodes that each decodes at once.
    install_s: mean time to connect or to install a snapshot.
    durations: seconds of an episode.
    request_timeout_s: of the pool.
    faults: what goes wrong.
  """

  services: int = 8
  slots: int = 4
  install_s: float = 0.2
  durations: Durations = lambda _: 1.0
  request_timeout_s: float = 120.0
  faults: Faults = Faults()


def lognormal(median_s: float, sigma: float) -> Durations:
  """Returns durations whose logarithm is normal."""
  return lambda request: (
    median_s * random.Random(request.seed).lognormvariate(0.0, sigma)
  )


def pareto(shortest_s: float, exponent: float) -> Durations:
  """Returns durations with P(longer than t) = (shortest_s / t)**exponent."""
  return lambda request: (
    shortest_s * random.Random(request.seed).paretovariate(exponent)
  )


def share(*what: object) -> float:
  """Returns a number in [0, 1) that looks random and follows from `what`."""
  return zlib.crc32(repr(what).encode()) / 2**32


def reward(request: base.Request, version: int) -> float:
  """Returns 0 or 1, of task, seed and version alone."""
  ease = 0.25 + 0.5 * share(request.task_id)
  return float(share(request.task_id, request.seed, version) < ease)


class _Takes(Exception):
  """Raised by a call that takes time, which is made again when it is over."""

  def __init__(self, until_s: float):
    super().__init__(until_s)
    self.until_s = until_s


class World:
  """Clock, events and services of one pool.

  Attributes:
    now_s: the time.
    pool: over all services.
    services: those that were ever connected, by name.
    names: the addresses of the pool.
  """

  def __init__(self, site: Site, budget: retries.RetryBudget, seed: int):
    """Begins at time 0 with every service there and no snapshot.

    Args:
      site: what to build.
      budget: tries of a rollout.
      seed: of all that happens but the episodes themselves.
    """
    self.site = site
    self.rng = random.Random(seed)
    self.now_s = 0.0
    self.services: dict[str, Service] = {}
    self.names = [f'sampler-{i}' for i in range(site.services)]
    self._joined = itertools.count(site.services)
    self._due: list[tuple[float, int, Callable[[], None]]] = []
    self._serial = itertools.count()
    self._events: collections.deque[member.Event] = collections.deque()
    self.again_after(site.faults.replaced_every_s, self._replace)
    self.pool = pool.Pool(
      lambda: self.names,
      lambda name: lambda deliver: self._connect(name, deliver),
      budget=budget,
      request_timeout_s=site.request_timeout_s,
      recovery_timeout_s=site.request_timeout_s,
      clock=lambda: self.now_s,
      run_beside=lambda work: self.after(
        self.mean(site.install_s), lambda: self._run(work)
      ),
      events=self,
    )

  def after(self, seconds: float, action: Callable[[], None]) -> None:
    """Has something happen later."""
    at_s = self.now_s + seconds
    heapq.heappush(self._due, (at_s, next(self._serial), action))

  def again_after(self, mean_s: float, action: Callable[[], None]) -> None:
    """Has something happen again and again, at times without memory."""

    def act() -> None:
      action()
      self.again_after(mean_s, action)

    if math.isfinite(mean_s):
      self.after(self.mean(mean_s), act)

  def mean(self, mean_s: float) -> float:
    """Draws a time with a mean, without memory; 0 for a mean of 0."""
    return self.rng.expovariate(1 / mean_s) if mean_s else 0.0

  def put(self, item: member.Event) -> None:
    """Takes an event of the pool."""
    self._events.append(item)

  def get(
    self, block: bool = True, timeout: float | None = None
  ) -> member.Event:
    """Returns an event, or lets the time pass; raises queue.Empty then."""
    until_s = self.now_s + (timeout or 0.0) * block
    while not self._events:
      if not self._due or self._due[0][0] > until_s:
        self.now_s = until_s
        raise queue.Empty
      self.now_s, _, action = heapq.heappop(self._due)
      action()
    return self._events.popleft()

  def pass_time(self, seconds: float) -> None:
    """Lets the pool work while the learner computes."""
    until_s = self.now_s + seconds
    while self.now_s < until_s:
      self.pool.handle_event(until_s - self.now_s)

  def _run(self, work: Callable[[], None]) -> None:
    try:
      work()
    except _Takes as call:
      self.after(call.until_s - self.now_s, lambda: self._run(work))

  def _connect(self, name: str, deliver: Callable[[object], None]) -> 'Service':
    service = self.services[name] = Service(self, name, deliver)
    return service

  def _replace(self) -> None:
    self.names.append(f'sampler-{next(self._joined)}')
    self.names.pop(self.rng.randrange(len(self.names) - 1))


class Service:
  """A service and the client of it; implements `sampler.member.Source`.

  Attributes:
    service: what it says of itself.
    lost: why there is no connection; None while there is one.
  """

  def __init__(
    self, world: World, name: str, deliver: Callable[[object], None]
  ):
    """Connects to a service that has no snapshot."""
    self.service = python_types.SimpleNamespace(
      num_slots=world.site.slots,
      max_pending=4096,
      active_policy_version=-1,
      active_weights_checksum='',
    )
    self.lost: errors.SamplerError | None = None
    self._world = world
    self._name = name
    self._deliver = deliver
    self._up_at_s = 0.0
    self._closed = False
    # What belongs to an earlier session or connection is dropped.
    self._session = self._connection = 0
    self._queue: collections.deque[base.Request] = collections.deque()
    self._held: set[str] = set()
    self._running = 0
    self._done: dict[str, types.Trajectory] = {}
    faults = world.site.faults
    world.again_after(faults.crash_every_s, self._crash)
    world.again_after(faults.cut_every_s, self._cut)

  def submit(self, requests: Sequence[base.Request]) -> None:
    """Takes requests; one it has answered is answered the same again.

    Raises:
      SamplerLost: there is no connection.
      RuntimeError: the pool has taken the service out.
    """
    self._check_open()
    if self.lost or self._world.now_s < self._up_at_s:
      raise self.lost or errors.SamplerLost(f'{self._name} is gone')
    for one in requests:
      if one.request_id in self._done:
        self._send(self._done[one.request_id])
      elif one.request_id not in self._held:
        self._held.add(one.request_id)
        self._queue.append(one)
    self._begin()

  def receive(self, arrival: object) -> types.Trajectory | None:
    """Takes in a reply or the end of the connection."""
    if isinstance(arrival, types.Trajectory):
      return arrival
    self.lost = errors.SamplerLost(f'{self._name} is gone')
    return None

  def install(
    self, snapshot: weights.Snapshot, *, interrupt: bool = False
  ) -> str:
    """Generates with a snapshot from now on, also what is open if told so."""
    del interrupt
    if self.lost or self._world.now_s < self._up_at_s:
      raise errors.SamplerLost(f'{self._name} is gone')
    self._check_open()
    if snapshot.version < self.service.active_policy_version:
      raise errors.PublicationError(
        f'version {snapshot.version} is older than the active one'
      )
    self.service.active_policy_version = snapshot.version
    self.service.active_weights_checksum = snapshot.checksum
    return snapshot.checksum

  def reconnect(self, deadline_s: float, *, new_session: bool = False) -> None:
    """Restores the connection once the service can be reached."""
    del deadline_s
    if self._world.now_s < self._up_at_s:
      raise _Takes(self._up_at_s)
    if new_session:
      self._forget()
    self._connection += 1
    self.lost = None

  def close(self) -> None:
    """Ends the connection."""
    self._closed = True
    self.lost = errors.SamplerLost(f'{self._name} is closed')
    self._connection += 1
    self._forget()

  def _check_open(self) -> None:
    if self._closed:
      raise RuntimeError(f'{self._name} was closed and is used all the same')

  def _begin(self) -> None:
    faults = self._world.site.faults
    while self._queue and self._running < self._world.site.slots:
      one = self._queue.popleft()
      self._running += 1
      seconds = self._world.site.durations(one)
      if self._world.rng.random() < faults.hanging:
        seconds += faults.hang_s
      version = self.service.active_policy_version
      end = lambda s=self._session, o=one, t=seconds, v=version: self._end(
        s, o, t, v
      )
      self._world.after(seconds, end)

  def _end(
    self, session: int, one: base.Request, seconds: float, version: int
  ) -> None:
    if session != self._session:
      return
    self._running -= 1
    self._held.remove(one.request_id)
    last = self.service.active_policy_version
    trajectory = _trajectory(
      one,
      seconds,
      version,
      last if one.crosses_versions else version,
      share(one.request_id, 'fails') < self._world.site.faults.failed,
    )
    self._done[one.request_id] = trajectory
    self._send(trajectory)
    self._begin()

  def _send(self, trajectory: types.Trajectory) -> None:
    faults = self._world.site.faults
    twice = self._world.rng.random() < faults.repeated
    connection = self._connection

    def arrive() -> None:
      if connection == self._connection and not self.lost:
        self._deliver(trajectory)

    for _ in range(1 + twice):
      self._world.after(self._world.mean(faults.latency_s), arrive)

  def _crash(self) -> None:
    self.service.active_policy_version = -1
    self.service.active_weights_checksum = ''
    self._forget()
    self._cut()

  def _cut(self) -> None:
    if self._closed:
      return
    if self._world.now_s >= self._up_at_s and not self.lost:
      self._connection += 1
      self._deliver('end')
      self._up_at_s = self._world.now_s + self._world.mean(
        self._world.site.faults.down_s
      )

  def _forget(self) -> None:
    self._session += 1
    self._queue.clear()
    self._held.clear()
    self._running = 0
    self._done.clear()


def _trajectory(
  one: base.Request, seconds: float, first: int, last: int, failed: bool
) -> types.Trajectory:
  """Returns an episode of two action tokens or, across versions, of more."""
  status = types.Status.OK
  if failed:
    status = _FAILURES[int(share(one.request_id) * len(_FAILURES))]
  count = 2 + last - first
  spans = [types.VersionSpan(v, '', 1) for v in range(first, last + 1)]
  spans[0] = dataclasses.replace(spans[0], num_actions=2)
  mask = np.ones(1 + count, bool)
  mask[0] = False
  return types.Trajectory(
    request_id=one.request_id,
    task_id=one.task_id,
    status=status,
    reward=math.nan if failed else reward(one, first),
    policy_version=first,
    weights_checksum='',
    tokens=np.arange(1 + count, dtype=np.int32),
    action_mask=mask,
    behaviour_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
    num_turns=1,
    sampling=one.sampling,
    seconds=seconds,
    spans=tuple(spans) if last > first else (),
    detail='it was to fail' if failed else '',
  )
