"""What holds of every simulated run, whatever its services do."""

import collections
import math

import numpy as np

from spopp_jax import types
from spopp_jax.runner import batcher, simulation
from spopp_jax.sampler import retries

Status = types.Status
KEPT = (Status.OK, Status.CONTEXT_LIMIT, Status.LENGTH)


def groups(record, items):
  return {batcher.group_of(item.ticket) for item in items}


def outcomes(record):
  """Returns the first usable reply to every rollout, as the runner has it."""
  first, answered = {}, set()
  for _, reply in record.replies:
    if reply.request_id in answered:
      continue
    answered.add(reply.request_id)
    if reply.status in KEPT:
      first[retries.stem(reply.request_id)] = reply
  return first


def check_progress(record):
  steps = [step.step for step in record.steps]
  assert steps == list(range(record.setting.steps))
  assert math.isfinite(record.seconds)


def check_lags(record):
  """Lag = learner step at consumption - version of the ticket."""
  setting = record.setting
  for step in record.steps:
    for ticket, trajectory in step.batch:
      lag = step.step - ticket.policy_version
      assert lag <= setting.max_lag, (step.step, ticket)
      least = 0
      if setting.staleness == 'scheduled' or setting.staleness == 'drain':
        least = min(step.step, min(setting.max_lag, 1))
      assert lag >= least, (step.step, ticket)
      assert ticket.policy_version <= trajectory.policy_version <= step.step


def check_batches(record):
  """Never short, never empty, and of usable rollouts alone."""
  setting = record.setting
  for step in record.steps:
    items = step.batch
    wanted = setting.batch_size // setting.group_size
    assert len(groups(record, items)) == wanted, step.step
    if setting.group_size == 1 or setting.attempts == 1000:
      assert len(items) == setting.batch_size, step.step
    for ticket, trajectory in items:
      assert trajectory.status in KEPT
      assert 0 <= trajectory.reward <= 1
      assert ticket.request_id == trajectory.request_id
      assert ticket.task_id == trajectory.task_id


def check_statuses(record):
  """Every request is in flight or has ended in one way."""
  for step in record.steps:
    ended = sum(
      n for status, n in step.statuses.items() if status != Status.DUPLICATE
    )
    assert min(step.statuses.values(), default=0) >= 0
    assert step.dispatched == ended + len(step.in_flight), step.step
  last = record.steps[-1]
  asked = {request.request_id for _, request in record.asked[: last.asked]}
  assert last.dispatched == len(asked)


def check_once(record):
  """No rollout is trained twice, over resumes too."""
  stems = [retries.stem(t.request_id) for t, _ in record.trained]
  twice = [stem for stem, n in collections.Counter(stems).items() if n > 1]
  assert not twice
  first = outcomes(record)
  for _, trajectory in record.trained:
    reply = first[retries.stem(trajectory.request_id)]
    assert reply.seconds == trajectory.seconds


def check_evidence(record):
  """Equals Eq. 3, summed over what came back, each rollout once."""
  setting = record.setting
  if setting.group_size > 1:
    return
  version = record.steps[-1].version
  dispatched = {}
  for _, request in record.asked:
    dispatched.setdefault(
      retries.stem(request.request_id), request.policy_version
    )
  if setting.evidence_from == 'received':
    replies = outcomes(record).items()
  else:
    replies = [
      (retries.stem(trajectory.request_id), trajectory)
      for _, trajectory in record.trained
    ]
  start = simulation.OFFLINE * 0.875**version
  success = dict.fromkeys(setting.task_ids, start)
  failure = dict.fromkeys(setting.task_ids, start)
  for stem, reply in replies:
    event = reply.policy_version
    if setting.staleness == 'interruptible':
      event = dispatched[stem]
    reward = reply.reward if reply.status == Status.OK else 0.0
    weight = 0.875 ** (version - event)
    success[reply.task_id] += weight * reward
    failure[reply.task_id] += weight * (1 - reward)
  for counts, expected in zip(record.counts, (success, failure), strict=True):
    np.testing.assert_allclose(counts, list(expected.values()), rtol=1e-9)


def check_refilled(record):
  """The flight is as full as it may be whenever a step has ended."""
  setting = record.setting
  size = setting.group_size
  for step in record.steps:
    if setting.staleness == 'scheduled':
      continue
    room = setting.in_flight - len(step.in_flight)
    if setting.staleness == 'drain':
      assert room < size, (step.step, len(step.in_flight))
      continue
    # Refills of less than a 256th part wait for each other.
    full = room < max(size, setting.in_flight // 256)
    admitted = (setting.max_lag + 1) * setting.batch_size // size
    opened = len({batcher.group_of(ticket) for ticket in step.in_flight})
    assert (
      full
      or step.groups == admitted
      or opened == setting.num_tasks * setting.per_prompt
    ), (step.step, len(step.in_flight), step.groups)
    assert step.groups <= admitted
    assert len(step.in_flight) <= setting.in_flight


def check_nothing_is_lost(record):
  """What is not dropped by rule is trained in time, failed or still there."""
  setting = record.setting
  if setting.staleness == 'drain' or setting.discard_overdue:
    return
  first = outcomes(record)
  trained = {retries.stem(t.request_id) for t, _ in record.trained}
  last = record.steps[-1]
  flying = {retries.stem(t.request_id) for t in last.in_flight}
  overdue = last.step - setting.max_lag
  waiting = set()
  for _, request in record.asked:
    stem = retries.stem(request.request_id)
    if stem in trained or not (stem in flying or stem in first):
      continue
    waiting.add(stem)
    if setting.staleness != 'scheduled':
      assert request.policy_version > overdue, request
  if setting.group_size == 1:
    assert len(waiting) == last.groups


def check_asked(record):
  """No snapshot but the present one is ever needed."""
  if record.setting.staleness not in ('drain', 'scheduled'):
    return
  for version, request in record.asked:
    assert request.policy_version == version, request


def check_scheduled(record):
  setting = record.setting
  if setting.staleness != 'scheduled':
    return
  sizes = collections.Counter()
  for step in record.steps:
    for ticket, _ in step.batch:
      assert ticket.step == step.step
      sizes[ticket.group_id] += 1
  assert set(sizes.values()) == {setting.group_size}


CHECKS = (
  check_progress,
  check_lags,
  check_batches,
  check_statuses,
  check_once,
  check_evidence,
  check_refilled,
  check_nothing_is_lost,
  check_asked,
  check_scheduled,
)
