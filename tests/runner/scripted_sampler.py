"""A sampler that answers, repeats itself and gets lost as it is told."""

import numpy as np

from spopp_jax import types
from spopp_jax.sampler import errors

UNKNOWN_ID = 'nobody-asked'
SAMPLING = types.SamplingParams(max_turn_tokens=4, max_turns=6)


def ticket(number, value=0.5, version=0, task_id=None, group_id=-1):
  """Returns ticket `r<number>`."""
  return types.Ticket(
    request_id=f'r{number}',
    task_id=task_id or f'task-{number}',
    value=value,
    policy_version=version,
    step=0,
    seed=number,
    group_id=group_id,
  )


def trajectory(
  request_id='r0',
  task_id='task-0',
  *,
  reward=1.0,
  status=types.Status.OK,
  version=0,
  tokens=(1, 2, 3),
  actions=(False, True, True),
  logprobs=None,
  num_turns=1,
):
  """Returns a finished request."""
  mask = np.array(actions, bool)
  if logprobs is None:
    logprobs = np.where(mask, -1.0, 0.0)
  return types.Trajectory(
    request_id=request_id,
    task_id=task_id,
    status=status,
    reward=reward,
    policy_version=version,
    weights_checksum='',
    tokens=np.array(tokens, np.int32),
    action_mask=mask,
    behaviour_logprobs=np.array(logprobs, np.float32),
    num_turns=num_turns,
    sampling=SAMPLING,
  )


class Sampler:
  """Implements `sampler.base.Sampler`; keeps what it holds as a service does.

  Calls of submit, next and publish are counted together. A loss is either a
  dead service, which forgets requests and snapshot, or a dead connection,
  after which the service still has both and finishes what it holds.

  Attributes:
    held: requests that it has not answered.
    most_held: the most of them at any time.
    ids: every request id in the order first taken.
    published: (version, params) in order.
    reconnected: how often the connection was restored.
    surplus: replies it gave that nobody waits for.
  """

  def __init__(
    self,
    *,
    outcome=lambda request: types.Status.OK,
    pick=lambda held: 0,
    lost_at=(),
    forgets=True,
    effect_before_loss=False,
    surplus_at=(),
    lost_for_ever=False,
  ):
    self.held = []
    self.most_held = 0
    self.ids = []
    self.published = []
    self.reconnected = 0
    self.surplus = 0
    self.calls = []
    self.is_open = True
    self._outcome = outcome
    self._pick = pick
    self._lost_at = set(lost_at)
    self._forgets = forgets
    self._effect_before_loss = effect_before_loss
    self._surplus_at = set(surplus_at)
    self._lost_for_ever = lost_for_ever
    self._is_lost = False
    self._active = None
    self._last = None

  def submit(self, requests):
    self._call('submit', lambda: self._take(requests))

  def next(self, timeout_s):
    replies = []
    self._call('next', lambda: replies.append(self._reply()))
    return replies[0]

  def publish(self, params, version):
    self._call('publish', lambda: self._activate(params, version))
    return ''

  def reconnect(self, deadline_s):
    if self._lost_for_ever:
      raise errors.SamplerLost(f'no service within {deadline_s} s')
    self._is_lost = False
    self.reconnected += 1

  def close(self):
    self.is_open = False

  def _call(self, name, effect):
    if self._is_lost:
      raise errors.SamplerLost('not connected')
    index = len(self.calls)
    self.calls.append(name)
    if index not in self._lost_at:
      effect()
      return
    # What a lost call returned never arrived; what it did may have happened.
    if self._effect_before_loss and name != 'next':
      effect()
    if self._forgets:
      self.held, self._active = [], None
    self._is_lost = True
    raise errors.SamplerLost(f'lost at call {index}')

  def _take(self, requests):
    known = {request.request_id for request in self.held}
    for request in requests:
      if request.request_id not in known:
        self.held.append(request)
        self.ids.append(request.request_id)
    self.most_held = max(self.most_held, len(self.held))

  def _activate(self, params, version):
    assert not self.held or not self._forgets
    self.published.append((version, params))
    self._active = version

  def _reply(self):
    if len(self.calls) - 1 in self._surplus_at:
      self.surplus += 1
      return self._last or trajectory(UNKNOWN_ID)
    if not self.held:
      raise errors.SamplerTimeout('nothing is outstanding; submit first')
    request = self.held.pop(self._pick(len(self.held)) % len(self.held))
    status = self._outcome(request)
    if request.policy_version != self._active:
      status = types.Status.STALE
    self._last = trajectory(
      request.request_id,
      request.task_id,
      status=status,
      reward=1.0 if status == types.Status.OK else float('nan'),
      version=request.policy_version,
    )
    return self._last
