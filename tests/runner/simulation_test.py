"""What holds for every seed: of services that crash, repeat and dawdle."""

import dataclasses
import math
import random

import invariants
import numpy as np
import pytest

from spopp_jax import types
from spopp_jax.runner import batcher, simulation
from spopp_jax.runner import simulated_services as services

Status = types.Status
PLAIN = services.Site(durations=services.lognormal(1.5, 0.7))
# (policy, max_lag, discard_overdue)
POLICIES = (
  ('drain', 0, False),
  ('drain', 1, False),
  ('bounded', 0, False),
  ('bounded', 1, False),
  ('bounded', 3, False),
  ('bounded', 2, True),
  ('interruptible', 0, False),
  ('interruptible', 2, False),
  ('interruptible', 1, True),
  ('scheduled', 1, False),
  ('scheduled', 4, False),
)


def faults(rng):
  """Returns some, of all kinds."""
  return services.Faults(
    crash_every_s=rng.choice([60.0, 300.0, math.inf]),
    cut_every_s=rng.choice([60.0, 300.0, math.inf]),
    down_s=rng.choice([0.5, 5.0]),
    replaced_every_s=rng.choice([30.0, math.inf]),
    failed=rng.choice([0.0, 0.05, 0.2]),
    repeated=rng.choice([0.0, 0.2]),
    hanging=rng.choice([0.0, 0.01]),
    hang_s=rng.choice([30.0, 100.0]),
    latency_s=rng.choice([0.0, 0.5]),
  )


def scene(seed):
  """Returns a setting and the stops of a seed."""
  rng = random.Random(seed)
  policy, max_lag, discards = POLICIES[seed % len(POLICIES)]
  size = rng.choice([1, 1, 4])
  batch = rng.randint(2, 6) * (1 if size > 1 else 3)
  in_flight = int(batch * rng.choice([1, 1.5, 3]))
  per_prompt = rng.choice([1, 1, 3])
  tasks = max(in_flight, batch) // per_prompt + rng.randint(1, 30)
  crosses = policy in ('bounded', 'interruptible')
  in_order = not discards and rng.random() < 0.25
  tail = rng.choice(
    [
      services.lognormal(1.5, rng.choice([0.3, 1.0])),
      services.pareto(0.7, rng.choice([1.5, 3.0])),
    ]
  )
  setting = simulation.Setting(
    staleness=policy,
    max_lag=max_lag,
    discard_overdue=discards,
    batch_size=batch * size,
    in_flight=in_flight * size,
    group_size=size,
    num_tasks=tasks,
    per_prompt=per_prompt,
    in_order=in_order,
    evidence_from='consumed'
    if in_order and crosses
    else rng.choice(['received', 'received', 'consumed']),
    attempts=rng.choice([4, 8]),
    steps=rng.randint(12, 25),
    update_s=rng.choice([0.0, 0.5, 3.0]),
    seed=seed,
    site=services.Site(
      services=rng.randint(5, 14),
      slots=rng.randint(1, 4),
      install_s=rng.choice([0.0, 0.2, 2.0]),
      durations=lambda request: min(30.0, tail(request)),
      request_timeout_s=60.0,
      faults=faults(rng) if rng.random() < 0.8 else services.Faults(),
    ),
  )
  return setting, [
    simulation.Stop(rng.uniform(0, 60), rng.random() < 0.6)
    for _ in range(rng.choice([0, 0, 1, 3]))
  ]


def check_all(seed):
  setting, stops = scene(seed)
  try:
    record = simulation.run(setting, seed=seed, stops=stops)
    for check in invariants.CHECKS:
      check(record)
  except Exception as error:
    error.add_note(f'seed {seed}: {setting}, {stops}')
    raise


@pytest.mark.parametrize('first', range(0, 110, 11))
def test_invariants_hold_whatever_happens(first):
  for seed in range(first, first + 11):
    check_all(seed)


def batches(record):
  return [
    [(ticket, trajectory.reward) for ticket, trajectory in step.batch]
    for step in record.steps
  ]


