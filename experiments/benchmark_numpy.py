"""Straightforward numpy and scipy versions of the kernels, for comparison.

Batches hold whole prompt groups, every trajectory of them is usable and acts,
and log-probs are finite: most of what the kernels guard against is absent.
"""

from collections.abc import Callable, Mapping

import numpy as np
from scipy import optimize

from spopp_jax import types

KAPPA = 0.85
BISECTIONS = 24
GROUP_SIZE = 8
# Groups that the root finder solves, of all.
SAMPLE = 2_048


def held(array: np.ndarray) -> np.ndarray:
  """Returns an input as this library holds it."""
  return array


def trajectory_lengths(
  mask: np.ndarray, trajectory_ids: np.ndarray, *, num_trajectories: int
) -> np.ndarray:
  """Returns L_i [N], the counted tokens of each trajectory."""
  return _sums(mask, trajectory_ids, num_trajectories)


def standardize(
  advantages: np.ndarray, weights: np.ndarray, usable: np.ndarray
) -> np.ndarray:
  """Returns SPO++ Eq. 4 or 6 [N]: centred and scaled under the weights."""
  weights = np.where(usable, weights, 0)
  total = weights.sum()
  centred = advantages - (weights * advantages).sum() / total
  variance = (weights * centred**2).sum() / (total - 1)
  return np.where(weights > 0, centred / (np.sqrt(variance) + 1e-8), 0)


