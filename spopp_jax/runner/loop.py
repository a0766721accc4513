"""The main loop, on one screen.

  pick prompts -> tickets (v-hat frozen) -> sampler -> first finished -> drain
       ^                                                     |
  evidence <- outcomes filed by policy event <---------------+-> update
                                                             +-> publish

With `max_lag_events` 1 a snapshot is published before the update, so the
sampler generates the next batch while the learner computes; with 0 it is
published after it and every batch is on-policy.
"""

import jax
import numpy as np

from spopp_jax.runner import step_metrics
from spopp_jax.runner.training import Training


def train(run: Training) -> Training:
  """Trains from `run.step` to the configured number of steps.

  Args:
    run: the components and their state; the requests of step `run.step` are
      in flight already.

  Returns:
    The same object, advanced.
  """
  config = run.config
  while run.step < config.run.steps:
    clock = step_metrics.Clock()
    batch = run.batcher.collect(config.dispatch.batch_size // run.group_size)
    clock.mark('collect_s')
    late = run.batcher.drain()
    clock.mark('drain_s')
    run.file_outcomes(batch, late)

    overlap = config.dispatch.max_lag_events == 1
    if overlap:
      run.publish()
      run.dispatch(run.step + 1)
      clock.mark('publish_s')
    packed = run.pack(batch)
    run.state, scalars = run.learner.update(run.state, packed)
    scalars = jax.tree.map(np.asarray, scalars)
    clock.mark('update_s')
    run.evidence.consume([item.trajectory for item in batch], run.score)
    run.updates_done += 1
    if not overlap:
      run.publish()
      run.dispatch(run.step + 1)
      clock.mark('publish_s')

    run.metrics.write(
      run.step, step_metrics.of(run, batch, late, scalars, clock.seconds())
    )
    run.step += 1
    run.guard(scalars)
    run.save_when_due()
  return run