def ordered(record):
  """Returns the batches as the learner packs them."""
  return [
    sorted(batch, key=lambda item: item[0].request_id)
    for batch in batches(record)
  ]


def assert_same(one, other):
  """Asserts equal batches, tickets and evidence, in every bit."""
  assert ordered(one) == ordered(other)
  for a, b in zip(one.counts, other.counts, strict=True):
    np.testing.assert_array_equal(a, b)


TIMELESS = (
  {'staleness': 'drain', 'max_lag': 0, 'in_flight': 24},
  {'staleness': 'drain', 'max_lag': 1, 'in_flight': 24},
  {'staleness': 'bounded', 'max_lag': 0, 'evidence_from': 'consumed'},
  {'staleness': 'interruptible', 'max_lag': 0, 'evidence_from': 'consumed'},
  {'staleness': 'scheduled', 'max_lag': 3},
  {'staleness': 'scheduled', 'max_lag': 3, 'group_size': 4},
)
FAULTY = services.Faults(
  crash_every_s=60.0, cut_every_s=60.0, failed=0.1, repeated=0.1, latency_s=0.3
)


@pytest.mark.parametrize('changes', TIMELESS, ids=str)
def test_in_order_no_timing_plays_a_part(changes):
  setting = simulation.Setting(
    in_order=True,
    batch_size=16,
    attempts=1000,
    steps=8,
    **{'in_flight': 16, **changes},
  )
  faulty = dataclasses.replace(
    setting, site=dataclasses.replace(PLAIN, faults=FAULTY, services=5)
  )
  # The seed draws other arrivals; whether a try fails follows from its id.
  first = simulation.run(faulty, seed=0)
  stops = [simulation.Stop(9.0 + 7 * n, n % 2 == 0) for n in range(6)]
  for seed in range(1, 4):
    assert_same(first, simulation.run(faulty, seed=seed))
    resumed = simulation.run(faulty, seed=seed, stops=stops)
    assert resumed.resumed_at
    assert_same(first, resumed)


def test_a_bound_of_0_is_the_synchronous_run_in_every_bit():
  runs = [
    simulation.run(
      simulation.Setting(
        staleness=policy, max_lag=0, batch_size=16, in_flight=16, site=PLAIN
      ),
      seed=seed,
    )
    for seed, policy in enumerate(('drain', 'bounded', 'interruptible'))
  ]
  for other in runs[1:]:
    assert_same(runs[0], other)
  for step in runs[0].steps:
    assert {ticket.policy_version for ticket, _ in step.batch} == {step.step}


def paced(policy, discards):
  """Returns a run over tasks of 1 s and of 5 s (one step takes about 1 s)."""
  return simulation.run(
    simulation.Setting(
      staleness=policy,
      max_lag=2,
      discard_overdue=discards,
      batch_size=4,
      in_flight=12,
      num_tasks=16,
      steps=40,
      update_s=0.5,
      site=services.Site(
        slots=2,
        install_s=0.0,
        durations=lambda request: 5.0 if is_slow(request.task_id) else 1.0,
      ),
    ),
    seed=0,
  )


def is_slow(task_id):
  return int(task_id.removeprefix('task-')) >= 8


@pytest.mark.parametrize('policy', ['bounded', 'interruptible'])
def test_waiting_trains_every_slow_task(policy):
  trained = {ticket.task_id for ticket, _ in paced(policy, False).trained}
  assert trained == {f'task-{i}' for i in range(16)}


def test_discarding_shows_as_length_bias():
  record = paced('interruptible', True)
  trained = {ticket.task_id for ticket, _ in record.trained if ticket.step}
  assert not any(map(is_slow, trained))
  assert set(map(is_slow, asked_tasks(record))) == {False, True}
  assert record.steps[-1].statuses[Status.STALE] > 0


def asked_tasks(record):
  return [request.task_id for _, request in record.asked]


