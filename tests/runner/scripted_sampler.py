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
  """Implements `sampler.base.Sampler`.

  Attributes:
    held: requests that it has not answered.
    ids: every request id in the order first taken.
    published: (version, params) in order.
    surplus: replies it gave that nobody waits for.
  """

  def __init__(
    self,
    *,
    outcome=lambda request: types.Status.OK,
    pick=lambda held: 0,
    surplus_at=(),
  ):
    """Prepares answers.

    Args:
      outcome: status of a request's answer.
      pick: which of so many held requests is answered next.
      surplus_at: calls of `next`, from 0, that repeat the last answer.
    """
    self.held = []
    self.ids = []
    self.published = []
    self.surplus = 0
    self.is_open = True
    self._outcome = outcome
    self._pick = pick
    self._surplus_at = set(surplus_at)
    self._num_next = 0
    self._active = None
    self._last = None

  num_arrived = 0

  def submit(self, requests):
    for request in requests:
      self.held.append(request)
      self.ids.append(request.request_id)

  def next(self, timeout_s):
    del timeout_s
    self._num_next += 1
    if self._num_next - 1 in self._surplus_at:
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

  def publish(self, params, version, *, interrupt=False):
    del interrupt
    self.published.append((version, params))
    self._active = version
    return ''

  def close(self):
    self.is_open = False
