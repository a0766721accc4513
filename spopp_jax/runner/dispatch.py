"""Chooses prompts and freezes their baselines into tickets."""

import math
from collections.abc import Collection, Sequence

import numpy as np

from spopp_jax import types
from spopp_jax.tracker import base as tracker
from spopp_jax.tracker import prompt_sampling


class Dispatcher:
  """Draws prompts by uncertainty, one group in flight a prompt at most.

  A group is one request, or group_size of them that differ in their seed.

  Its whole state is a random generator and a counter, both in the checkpoint.
  """

  def __init__(
    self,
    task_ids: Sequence[str],
    evidence: tracker.Evidence,
    *,
    seed: int,
    group_size: int = 1,
  ):
    """Prepares dispatching.

    Args:
      task_ids: the prompts.
      evidence: gives v-hat at dispatch.
      seed: of the prompts drawn and of the requests' own seeds.
      group_size: requests a prompt and dispatch.
    """
    self._group_size = group_size
    self._task_ids = list(task_ids)
    self._evidence = evidence
    self._rng = np.random.default_rng(seed)
    self._issued = 0

  def dispatch(
    self,
    count: int,
    *,
    policy_version: int,
    step: int,
    busy: Collection[str] = (),
  ) -> list[types.Ticket]:
    """Returns tickets of whole groups of different prompts, values frozen now.

    Args:
      count: requests to issue, rounded down to whole groups.
      policy_version: the active snapshot, which is also the policy event.
      step: learner step that will collect them.
      busy: task ids that have a request in flight.
    """
    values = self._evidence.values(self._task_ids, policy_version)
    free = np.array([task not in busy for task in self._task_ids], bool)
    size = self._group_size
    chosen = prompt_sampling.sample_prompts(
      values, free, count // size, rng=self._rng
    )
    seeds = self._rng.integers(2**32, size=len(chosen) * size, dtype=np.uint64)
    tickets = []
    for index, seed in zip(np.repeat(chosen, size), seeds, strict=True):
      tickets.append(
        types.Ticket(
          request_id=f'train-{self._issued:08d}',
          task_id=self._task_ids[index],
          value=float(values[index]),
          policy_version=policy_version,
          step=step,
          seed=int(seed),
          group_id=self._issued // size,
        )
      )
      self._issued += 1
    return tickets

  def state_dict(self) -> dict:
    """Returns a JSON-able state."""
    return {'rng': self._rng.bit_generator.state, 'issued': self._issued}

  def load_state_dict(self, state: dict) -> None:
    """Restores what `state_dict` returned."""
    self._rng.bit_generator.state = state['rng']
    self._issued = int(state['issued'])


def every_task(
  task_ids: Sequence[str],
  *,
  rollouts: int,
  policy_version: int,
  seed: int,
  purpose: str,
) -> list[types.Ticket]:
  """Returns tickets that run each task `rollouts` times, for an estimate.

  Args:
    task_ids: the prompts.
    rollouts: requests a task.
    policy_version: the active snapshot.
    seed: of the requests' own seeds.
    purpose: leads the request ids, so that no other request shares them.
  """
  seeds = np.random.default_rng(seed).integers(
    2**32, size=rollouts * len(task_ids), dtype=np.uint64
  )
  return [
    types.Ticket(
      request_id=f'{purpose}-{i:08d}',
      task_id=task_ids[i % len(task_ids)],
      value=math.nan,
      policy_version=policy_version,
      step=-1,
      seed=int(s),
    )
    for i, s in enumerate(seeds)
  ]
