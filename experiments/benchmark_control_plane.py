"""The runner without a model: rollouts a second, dispatch latency, memory.

  python experiments/benchmark.py control_plane

Simulated services, processes of their own, answer every request over real gRPC
on loopback: at once, then at a fixed rate. Pool, batcher, dispatcher and prompt
memory are the runner's own; the learner does nothing but publish. The staleness
policy is `interruptible`: the flight is refilled all the time.
"""

import argparse
import os
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

import benchmark_report
import numpy as np
import option_types
import simulated_service

from spopp_jax import types
from spopp_jax.runner import (
  batcher,
  dispatch,
  flow,
  staleness,
  staleness_base,
)
from spopp_jax.sampler import client, lifeline, pool, retries
from spopp_jax.tracker import event_time

_SERVICE = pathlib.Path(simulated_service.__file__)
_TARGETS = {
  'trajectories/s': 'at least 3,000',
  'dispatch p99, ms': 'below 5, at 3,000 a second',
}
_DEADLINE_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the options of this command."""
  for name, default, words in (
    ('prompts', 1_000_000, 'prompts in memory'),
    ('in_flight', 10_000, 'requests in flight'),
    ('batch', 1_000, 'trajectories a step'),
    ('tokens', 1_000, 'tokens a trajectory'),
    ('services', 1, 'simulated services'),
    ('rate', 3_000, 'answers a second, where latency is asked for'),
    ('seconds', 20, 'seconds to measure'),
  ):
    parser.add_argument(
      f'--{name}',
      type=option_types.positive_int,
      default=default,
      help=f'{words} ({default})',
    )


def run(arguments: argparse.Namespace) -> str:
  """Returns the report."""
  return _report(
    arguments,
    {
      'as fast as it can': _measured(arguments, rate=0),
      f'{arguments.rate:,} answers/s': _measured(arguments, arguments.rate),
    },
  )


def _measured(arguments: argparse.Namespace, rate: int) -> dict[str, float]:
  """Measures with services that answer at a rate, 0 for any, in all."""
  processes = [
    subprocess.Popen(
      [
        *(sys.executable, str(_SERVICE)),
        f'--tokens={arguments.tokens}',
        f'--rate={rate / arguments.services}',
      ],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    )
    for _ in range(arguments.services)
  ]
  try:
    return _measure(arguments, [_ready(process) for process in processes])
  finally:
    for process in processes:
      process.kill()
      process.wait()


def _ready(process: 'subprocess.Popen[str]') -> str:
  assert process.stdout is not None
  address = lifeline.parse_ready_line(process.stdout.readline())
  if address is None:
    raise benchmark_report.Disagreement('a simulated service did not start')
  return address


class _TimedDispatcher(dispatch.Dispatcher):
  """Notes how long each dispatch takes and how many tickets it gives."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.timings: list[tuple[float, int]] = []

  def dispatch(self, *args, **kwargs):
    start = time.perf_counter()
    tickets = super().dispatch(*args, **kwargs)
    self.timings.append((time.perf_counter() - start, len(tickets)))
    return tickets


def _measure(
  arguments: argparse.Namespace, addresses: Sequence[str]
) -> dict[str, float]:
  """Runs steps for the seconds asked for; returns figures by name."""
  task_ids = [f'prompt-{i:08d}' for i in range(arguments.prompts)]
  before = _resident_bytes()
  ones = np.ones(arguments.prompts)
  evidence = event_time.EventTimeEvidence(task_ids, ones, ones)
  dispatcher = _TimedDispatcher(task_ids, evidence, seed=0)
  memory = _resident_bytes() - before
  budget = retries.RetryBudget(3)
  samplers = pool.Pool(
    lambda: addresses,
    lambda name: (
      lambda deliver: client.SamplerClient(
        name, simulated_service.EXPECTED, deliver=deliver
      )
    ),
    budget=budget,
    request_timeout_s=_DEADLINE_S,
    recovery_timeout_s=_DEADLINE_S,
  )
  samplers.start(_DEADLINE_S)
  sizes = staleness_base.Flow(
    batch=arguments.batch,
    in_flight=arguments.in_flight,
    group_size=1,
    num_tasks=arguments.prompts,
    per_prompt=1,
    in_order=False,
  )
  most_lag = -(-arguments.in_flight // arguments.batch) + 1
  rollouts = flow.Flow(
    dispatcher,
    batcher.Batcher(
      samplers,
      types.SamplingParams(),
      budget=budget,
      keep_truncated=True,
      rollout_timeout_s=_DEADLINE_S,
      crosses_versions=True,
    ),
    staleness.Interruptible(sizes, max_lag=most_lag, discards=False),
    evidence,
    'received',
  )

  def step() -> int:
    batch = rollouts.collect()
    rollouts.publish({'w': np.zeros(8, np.float32)}, rollouts.collecting)
    return len(batch)

  try:
    rollouts.publish({'w': np.zeros(8, np.float32)}, 0)
    for _ in range(arguments.in_flight // arguments.batch):  # the first fill
      step()
    dispatcher.timings.clear()
    start, count, flying = time.perf_counter(), 0, []
    while (elapsed := time.perf_counter() - start) < arguments.seconds:
      count += step()
      flying.append(rollouts.batcher.num_in_flight)
  finally:
    samplers.close()
  seconds, tickets = np.array(dispatcher.timings).T
  return {
    'trajectories/s': count / elapsed,
    'dispatch p50, ms': 1e3 * float(np.percentile(seconds, 50)),
    'dispatch p99, ms': 1e3 * float(np.percentile(seconds, 99)),
    'requests a dispatch': float(tickets.mean()),
    'in flight': float(np.mean(flying)),
    'prompt memory, MB': memory / 1e6,
    'peak memory, MB': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
  }


def _resident_bytes() -> int:
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return pages * resource.getpagesize()


def _report(
  arguments: argparse.Namespace, found: dict[str, dict[str, float]]
) -> str:
  names = next(iter(found.values()))
  rows = [
    f'| {name} | '
    + ' | '.join(f'{values[name]:,.2f}' for values in found.values())
    + f' | {_TARGETS.get(name, "")} |'
    for name in names
  ]
  return '\n'.join(
    [
      f'{arguments.prompts:,} prompts, trajectories of {arguments.tokens:,} '
      f'tokens, steps of {arguments.batch:,}, {arguments.services} simulated '
      f'service(s), {os.cpu_count()} cores, {arguments.seconds} s.',
      '',
      f'| | {" | ".join(found)} | target |',
      '|---' * (len(found) + 2) + '|',
      *rows,
    ]
  )
