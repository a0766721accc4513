"""One step's record, from what the loop holds."""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from spopp_jax import types
from spopp_jax.learner import logprob_contract
from spopp_jax.runner import training


class Clock:
  """Splits a step's wall time into named parts."""

  def __init__(self):
    self._start = self._last = time.perf_counter()
    self._parts: dict[str, float] = {}

  def mark(self, name: str) -> None:
    """Ends the part `name`, in s."""
    now = time.perf_counter()
    self._parts[name] = now - self._last
    self._last = now

  def seconds(self) -> dict[str, float]:
    """Returns the parts and the whole, `step_s`."""
    return {**self._parts, 'step_s': time.perf_counter() - self._start}


def of(
  run: training.Training,
  batch: Sequence[training.Finished],
  late: Sequence[training.Finished],
  scalars: Mapping[str, np.ndarray],
  seconds: Mapping[str, float],
) -> dict[str, float]:
  """Returns the record of `run.step` (meanings in `metrics_table.METRICS`)."""
  rewards = np.array([item.trajectory.reward for item in batch])
  everyone = np.array([item.trajectory.reward for item in (*batch, *late)])
  lengths = np.array([item.trajectory.num_actions for item in batch])
  tokens = sum(len(item.trajectory.tokens) for item in (*batch, *late))
  flow = run.flow
  # The learner stood at updates_done - 1 when it took the batch.
  lags = [run.updates_done - 1 - flow.staleness.event(*item) for item in batch]
  record = {
    'reward_collected': _mean(rewards),
    'reward_dispatched': _mean(everyone),
    'value_mean': _mean([item.ticket.value for item in batch]),
    'action_tokens_mean': _mean(lengths),
    'turns_mean': _mean([item.trajectory.num_turns for item in batch]),
    'action_tokens': float(lengths.sum()),
    'trajectories': float(len(batch)),
    'late_trajectories': float(len(late)),
    'lag_events': _mean(lags),
    'lag_events_max': float(max(lags, default=0)),
    'length_bias': flow.tally.length_bias,
    'in_flight': float(flow.batcher.num_in_flight),
    'held': float(len(flow.batcher.held)),
    'proxy_ratio_fraction': _mean(
      [not logprob_contract.is_exact(item.trajectory) for item in batch]
    ),
    'tokens_per_s': tokens / seconds['step_s'],
    **seconds,
    **{name: float(value) for name, value in scalars.items()},
  }
  if len(masses := _kept_masses(batch)):
    record['kept_mass_mean'] = _mean(masses)
  for status in types.Status:
    record[f'status/{status.name.lower()}'] = float(
      flow.batcher.statuses[status]
    )
  return record


def _kept_masses(batch: Sequence[training.Finished]) -> np.ndarray:
  """Returns the probability that truncation left, of each action token."""
  kept = [item.trajectory.kept for item in batch]
  told = [k.log_mass for k in kept if k is not None and k.log_mass is not None]
  return np.exp(np.concatenate([np.zeros(0), *told]))


def _mean(values: npt.ArrayLike) -> float:
  array = np.asarray(values, np.float64)
  return float(array.mean()) if array.size else float('nan')