def tempering(
  log_ratios: np.ndarray, valid: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Solves one group after another with Brent's method.

  Returns:
    The exponents [G] and the mean-one weights [G, K] of the first SAMPLE
    groups.
  """
  log_ratios, valid = log_ratios[:SAMPLE], valid[:SAMPLE]
  exponents = np.ones(len(log_ratios))
  weights = np.zeros(log_ratios.shape)
  for g, members in enumerate(valid):
    offsets = np.float64(log_ratios[g][members])
    offsets -= offsets.max()

    def excess(exponent, offsets=offsets):
      tempered = np.exp(exponent * offsets)
      ess = tempered.sum() ** 2 / (tempered @ tempered)
      return ess - KAPPA * len(offsets)

    if excess(1.0) < 0:
      exponents[g] = optimize.brentq(excess, 0, 1, xtol=2**-BISECTIONS)
    tempered = np.exp(exponents[g] * offsets)
    weights[g, members] = tempered * (len(offsets) / tempered.sum())
  return exponents, weights


def value_and_gradient(
  name: str,
  batch: types.PackedBatch,
  proximal: np.ndarray,
  current: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns a published recipe's loss and its gradient, derived by hand.

  Args:
    name: a key of `OBJECTIVES`.
    batch: numpy arrays.
    proximal: [B, S] float32 nats.
    current: [B, S] float32 nats; what is differentiated.

  Returns:
    The loss [] and its gradient [B, S].
  """
  terms, slopes, shares = OBJECTIVES[name](batch, proximal, current)
  return (terms * shares).sum(), slopes * shares


# Terms [B, S], their slopes in the current log-probs, and their shares.
_Parts = tuple[np.ndarray, np.ndarray, np.ndarray]


def _spopp(batch, proximal, current) -> _Parts:
  lengths = _per_trajectory(batch.action_mask, batch)
  advantages = _to_tokens(
    standardize(batch.rewards - batch.values, lengths, batch.usable), batch
  )
  weight = np.minimum(np.exp(proximal - batch.behaviour_logprobs), 2)
  ratio = np.exp(current - proximal)
  plain = -advantages * ratio
  terms = np.maximum(plain, -advantages * np.clip(ratio, 0.8, 1.28))
  terms = np.where(advantages < 0, np.minimum(terms, -2 * advantages), terms)
  slopes = np.where(terms == plain, plain, 0)
  return terms * weight, slopes * weight, _token_mean(batch)


def _grpo(batch, proximal, current) -> _Parts:
  del proximal
  ratio = np.exp(current - batch.behaviour_logprobs)
  return *_clipped(batch, ratio, 0.2, 0.2), _sequence_mean(batch)


def _gspo(batch, proximal, current) -> _Parts:
  del proximal
  sums = _per_trajectory((current - batch.behaviour_logprobs), batch)
  means = sums / _per_trajectory(batch.action_mask, batch)
  ratio = np.exp(_to_tokens(means, batch))
  return *_clipped(batch, ratio, 3e-4, 4e-4), _sequence_mean(batch)


def _m2po(batch, proximal, current) -> _Parts:
  advantages = _group_advantages(batch)
  distance = np.where(batch.action_mask, proximal - batch.behaviour_logprobs, 0)
  trusted = advantages * distance > 0
  squares = np.sort(distance[trusted] ** 2)
  means = np.cumsum(squares) / np.arange(1, squares.size + 1)
  fitting = np.count_nonzero(means <= 0.04)
  largest = squares[fitting - 1] if fitting else -1
  kept = ~(trusted & (distance**2 > largest))
  terms = -advantages * np.exp(current - batch.behaviour_logprobs)
  return terms, terms, _token_mean(batch) * kept


def _tetpo(batch, proximal, current) -> _Parts:
  advantages = _group_advantages(batch)
  sums = _per_trajectory(proximal - batch.behaviour_logprobs, batch)
  weight = _to_tokens(_tempered(sums, batch.group_ids), batch)
  judged = np.exp(current - batch.behaviour_logprobs)
  plain = -advantages * np.exp(current - proximal)
  above = (advantages > 0) & (judged > 1.2)
  below = (advantages < 0) & (judged < 0.8)
  terms = np.where(above, -advantages * 1.2, plain)
  terms = np.where(below, -advantages * 0.8, terms)
  slopes = np.where(above | below, 0, plain)
  return terms * weight, slopes * weight, _sequence_mean(batch)


# Name in spopp_jax/objectives -> (batch, proximal, current) -> parts.
OBJECTIVES: Mapping[str, Callable[..., _Parts]] = {
  'spopp': _spopp,
  'tetpo': _tetpo,
  'grpo': _grpo,
  'm2po': _m2po,
  'gspo': _gspo,
}


def _clipped(batch, ratio, low, high):
  """PPO's clipped terms under group advantages, and their slopes."""
  advantages = _group_advantages(batch)
  plain = -advantages * ratio
  terms = np.maximum(plain, -advantages * np.clip(ratio, 1 - low, 1 + high))
  return terms, np.where(terms == plain, plain, 0)


def _group_advantages(batch):
  """GRPO's advantages, given to every token."""
  ids = batch.group_ids
  count = np.bincount(ids)
  centred = batch.rewards - (np.bincount(ids, batch.rewards) / count)[ids]
  deviation = np.sqrt(np.bincount(ids, centred**2) / (count - 1))
  return _to_tokens(centred / (deviation[ids] + 1e-6), batch)


def _tempered(log_ratios, group_ids):
  """Mean-one weights [N] of target ESS, all groups bisected together."""
  order = np.argsort(group_ids, kind='stable').reshape(-1, GROUP_SIZE)
  offsets = log_ratios[order]
  offsets -= offsets.max(axis=1, keepdims=True)

  def holds(exponents):
    tempered = np.exp(exponents[:, None] * offsets)
    ess = tempered.sum(axis=1) ** 2 / (tempered**2).sum(axis=1)
    return ess >= KAPPA * GROUP_SIZE

  low, high = np.zeros(len(offsets)), np.ones(len(offsets))
  for _ in range(BISECTIONS):
    middle = (low + high) / 2
    feasible = holds(middle)
    low, high = (
      np.where(feasible, middle, low),
      np.where(feasible, high, middle),
    )
  exponents = np.where(holds(np.ones(len(offsets))), 1, low)
  tempered = np.exp(exponents[:, None] * offsets)
  weights = np.zeros(log_ratios.shape)
  weights[order] = GROUP_SIZE * tempered / tempered.sum(axis=1, keepdims=True)
  return weights


def _token_mean(batch):
  return batch.action_mask / batch.action_mask.sum()


def _sequence_mean(batch):
  """Mean over trajectories of their token means, as a share of each token."""
  lengths = _per_trajectory(batch.action_mask, batch)
  return batch.action_mask * _to_tokens(1 / (lengths * lengths.size), batch)


def _per_trajectory(values, batch):
  """Sums [N] of the action tokens."""
  values = np.where(batch.action_mask, values, 0)
  return _sums(values, batch.trajectory_ids, batch.usable.size)


def _to_tokens(per_trajectory, batch):
  return np.append(per_trajectory, 0)[batch.trajectory_ids]


def _sums(values, ids, number):
  return np.bincount(ids.ravel(), values.ravel(), number + 1)[:number]
