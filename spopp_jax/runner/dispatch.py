"""Chooses prompts and freezes their baselines into tickets."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from spopp_jax import types
from spopp_jax.tracker import base as tracker
from spopp_jax.tracker import prompt_sampling


class Dispatcher:
  """Draws prompts by uncertainty, a capped number of groups in flight each.

  A group is one request, or group_size of them that differ in their seed.

  Its whole state is a random generator and a counter, both in the checkpoint.
  The weights follow from the evidence: those of the rows that changed are
  taken anew before a dispatch, so that its work does not grow with the prompts.
  """

  def __init__(
    self,
    task_ids: Sequence[str],
    evidence: tracker.Evidence,
    *,
    seed: int,
    group_size: int = 1,
    max_in_flight_per_prompt: int = 1,
  ):
    """Prepares dispatching.

    Args:
      task_ids: the prompts, those of the evidence in its order.
      evidence: gives v-hat at dispatch.
      seed: of the prompts drawn and of the requests' own seeds.
      group_size: requests a prompt and dispatch.
      max_in_flight_per_prompt: >= 1; groups of one prompt in flight at most.
        SPO++ has 1; with more, none of them sees the others' outcomes.

    Raises:
      ValueError: other tasks than the evidence has, or a cap below 1.
    """
    if max_in_flight_per_prompt < 1:
      raise ValueError(
        f'max_in_flight_per_prompt ({max_in_flight_per_prompt}) must be at '
        'least 1'
      )
    if tuple(task_ids) != evidence.task_ids:
      raise ValueError(
        f'the {len(task_ids)} tasks to dispatch must be the '
        f'{len(evidence.task_ids)} tasks of the evidence, in the same order'
      )
    self._group_size = group_size
    self._cap = max_in_flight_per_prompt
    self._task_ids = evidence.task_ids
    self._evidence = evidence
    rows, self._version = evidence.changed_since(-1)
    self._sampler = prompt_sampling.PromptSampler(
      prompt_sampling.prompt_weights(evidence.read(rows))
    )
    self._rng = np.random.default_rng(seed)
    self._issued = 0

  def dispatch(
    self,
    count: int,
    *,
    policy_version: int,
    step: int,
    busy: Collection[str] | Mapping[str, int] = (),
  ) -> list[types.Ticket]:
    """Returns tickets of whole groups of prompts, values frozen now.

    Groups are drawn one after another, each among the prompts that have fewer
    groups in flight than the cap, those drawn before it included. With a cap of
    1 the prompts differ.

    Args:
      count: requests to issue, rounded down to whole groups.
      policy_version: the active snapshot, which is also the policy event.
      step: learner step that will collect them.
      busy: groups in flight by task id, or the task ids that have one each.

    Raises:
      ValueError: fewer groups may be drawn than asked for, or the evidence
        holds an outcome of a later event than policy_version.
    """
    size = self._group_size
    if not isinstance(busy, Mapping):
      busy = dict.fromkeys(busy, 1)
    self._check_free(count // size, busy)
    changed, self._version = self._evidence.changed_since(self._version)
    self._sampler.update(
      changed, prompt_sampling.prompt_weights(self._evidence.read(changed))
    )
    chosen = self._sampler.sample(
      count // size,
      rng=self._rng,
      slots=lambda row: self._cap - busy.get(self._task_ids[row], 0),
    )
    names = [self._task_ids[row] for row in chosen.tolist()]
    values = self._evidence.read(chosen, policy_version).tolist()
    tickets = []
    for i, seed in enumerate(self._seeds(len(names) * size)):
      tickets.append(
        types.Ticket(
          request_id=f'train-{self._issued:08d}',
          task_id=names[i // size],
          value=values[i // size],
          policy_version=policy_version,
          step=step,
          seed=seed,
          group_id=self._issued // size,
        )
      )
      self._issued += 1
    return tickets

  def more_of(
    self, ticket: types.Ticket, count: int, *, policy_version: int
  ) -> list[types.Ticket]:
    """Returns further members of a ticket's group, under another version.

    Args:
      ticket: a member; its value is taken over, see `freeze`.
      count: how many.
      policy_version: the active snapshot.
    """
    more = [
      dataclasses.replace(
        ticket,
        request_id=f'train-{self._issued + i:08d}',
        policy_version=policy_version,
        seed=seed,
      )
      for i, seed in enumerate(self._seeds(count))
    ]
    # The next group's number follows from a whole number of groups.
    self._issued += -(-count // self._group_size) * self._group_size
    return more

  def freeze(self, tickets: Sequence[types.Ticket]) -> list[types.Ticket]:
    """Returns tickets that were drawn before with the values visible now."""
    versions = {ticket.policy_version for ticket in tickets}
    names = [ticket.task_id for ticket in tickets]
    if not tickets:
      return []
    values = self._evidence.values(names, max(versions))
    return [
      dataclasses.replace(ticket, value=float(value))
      for ticket, value in zip(tickets, values, strict=True)
    ]

  def _seeds(self, count: int) -> list[int]:
    """Draws seeds in [0, 2**32) without giving the interpreter's lock away."""
    raw = self._rng.bit_generator.random_raw(count)
    return (raw >> np.uint64(32)).tolist()

  def _check_free(self, groups: int, busy: Mapping[str, int]) -> None:
    """Raises ValueError if fewer groups may be drawn than asked for."""
    # Every prompt that is not busy has a slot: mostly no count is needed.
    if groups <= len(self._task_ids) - len(busy):
      return
    free = sum(
      max(0, self._cap - busy.get(task_id, 0)) for task_id in self._task_ids
    )
    if groups > free:
      raise ValueError(
        f'{groups} prompts asked for, {free} are available among '
        f'{len(self._task_ids)}; lower the requests in flight, add tasks or '
        f'raise max_in_flight_per_prompt ({self._cap})'
      )

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
