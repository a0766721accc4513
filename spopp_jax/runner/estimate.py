"""Success of every task under one policy, measured without selection.

The same rollouts give the offline prompt values before training (SPO++
appendix A.2) and the success before and after it.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import numpy as np
import tqdm

from spopp_jax import types
from spopp_jax.learner import checkpoint
from spopp_jax.runner import batcher as batcher_lib
from spopp_jax.runner import dispatch


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Outcomes of every task under one policy.

  Attributes:
    task_ids: P keys.
    successes: [P] float64; sum of outcomes a task.
    rollouts: [P] int64; usable rollouts a task, positive.
    trajectories: the rollouts themselves; empty when read from a file.
  """

  task_ids: Sequence[str]
  successes: np.ndarray
  rollouts: np.ndarray
  trajectories: Sequence[types.Trajectory] = ()

  @property
  def success(self) -> float:
    """Mean over tasks of the success rate."""
    return float(np.mean(self.successes / self.rollouts))

  def write(self, path: pathlib.Path) -> None:
    """Writes the counts as JSON."""
    rows = {
      task: [float(successes), int(rollouts)]
      for task, successes, rollouts in zip(
        self.task_ids, self.successes, self.rollouts, strict=True
      )
    }
    path.write_text(json.dumps(rows, indent=0) + '\n')


def read(path: pathlib.Path, task_ids: Sequence[str]) -> Estimate:
  """Reads what `Estimate.write` wrote; CheckpointError when it does not fit."""
  try:
    rows = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    raise checkpoint.CheckpointError(
      f'cannot read the offline outcomes {path}: {error}; to measure them '
      'anew start without --config.run.resume=True and --config.offline.path'
    ) from error
  if list(rows) != list(task_ids):
    raise checkpoint.CheckpointError(
      f'{path} speaks of {len(rows)} tasks other than the {len(task_ids)} '
      'configured ones; resume with the settings the run was started with'
    )
  counts = np.array(list(rows.values()), np.float64)
  return Estimate(task_ids, counts[:, 0], counts[:, 1].astype(np.int64))


def measure(
  batcher: batcher_lib.Batcher,
  task_ids: Sequence[str],
  *,
  rollouts: int,
  policy_version: int,
  seed: int,
  purpose: str,
  progress: bool,
) -> Estimate:
  """Runs every task `rollouts` times under the published policy.

  Args:
    batcher: nothing may be in flight.
    task_ids: P keys.
    rollouts: rollouts a task.
    policy_version: the published version.
    seed: of the rollouts.
    purpose: words for the progress bar; its rollouts' ids begin with it.
    progress: show a bar.

  Raises:
    RolloutsFailed: a task has no usable rollout.
  """
  tickets = dispatch.every_task(
    task_ids,
    rollouts=rollouts,
    policy_version=policy_version,
    seed=seed,
    purpose=purpose,
  )
  with tqdm.tqdm(
    total=len(tickets), desc=purpose, unit='rollout', disable=not progress
  ) as bar:
    batcher.on_finished = bar.update
    batcher.submit(tickets)
    finished = batcher.drain()
    batcher.received()  # no evidence of training
    batcher.on_finished = lambda: None
  index = {task: i for i, task in enumerate(task_ids)}
  successes = np.zeros(len(task_ids))
  counts = np.zeros(len(task_ids), np.int64)
  for item in finished:
    row = index[item.ticket.task_id]
    successes[row] += item.trajectory.reward
    counts[row] += 1
  if not counts.all():
    raise batcher_lib.RolloutsFailed(
      f'every rollout of task {task_ids[int(np.argmin(counts))]} failed; the '
      "warnings above and the sampler's log say why"
    )
  return Estimate(
    task_ids, successes, counts, [item.trajectory for item in finished]
  )
