"""Group methods against plain float64 loops, value and gradient.

Each method is written out from its paper, one trajectory after another; the
gradient is a central difference of the loop with its constants frozen.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from scipy import optimize

from spopp_jax import objectives, types

GROUPS = (0, 2, 0, 1, 1, 2, 0, 2, 1, 1)
REWARDS = (1, 0, 0, 1, 1, 1, 0, 1, 1, 0)
SLOTS, SIZE, WIDTH = 12, 4, 11


@dataclasses.dataclass
class Rollout:
  """The action tokens of one trajectory, in float64."""

  group: int
  reward: float
  behaviour: np.ndarray
  proximal: np.ndarray
  current: np.ndarray


class World:
  """Ten rollouts in three groups; group 1 is equal but for one unusable."""

  def __init__(self, seed=0):
    rng = np.random.default_rng(seed)
    self.mask = rng.random((SLOTS, WIDTH)) < 0.5
    self.mask[:, 0], self.mask[:, 1] = False, True
    shape = (SLOTS, WIDTH)
    draw = lambda scale: rng.normal(0, scale, shape).astype(np.float32)
    self.behaviour = draw(0.5) - 2
    self.proximal = self.behaviour + draw(0.3)
    self.current = self.proximal + draw(0.15)
    self.usable = np.arange(SLOTS) < len(GROUPS)
    self.usable[9] = False
    row_ids = np.where(np.arange(SLOTS) < 10, np.arange(SLOTS), SLOTS)
    ids = np.broadcast_to(row_ids[:, None], shape).astype(np.int32)
    zeros = np.zeros(shape, np.int32)
    pad = lambda values, fill: np.array([*values, fill, fill])
    self.batch = types.PackedBatch(
      tokens=zeros,
      positions=zeros + np.arange(WIDTH, dtype=np.int32),
      segment_ids=zeros + 1,
      trajectory_ids=ids,
      action_mask=self.mask & (ids < SLOTS),
      behaviour_logprobs=self.behaviour,
      kept_ids=np.zeros((*shape, 0), np.int32),
      rewards=pad(REWARDS, 0).astype(np.float32),
      values=np.zeros(SLOTS, np.float32),
      usable=self.usable,
      group_ids=pad(GROUPS, SLOTS // SIZE).astype(np.int32),
    )

  def rollouts(self, current=None):
    current = self.current if current is None else current
    pick = lambda x, i: np.float64(x[i])[self.mask[i]]
    return [
      Rollout(
        GROUPS[i],
        REWARDS[i],
        pick(self.behaviour, i),
        pick(self.proximal, i),
        pick(current, i),
      )
      for i in np.flatnonzero(self.usable)
    ]


def _centred(rollouts, shift=lambda r: 0.0):
  """Rewards less their group's mean, the group's size and deviation."""
  out = []
  for r in rollouts:
    rewards = np.array(
      [m.reward + shift(m) for m in rollouts if m.group == r.group]
    )
    out.append(
      (r.reward + shift(r) - rewards.mean(), len(rewards), rewards.std(ddof=1))
    )
  return out


def _grpo_advantages(rollouts, shift=lambda r: 0.0):
  return [c / (std + 1e-6) for c, _, std in _centred(rollouts, shift)]


def _ppo(a, ratio, low=0.2, high=0.2):
  return np.maximum(-a * ratio, -a * np.clip(ratio, 1 - low, 1 + high))


def _sampler_ratio(r):
  return np.exp(r.current - r.behaviour)


def _grpo(rollouts, frozen):
  a = _grpo_advantages(frozen)
  return np.mean(
    [
      _ppo(a, _sampler_ratio(r)).mean()
      for a, r in zip(a, rollouts, strict=True)
    ]
  )


def _dr_grpo(rollouts, frozen):
  a = [c for c, *_ in _centred(frozen)]
  total = sum(
    _ppo(a, _sampler_ratio(r)).sum() for a, r in zip(a, rollouts, strict=True)
  )
  return total / (len(rollouts) * 3000)


def _rloo(rollouts, frozen):
  a = [c * n / (n - 1) for c, n, _ in _centred(frozen)]
  return np.mean(
    [-a * _sampler_ratio(r).sum() for a, r in zip(a, rollouts, strict=True)]
  )


def _dapo(rollouts, frozen):
  # Responses of more than 4 tokens pay, of 8 and more the whole of 1.
  shift = lambda r: np.clip((8 - 4 - len(r.current)) / 4, -1, 0)
  varied = {
    r.group
    for r in frozen
    if any(m.reward != r.reward for m in frozen if m.group == r.group)
  }
  total, tokens = 0.0, 0
  for a, r in zip(_grpo_advantages(frozen, shift), rollouts, strict=True):
    if r.group in varied:
      total += _ppo(a, _sampler_ratio(r), 0.2, 0.28).sum()
      tokens += len(r.current)
  assert len(varied) == 2
  return total / tokens


def _gspo(rollouts, frozen):
  return np.mean(
    [
      _ppo(a, np.exp((r.current - r.behaviour).mean()), 3e-4, 4e-4)
      for a, r in zip(_grpo_advantages(frozen), rollouts, strict=True)
    ]
  )


def _cispo(rollouts, frozen):
  total = sum(
    (-np.minimum(_sampler_ratio(f), 1.2) * a * r.current).sum()
    for a, r, f in zip(_grpo_advantages(frozen), rollouts, frozen, strict=True)
  )
  return total / sum(len(r.current) for r in rollouts)


def _reinforce_pp_baseline(rollouts, frozen):
  per_token = np.concatenate(
    [
      np.full(len(r.current), c)
      for (c, *_), r in zip(_centred(frozen), frozen, strict=True)
    ]
  )
  white = (per_token - per_token.mean()) / (per_token.std(ddof=1) + 1e-8)
  ratios = np.concatenate([_sampler_ratio(r) for r in rollouts])
  return _ppo(white, ratios).mean()


def _m2po(rollouts, frozen):
  # The mask belongs to the start of the step: to the proximal policy.
  a = np.concatenate(
    [
      np.full(len(f.current), a)
      for a, f in zip(_grpo_advantages(frozen), frozen, strict=True)
    ]
  )
  x = np.concatenate([f.proximal - f.behaviour for f in frozen])
  trusted = ((a > 0) & (x > 0)) | ((a < 0) & (x < 0))
  kept = np.ones(len(x), bool)
  while (x[trusted & kept] ** 2).mean() > 0.04:
    kept[np.argmax(np.where(trusted & kept, x**2, -1))] = False
  assert 0 < (~kept).sum() < trusted.sum()
  ratios = np.concatenate([_sampler_ratio(r) for r in rollouts])
  return -(kept * ratios * a).mean()


def _gepo(rollouts, frozen):
  losses = []
  for (c, *_), r in zip(_centred(frozen), rollouts, strict=True):
    q = np.exp([f.behaviour.mean() for f in frozen if f.group == r.group])
    w = np.exp(r.current.mean()) / ((q**2).sum() / q.sum())
    losses.append(_ppo(c, w))
  return np.mean(losses)


def _tetpo(rollouts, frozen):
  losses = []
  for a, r in zip(_grpo_advantages(frozen), rollouts, strict=True):
    steps = lambda f: (f.proximal - f.behaviour).sum()
    group = np.array([steps(f) for f in frozen if f.group == r.group])

    def spare(alpha, group=group):
      w = np.exp(alpha * (group - group.max()))
      return w.sum() ** 2 / (w**2).sum() - 0.85 * len(group)

    alpha = 1.0 if spare(1.0) >= 0 else optimize.brentq(spare, 0, 1)
    w = np.exp(alpha * group)
    u = len(group) * np.exp(alpha * steps(r)) / w.sum()
    judged = _sampler_ratio(r)
    left = (judged > 1.2) if a > 0 else (judged < 0.8)
    held = -a * (1.2 if a > 0 else 0.8)
    free = -a * np.exp(r.current - r.proximal)
    losses.append((u * np.where(left & (a != 0), held, free)).mean())
  return np.mean(losses)


METHODS = {
  'grpo': _grpo,
  'dr_grpo': _dr_grpo,
  'rloo': _rloo,
  'dapo': _dapo,
  'gspo': _gspo,
  'cispo': _cispo,
  'reinforce_pp_baseline': _reinforce_pp_baseline,
  'm2po': _m2po,
  'gepo': _gepo,
  'tetpo': _tetpo,
}


@pytest.fixture(scope='module')
def world():
  return World()


@functools.cache
def _difference(name, step=1e-5):
  """Central differences of the loop at every action token."""
  world = World()
  frozen = world.rollouts()
  gradient = np.zeros(world.current.shape)
  counted = world.mask & world.usable[:, None]
  for at in zip(*np.nonzero(counted), strict=True):
    sides = []
    for sign in (1, -1):
      moved = world.current.astype(np.float64)
      moved[at] += sign * step
      sides.append(METHODS[name](world.rollouts(moved), frozen))
    gradient[at] = (sides[0] - sides[1]) / (2 * step)
  return gradient


def test_every_group_method_is_written_out():
  grouped = {
    name
    for name in objectives.objective_names()
    if objectives.make_objective(name, {}).group_size > 1
  }
  assert grouped == METHODS.keys()


@pytest.mark.parametrize('name', METHODS)
def test_value_and_gradient(world, name):
  overrides = {'group_size': SIZE}
  if name == 'dapo':
    overrides |= {'overlong_limit': 8.0, 'overlong_buffer': 4.0}
  objective = objectives.make_objective(name, overrides)

  @jax.jit
  def run(batch, proximal, current):
    advantages = objective.advantages(batch)
    weights, _ = objective.weights(batch, proximal, advantages)

    def loss(current):
      numerator, count, _ = objective.loss(current, batch, advantages, weights)
      return numerator / count

    return jax.value_and_grad(loss)(current)

  value, gradient = run(world.batch, world.proximal, world.current)
  want = METHODS[name](world.rollouts(), world.rollouts())
  assert abs(want) > 1e-6
  np.testing.assert_allclose(value, want, rtol=2e-5, atol=1e-7)
  scale = np.abs(_difference(name)).max()
  np.testing.assert_allclose(
    gradient / scale, _difference(name) / scale, atol=2e-5
  )
