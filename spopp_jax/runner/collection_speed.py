"""What waiting for groups costs, and what not waiting biases, in simulation."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spopp_jax.runner import simulation
from spopp_jax.sampler import retries


class Speed(NamedTuple):
  """How fast a run was.

  Attributes:
    trajectories_per_s: trained, a simulated second.
    steps_per_s: learner steps, a simulated second.
    length_bias: mean duration of the trained over that of all dispatched,
      less 1; below 0 the long ones are missing.
  """

  trajectories_per_s: float
  steps_per_s: float
  length_bias: float


def of(record: simulation.Record) -> Speed:
  """Returns the speed of a run."""
  return Speed(
    len(record.trained) / record.seconds,
    len(record.steps) / record.seconds,
    length_bias(record),
  )


def length_bias(record: simulation.Record) -> float:
  """Returns the bias of `Speed`; the length of a rollout is its duration.

  What was dispatched too late to be trained counts as dispatched, whatever its
  length.
  """
  seconds = {
    retries.stem(request.request_id): record.setting.site.durations(request)
    for _, request in record.asked
  }
  trained = [seconds[retries.stem(t.request_id)] for t, _ in record.trained]
  return float(np.mean(trained) / np.mean([*seconds.values()])) - 1


def mean(speeds: Sequence[Speed]) -> Speed:
  """Returns the mean over runs."""
  return Speed(*np.mean(speeds, axis=0).tolist())


def measure(setting: simulation.Setting, seeds: Sequence[int]) -> Speed:
  """Returns the mean speed over runs that differ in their seed."""
  return mean(
    [
      of(simulation.run(dataclasses.replace(setting, seed=seed), seed=seed))
      for seed in seeds
    ]
  )


def first_batch_ratio(
  durations: np.ndarray, *, batch_size: int, group_size: int
) -> float:
  """Returns how much later a batch of whole groups is there than a free one.

  As many episodes as there are durations begin at once, each in a slot of its
  own. The free batch is the first `batch_size` episodes to end. The batch of
  groups is the first batch_size / group_size groups of which every member has
  ended; consecutive episodes are a group. With as many episodes as the batch
  holds, group and free batch both wait for the slowest: the ratio is 1.

  Args:
    durations: [repetitions, episodes] float; seconds.
    batch_size: episodes a batch.
    group_size: divides batch_size and the episodes.

  Returns:
    The quotient of the two mean times.

  Raises:
    ValueError: group_size does not divide the others.
  """
  repetitions, episodes = durations.shape
  if episodes % group_size or batch_size % group_size:
    raise ValueError(
      f'group_size ({group_size}) must divide batch_size ({batch_size}) and '
      f'the episodes ({episodes})'
    )
  free = np.sort(durations, axis=1)[:, batch_size - 1]
  ends = durations.reshape(repetitions, -1, group_size).max(axis=2)
  whole = np.sort(ends, axis=1)[:, batch_size // group_size - 1]
  return float(whole.mean() / free.mean())