def test_what_hangs_is_asked_of_others_and_its_late_answer_counts_once():
  site = dataclasses.replace(
    PLAIN,
    request_timeout_s=15.0,
    faults=services.Faults(hanging=0.02, hang_s=40.0),
  )
  record = simulation.run(simulation.Setting(site=site), seed=0)
  for check in invariants.CHECKS:
    check(record)
  late = record.steps[-1].statuses[Status.DUPLICATE]
  assert (
    0
    < late
    == len(record.replies)
    - len({reply.request_id for _, reply in record.replies})
  )


def test_silence_without_another_to_ask_ends_the_run_by_name():
  site = dataclasses.replace(
    PLAIN, services=1, slots=8, faults=services.Faults(hanging=1, hang_s=1e9)
  )
  setting = simulation.Setting(batch_size=4, in_flight=4, site=site)
  with pytest.raises(batcher.RolloutsFailed, match=r'train-0000000[0-3]'):
    simulation.run(setting, seed=0)


def test_failed_tries_are_no_rollouts():
  site = dataclasses.replace(PLAIN, faults=services.Faults(failed=0.3))
  record = simulation.run(
    simulation.Setting(batch_size=32, in_flight=32, attempts=50, site=site),
    seed=0,
  )
  assert {len(step.batch) for step in record.steps} == {32}
  statuses = record.steps[-1].statuses
  assert statuses[Status.ENV_ERROR] > 0
  assert sum(statuses[status] for status in invariants.KEPT) == 32 * 20


def test_a_service_that_left_while_it_was_lost_does_not_come_back():
  site = dataclasses.replace(
    PLAIN,
    faults=services.Faults(cut_every_s=20.0, down_s=8.0, replaced_every_s=3.0),
  )
  setting = simulation.Setting(attempts=1000, site=site)
  for seed in range(3):
    record = simulation.run(setting, seed=seed)
    for check in invariants.CHECKS:
      check(record)


@pytest.mark.parametrize('policy', ['drain', 'bounded', 'interruptible'])
def test_what_has_no_try_left_is_replaced(policy):
  site = dataclasses.replace(PLAIN, faults=services.Faults(failed=0.3))
  record = simulation.run(
    simulation.Setting(
      staleness=policy, batch_size=16, in_flight=16, attempts=1, site=site
    ),
    seed=0,
  )
  for check in invariants.CHECKS:
    check(record)
  assert record.steps[-1].statuses[Status.ENV_ERROR] > 0


def test_scheduled_lags_are_uniform_and_follow_from_the_seed():
  setting = simulation.Setting(
    staleness='scheduled', max_lag=4, batch_size=40, group_size=4, steps=30
  )
  one, other = (
    simulation.run(dataclasses.replace(setting, site=site), seed=seed)
    for seed, site in enumerate([PLAIN, dataclasses.replace(PLAIN, slots=1)])
  )
  lags = [
    [
      (ticket.request_id, step.step - ticket.policy_version)
      for ticket, _ in sorted(step.batch, key=lambda item: item[0].request_id)
    ]
    for step in one.steps
  ]
  assert ordered(one) == ordered(other)
  assert {lag for _, lag in lags[0]} == {0}
  assert {lag for _, lag in lags[2]} == {1, 2}
  drawn = [lag for step in lags[4:] for _, lag in step]
  counts = np.bincount(drawn, minlength=5)
  assert counts[0] == 0
  assert len(counts) == 5
  expected = len(drawn) / 4
  # The 0.999 quantile of chi-square with 3 degrees of freedom.
  assert ((counts[1:] - expected) ** 2 / expected).sum() < 16.27


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_invariants_hold_for_a_thousand_seeds():
  for seed in range(110, 1110):
    check_all(seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_invariants_hold_for_thousands_of_services():
  setting = simulation.Setting(
    staleness='bounded',
    max_lag=2,
    batch_size=8192,
    in_flight=16384,
    num_tasks=100_000,
    steps=4,
    site=dataclasses.replace(
      PLAIN,
      services=2000,
      slots=8,
      faults=services.Faults(crash_every_s=600.0, failed=0.01, repeated=0.01),
    ),
  )
  record = simulation.run(setting, seed=0)
  for check in invariants.CHECKS:
    check(record)
