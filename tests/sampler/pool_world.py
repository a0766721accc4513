"""A pool without a network: scripted services, a clock that only jumps."""

import collections
import math
import queue
import types as python_types

import numpy as np

from spopp_jax import types
from spopp_jax.sampler import base, errors, pool, retries

PARAMS = {'w': np.zeros(2, np.float32)}
SAMPLING = types.SamplingParams(max_turn_tokens=4, max_turns=6)


def request(number, version=0):
  """Returns request `r<number>`."""
  return base.Request(f'r{number}', f'task-{number}', version, number, SAMPLING)


class World:
  """Clock, events and services of one pool.

  Attributes:
    now: seconds.
    services: by name; one is made at the first connection.
    absent: names that cannot be reached.
    names: the addresses of the pool.
    works: what runs beside, not begun yet, when `delays` is set.
  """

  def __init__(
    self, *names, attempts=3, slots=1, delays=False, absent=(), **settings
  ):
    self.now = 0.0
    self.services = {}
    self.absent = dict(absent)
    self.names = list(names)
    self.works = collections.deque()
    self.delays = delays
    self.slots = slots
    self._queue = collections.deque()
    self.budget = retries.RetryBudget(attempts)
    self.pool = pool.Pool(
      lambda: self.names,
      lambda name: lambda deliver: self._connect(name, deliver),
      budget=self.budget,
      **{'request_timeout_s': 10.0, 'recovery_timeout_s': 30.0, **settings},
      clock=lambda: self.now,
      run_beside=self._run_beside,
      events=self,
    )

  def put(self, item):
    """Takes an event."""
    self._queue.append(item)

  def get(self, block=True, timeout=None):
    """Returns an event, or lets the time pass."""
    if self._queue:
      return self._queue.popleft()
    if not block:
      raise queue.Empty
    if self.works:
      self.works.popleft()()
      return self.get(timeout=timeout)
    self.now += timeout
    raise queue.Empty

  def settle(self):
    """Handles every event that there is."""
    while self._queue or self.works:
      self.pool.handle_event(0.0)

  def pass_time(self, seconds):
    """Lets the pool look at its clock for so long."""
    end = self.now + seconds
    while self.now < end:
      self.pool.handle_event(min(1.0, end - self.now))

  def _run_beside(self, work):
    if self.delays:
      self.works.append(work)
    else:
      work()

  def _connect(self, name, deliver):
    if name in self.absent:
      raise self.absent[name]
    service = self.services[name] = Service(self, name, deliver)
    return service


class Service:
  """A service and the client of it, as `member.Source` asks.

  Attributes:
    held: requests that it has not answered, by id.
    asked: every request id sent to it, in order.
    installed: versions, in order.
    sessions: how often a session began.
    reconnects: how often its connection was asked to be restored.
  """

  def __init__(self, world, name, deliver):
    self.name = name
    self.service = python_types.SimpleNamespace(
      num_slots=world.slots,
      max_pending=64,
      active_policy_version=-1,
      active_weights_checksum='',
    )
    self.lost = None
    self.held = {}
    self.asked = []
    self.installed = []
    self.sessions = 1
    self.reconnects = 0
    self.is_open = True
    self.install_error = None
    self._world = world
    self._deliver = deliver

  def submit(self, requests):
    if self.lost:
      raise self.lost
    for one in requests:
      self.held[one.request_id] = one
      self.asked.append(one.request_id)

  def receive(self, arrival):
    if arrival == 'end':
      self.lost = errors.SamplerLost(f'{self.name} is gone')
      return None
    return arrival

  def install(self, snapshot, *, interrupt=False):
    del interrupt
    if self.lost:
      raise self.lost
    if self.install_error:
      raise self.install_error
    self.installed.append(snapshot.version)
    self.service.active_policy_version = snapshot.version
    self.service.active_weights_checksum = snapshot.checksum
    return snapshot.checksum

  def reconnect(self, deadline_s, *, new_session=False):
    self.reconnects += 1
    if self.name in self._world.absent:
      self._world.now += deadline_s
      raise self._world.absent[self.name]
    if new_session:
      self.sessions += 1
      self.held.clear()
      self.service.active_policy_version = -1
    self.lost = None

  def close(self):
    self.is_open = False

  def answer(self, request_id, status=types.Status.OK):
    """Answers a request it holds."""
    one = self.held.pop(request_id)
    self._deliver(
      types.Trajectory(
        request_id=request_id,
        task_id=one.task_id,
        status=status,
        reward=1.0 if status is types.Status.OK else math.nan,
        policy_version=self.service.active_policy_version,
        weights_checksum='',
        tokens=np.array([1, 2], np.int32),
        action_mask=np.array([False, True]),
        behaviour_logprobs=np.array([0, -1], np.float32),
        num_turns=1,
        sampling=SAMPLING,
      )
    )

  def end(self, *, forgets=True):
    """Ends the connection; a process that dies forgets everything."""
    if forgets:
      self.held.clear()
      self.service.active_policy_version = -1
    self._deliver('end')
