"""The rollouts of a run: dispatched, collected, filed as evidence.

It knows nothing of what a learner does with them but the version that it
published and the step it collects for.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spopp_jax import types
from spopp_jax.runner import batcher as batcher_lib
from spopp_jax.runner import dispatch as dispatch_lib
from spopp_jax.runner import staleness_base as staleness_lib
from spopp_jax.runner import stored
from spopp_jax.tracker import base as tracker

Finished = batcher_lib.Finished


class NothingToCollect(RuntimeError):
  """A batch lacks rollouts and none can be dispatched; says what to look at."""


@dataclasses.dataclass
class Tally:
  """Rollouts and their action tokens so far.

  Attributes:
    received: usable rollouts.
    received_tokens: their action tokens.
    trained: rollouts in batches.
    trained_tokens: their action tokens.
  """

  received: int = 0
  received_tokens: int = 0
  trained: int = 0
  trained_tokens: int = 0

  @property
  def length_bias(self) -> float:
    """Mean length of the trained over that of all received, less 1."""
    if not self.trained_tokens or not self.received_tokens:
      return 0.0
    trained = self.trained_tokens / self.trained
    return trained / (self.received_tokens / self.received) - 1


@dataclasses.dataclass
class Flow:
  """What joins dispatcher, sampler and evidence, and its state.

  Attributes:
    dispatcher: draws prompts.
    batcher: talks to the sampler.
    staleness: how old the work may be.
    evidence: prompt values.
    evidence_from: 'received' or 'consumed'; what becomes evidence.
    version: the published version, which is the policy event.
    collecting: the step that the next collected batch is for.
    tally: what came of the rollouts so far.
  """

  dispatcher: dispatch_lib.Dispatcher
  batcher: batcher_lib.Batcher
  staleness: staleness_lib.Staleness
  evidence: tracker.Evidence
  evidence_from: str
  version: int = 0
  collecting: int = 0
  tally: Tally = dataclasses.field(default_factory=Tally)
  # A collected batch that no step consumes before the flight is drained.
  _taken: list[Finished] = dataclasses.field(default_factory=list)

  def publish(self, params: Mapping[str, np.ndarray], version: int) -> None:
    """Has what is dispatched from now on generated with a snapshot."""
    self.version = version
    self.batcher.publish(params, version, interrupt=self.staleness.interrupts)

  def dispatch(self) -> None:
    """Sends off what the staleness policy admits now."""
    clock = staleness_lib.Clock(self.collecting, self.version)
    self.batcher.submit(
      self.staleness.tickets(clock, self.dispatcher, self.batcher)
    )

  def collect(self) -> list[Finished]:
    """Waits for the batch of the next step.

    Raises:
      RolloutsFailed: the sampler does not deliver.
      NothingToCollect: nothing is in flight and nothing can be dispatched.
    """
    while True:
      if self.staleness.refills:
        self.file_outcomes()
        self.dispatch()
      clock = staleness_lib.Clock(self.collecting, self.version)
      chosen = self.staleness.choose(clock, self.batcher)
      if chosen is not None:
        break
      if not self.batcher.num_in_flight:
        self.dispatch()
      if not self.batcher.num_in_flight:
        raise NothingToCollect(
          f'the batch of step {self.collecting} lacks rollouts and none can be '
          'dispatched; the warnings above and the log of the sampler say why'
        )
      self.batcher.wait(self._what_is_missing)
    self.collecting += 1
    batch = self.batcher.take(chosen)
    self.tally.trained += len(batch)
    self.tally.trained_tokens += _action_tokens(batch)
    self._taken = batch if self.staleness.drops_rest else []
    return batch

  def _what_is_missing(self) -> str:
    return (
      f'step {self.collecting} has no batch yet: '
      f'{len(self.batcher.finished)} groups have finished, '
      f'{len(self.batcher.open)} are open, the oldest dispatched under version '
      f'{self.batcher.oldest_open} of {self.version}'
    )

  def drain(self) -> list[Finished]:
    """Waits for the rest of the flight where the policy has it trained never.

    Returns:
      What came too late for the batch.
    """
    late = self.batcher.drain() if self.staleness.drops_rest else []
    self._taken = []
    return late

  def file_outcomes(self, batch: Sequence[Finished] = ()) -> None:
    """Hands outcomes to the evidence, each under its policy event.

    Args:
      batch: what a step consumes; counts where evidence is of the consumed.
    """
    received = self.batcher.received()
    self.tally.received += len(received)
    self.tally.received_tokens += _action_tokens(received)
    if self.evidence_from == 'received':
      self._file(received)
    else:
      self._file(batch)

  def _file(self, items: Sequence[Finished]) -> None:
    self.evidence.receive(
      [
        tracker.Outcome(
          request_id=item.ticket.request_id,
          task_id=item.ticket.task_id,
          policy_event=self.staleness.event(*item),
          reward=item.trajectory.reward,
        )
        for item in items
      ]
    )

  def settle(self) -> None:
    """Waits for what only an older snapshot can generate.

    A resumed run has the present snapshot alone. Under `interrupts` that is
    the one that goes on anyway.
    """
    if self.staleness.interrupts:
      return
    while (oldest := self.batcher.oldest_open) is not None and (
      oldest < self.version
    ):
      self.batcher.wait(lambda: 'a checkpoint needs the end of older work')
    self.file_outcomes()

  def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what a checkpoint holds, as arrays and as JSON-able values."""
    taken = self._taken  # of a drain that was stopped: to be taken again
    held, records = stored.pack([*taken, *self.batcher.held])
    tally = dataclasses.replace(
      self.tally,
      trained=self.tally.trained - len(taken),
      trained_tokens=self.tally.trained_tokens - _action_tokens(taken),
    )
    arrays = {'evidence': self.evidence.state_dict(), 'held': held}
    return arrays, {
      'version': self.version,
      'collecting': self.collecting - bool(taken),
      'dispatcher': self.dispatcher.state_dict(),
      'staleness': self.staleness.state_dict(),
      'in_flight': [dataclasses.asdict(t) for t in self.batcher.in_flight],
      'held': records,
      'tally': dataclasses.asdict(tally),
      'dispatched': self.batcher.dispatched,
      'statuses': {s.name: n for s, n in self.batcher.statuses.items()},
    }

  def adopt(
    self,
    arrays: Mapping[str, Any],
    extra: Mapping[str, Any],
    params: Mapping[str, np.ndarray],
  ) -> None:
    """Goes on from `state`: asks again for the rollouts that were in flight.

    Args:
      arrays: as returned.
      extra: as returned.
      params: the snapshot of the version then published.
    """
    self.evidence.load_state_dict(arrays['evidence'])
    self.collecting = extra['collecting']
    self.dispatcher.load_state_dict(extra['dispatcher'])
    self.staleness.load_state_dict(extra['staleness'])
    self.batcher.statuses.update(
      {types.Status[name]: n for name, n in extra['statuses'].items()}
    )
    self.tally = Tally(**extra['tally'])
    self.batcher.dispatched = extra['dispatched']
    self.publish(params, extra['version'])
    self.batcher.restore(
      stored.unpack(arrays['held'], extra['held']),
      [types.Ticket(**t) for t in extra['in_flight']],
    )


def _action_tokens(items: Sequence[Finished]) -> int:
  return sum(item.trajectory.num_actions for item in items)
