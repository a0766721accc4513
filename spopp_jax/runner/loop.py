"""The main loop, on one screen.

  pick prompts -> tickets (v-hat frozen) -> sampler -> first finished -> drain
       ^                                                     |
  evidence <- outcomes filed by policy event <---------------+-> update
                                                             +-> publish

A staleness policy says which finished groups make a batch, whether the flight
is drained then, and whether the snapshot is published before the update, so
that the sampler generates while the learner computes, or after it.
"""

import jax
import numpy as np

from spopp_jax.runner import step_metrics
from spopp_jax.runner.preemption import StopRequest
from spopp_jax.runner.training import Training


def train(run: Training, stop: StopRequest) -> Training:
  """Trains from `run.step` to the configured number of steps.

  Args:
    run: the components and their state; requests of step `run.step` are in
      flight already.
    stop: looked at between steps.

  Returns:
    The same object, advanced.

  Raises:
    Stopped: `stop` asks for it.
  """
  config = run.config
  while run.step < config.run.steps:
    clock = step_metrics.Clock()
    batch = run.flow.collect()
    clock.mark('collect_s')
    late = run.flow.drain()
    clock.mark('drain_s')
    run.flow.file_outcomes(batch)

    if run.flow.staleness.publishes_first:
      run.publish()
      run.flow.dispatch()
      clock.mark('publish_s')
    packed = run.pack(batch)
    run.state, scalars = run.learner.update(run.state, packed)
    scalars = jax.tree.map(np.asarray, scalars)
    clock.mark('update_s')
    run.flow.evidence.consume([item.trajectory for item in batch], run.score)
    run.updates_done += 1
    if not run.flow.staleness.publishes_first:
      run.publish()
      run.flow.dispatch()
      clock.mark('publish_s')

    record = step_metrics.of(run, batch, late, scalars, clock.seconds())
    run.metrics.write(run.step, record)
    run.step += 1
    run.guard(record)
    run.save_when_due()
    stop.check()
  return run
