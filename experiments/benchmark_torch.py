"""Straightforward vectorised PyTorch versions of the kernels, by autograd.

As in `benchmark_numpy`, batches hold whole prompt groups, every trajectory is
usable and acts, and log-probs are finite. Ids are int64.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from benchmark_numpy import BISECTIONS, GROUP_SIZE, KAPPA

from spopp_jax import types

Tensor = torch.Tensor


def use_threads(number: int) -> str:
  """Sets torch's threads; returns version and threads in words."""
  torch.set_num_threads(number)
  return f'torch {torch.__version__} on the CPU, {number} threads, eager.'


def held(array: np.ndarray) -> Tensor:
  """Returns an input as this library holds it."""
  tensor = torch.from_numpy(array)
  return tensor.long() if tensor.dtype == torch.int32 else tensor


def trajectory_lengths(
  mask: Tensor, trajectory_ids: Tensor, *, num_trajectories: int
) -> Tensor:
  """Returns L_i [N], the counted tokens of each trajectory."""
  return _sums(mask.float(), trajectory_ids, num_trajectories)


def standardize(advantages: Tensor, weights: Tensor, usable: Tensor) -> Tensor:
  """Returns SPO++ Eq. 4 or 6 [N]: centred and scaled under the weights."""
  weights = torch.where(usable, weights, 0)
  total = weights.sum()
  centred = advantages - (weights * advantages).sum() / total
  variance = (weights * centred**2).sum() / (total - 1)
  return torch.where(weights > 0, centred / (variance.sqrt() + 1e-8), 0)


def tempering(log_ratios: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
  """Bisects all groups together.

  Returns:
    The exponents [G] and the mean-one weights [G, K].
  """
  number = valid.sum(dim=1)
  largest = torch.where(valid, log_ratios, -torch.inf).amax(dim=1, keepdim=True)
  offsets = torch.where(valid, log_ratios - largest, 0)

  def weights(exponents):
    return torch.where(valid, torch.exp(exponents[:, None] * offsets), 0)

  def holds(exponents):
    tempered = weights(exponents)
    ess = tempered.sum(dim=1) ** 2 / (tempered**2).sum(dim=1)
    return ess >= KAPPA * number

  low = torch.zeros(len(log_ratios))
  high = torch.ones(len(log_ratios))
  untempered = holds(high)
  for _ in range(BISECTIONS):
    middle = (low + high) / 2
    feasible = holds(middle)
    low = torch.where(feasible, middle, low)
    high = torch.where(feasible, high, middle)
  exponents = torch.where(untempered, 1.0, low)
  tempered = weights(exponents)
  total = tempered.sum(dim=1, keepdim=True)
  return exponents, tempered * number[:, None] / total


def value_and_gradient(
  name: str, batch: types.PackedBatch, proximal: Tensor, current: Tensor
) -> tuple[Tensor, Tensor]:
  """Returns a published recipe's loss and its gradient.

  Args:
    name: a key of `OBJECTIVES`.
    batch: tensors.
    proximal: [B, S] float32 nats.
    current: [B, S] float32 nats; what is differentiated.

  Returns:
    The loss [] and its gradient [B, S].
  """
  current = current.detach().requires_grad_()
  loss = OBJECTIVES[name](batch, proximal, current)
  (gradient,) = torch.autograd.grad(loss, current)
  return loss.detach(), gradient


def _spopp(batch, proximal, current) -> Tensor:
  lengths = _per_trajectory(batch.action_mask.float(), batch)
  advantages = _to_tokens(
    standardize(batch.rewards - batch.values, lengths, batch.usable), batch
  )
  weight = torch.exp(proximal - batch.behaviour_logprobs).clamp(max=2)
  ratio = torch.exp(current - proximal)
  terms = _clipped(advantages, ratio, 0.2, 0.28)
  terms = torch.where(
    advantages < 0, torch.minimum(terms, -2 * advantages), terms
  )
  return _token_mean(terms * weight, batch)


def _grpo(batch, proximal, current) -> Tensor:
  del proximal
  ratio = torch.exp(current - batch.behaviour_logprobs)
  terms = _clipped(_group_advantages(batch), ratio, 0.2, 0.2)
  return _sequence_mean(terms, batch)


def _gspo(batch, proximal, current) -> Tensor:
  del proximal
  log_ratio = current - batch.behaviour_logprobs
  sums = _per_trajectory(log_ratio.detach() * batch.action_mask, batch)
  means = sums / _per_trajectory(batch.action_mask.float(), batch)
  own = log_ratio - log_ratio.detach()
  ratio = torch.exp(_to_tokens(means, batch) + own)
  terms = _clipped(_group_advantages(batch), ratio, 3e-4, 4e-4)
  return _sequence_mean(terms, batch)


def _m2po(batch, proximal, current) -> Tensor:
  advantages = _group_advantages(batch)
  distance = (proximal - batch.behaviour_logprobs) * batch.action_mask
  trusted = advantages * distance > 0
  squares = torch.sort(distance[trusted] ** 2).values
  means = torch.cumsum(squares, 0) / torch.arange(1, len(squares) + 1)
  fitting = int((means <= 0.04).sum())
  largest = squares[fitting - 1] if fitting else -1
  kept = ~(trusted & (distance**2 > largest))
  ratio = torch.exp(current - batch.behaviour_logprobs)
  return _token_mean(-advantages * ratio * kept, batch)


def _tetpo(batch, proximal, current) -> Tensor:
  advantages = _group_advantages(batch)
  log_weights = (proximal - batch.behaviour_logprobs) * batch.action_mask
  sums = _per_trajectory(log_weights, batch)
  order = torch.argsort(batch.group_ids).reshape(-1, GROUP_SIZE)
  _, grouped = tempering(sums[order], torch.ones_like(order, dtype=torch.bool))
  weights = torch.empty_like(sums)
  weights[order] = grouped
  judged = torch.exp(current.detach() - batch.behaviour_logprobs)
  terms = -advantages * torch.exp(current - proximal)
  above = (advantages > 0) & (judged > 1.2)
  below = (advantages < 0) & (judged < 0.8)
  terms = torch.where(above, -advantages * 1.2, terms)
  terms = torch.where(below, -advantages * 0.8, terms)
  return _sequence_mean(terms * _to_tokens(weights, batch), batch)


# Name in spopp_jax/objectives -> (batch, proximal, current) -> loss.
OBJECTIVES: Mapping[str, Callable[..., Tensor]] = {
  'spopp': _spopp,
  'tetpo': _tetpo,
  'grpo': _grpo,
  'm2po': _m2po,
  'gspo': _gspo,
}


def _clipped(advantages, ratio, low, high):
  bounded = ratio.clamp(1 - low, 1 + high)
  return torch.maximum(-advantages * ratio, -advantages * bounded)


def _group_advantages(batch):
  """GRPO's advantages, given to every token."""
  ids = batch.group_ids
  count = torch.bincount(ids)
  centred = batch.rewards - (torch.bincount(ids, batch.rewards) / count)[ids]
  variance = torch.bincount(ids, centred**2) / (count - 1)
  return _to_tokens(centred / (variance.sqrt()[ids] + 1e-6), batch)


def _token_mean(terms, batch):
  return (terms * batch.action_mask).sum() / batch.action_mask.sum()


def _sequence_mean(terms, batch):
  sums = _per_trajectory(terms * batch.action_mask, batch)
  return (sums / _per_trajectory(batch.action_mask.float(), batch)).mean()


def _per_trajectory(values, batch):
  return _sums(values, batch.trajectory_ids, batch.usable.numel())


def _to_tokens(per_trajectory, batch):
  padded = torch.nn.functional.pad(per_trajectory, (0, 1))
  return padded[batch.trajectory_ids]


def _sums(values, ids, number):
  sums = torch.zeros(number + 1)
  return sums.index_add(0, ids.reshape(-1), values.reshape(-1))[:number]
