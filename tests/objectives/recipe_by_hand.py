"""Any recipe in float64 loops over trajectories: what objectives must equal.

Each choice of a `recipe.Config` is written out from its formula. Everything
takes the rollouts of one optimizer minibatch; the slope is what the current
log-prob of a token receives from the numerator.
"""

import dataclasses
import math

import numpy as np
from scipy import optimize


@dataclasses.dataclass
class Rollout:
  """The action tokens of a usable trajectory, in float64."""

  group: int
  reward: float
  value: float
  behaviour: np.ndarray
  proximal: np.ndarray
  current: np.ndarray

  @property
  def steps(self):
    """Log-ratios from the sampler to the learner."""
    return self.proximal - self.behaviour


@dataclasses.dataclass
class Answer:
  """What an objective computes; lists have an entry a rollout.

  Attributes:
    advantages: numbers.
    weights: factors of the token losses.
    slopes: gradients of the numerator.
    numerator: sum over the minibatch.
    count: what divides it.
    counted: which tokens count.
  """

  advantages: list
  weights: list
  slopes: list
  numerator: float
  count: float
  counted: list


def members(config, rollouts):
  """Which rollouts count: those with tokens, of a varied group if asked."""
  acting = [len(r.behaviour) > 0 for r in rollouts]
  if not config.drop_equal_groups:
    return acting
  rewards = lambda group: {
    r.reward
    for r, acts in zip(rollouts, acting, strict=True)
    if acts and r.group == group
  }
  return [
    acts and len(rewards(r.group)) > 1
    for r, acts in zip(rollouts, acting, strict=True)
  ]


def advantages(config, rollouts):
  """Baseline x measure, of rollouts that all count."""
  rewards = np.array([r.reward for r in rollouts], float)
  lengths = np.array([len(r.behaviour) for r in rollouts])
  if config.overlong_limit:
    start = config.overlong_limit - config.overlong_buffer
    late = (lengths - start) / config.overlong_buffer
    rewards -= np.minimum(np.maximum(late, 0), 1)
  raw = np.zeros(len(rollouts))
  for i, rollout in enumerate(rollouts):
    if not config.grouped:
      raw[i] = rewards[i] - rollout.value
      continue
    same = np.array([other.group == rollout.group for other in rollouts])
    if np.ptp(rewards[same]) == 0:
      continue
    others = same.copy()
    if config.baseline == 'leave_one_out':
      others[i] = False
    raw[i] = rewards[i] - rewards[others].mean()
    if config.measure == 'group':
      raw[i] /= rewards[same].std(ddof=1) + 1e-6
  if config.measure in ('group', 'none'):
    return raw
  measure = lengths if config.measure == 'action_token' else np.sign(lengths)
  return _standardized(config, raw, measure)


def _standardized(config, raw, measure):
  if not (config.center or config.scale):
    return raw
  total = measure.sum()
  if total <= 1:
    return 0 * raw
  mean = (measure * raw).sum() / total
  deviation = math.sqrt((measure * (raw - mean) ** 2).sum() / (total - 1))
  if deviation <= 1e-6 * max(1, np.abs(raw).max()):
    return 0 * raw
  out = raw - mean if config.center else raw
  return out / (deviation + 1e-8) if config.scale else out


def corrections(config, rollouts):
  """The weight from sampler to learner of every token."""
  cap = config.rollout_cap
  steps = [r.steps for r in rollouts]
  if config.correction == 'none':
    return [np.ones(len(s)) for s in steps]
  if config.correction == 'token':
    return [np.minimum(np.exp(s), cap) for s in steps]
  if config.correction == 'sequence':
    return [np.full(len(s), min(math.exp(s.sum()), cap)) for s in steps]
  if config.correction == 'icepop':
    return [np.where(_inside(config, np.exp(s)), np.exp(s), 0) for s in steps]
  together = np.array(
    [r.group if config.tempering_scope == 'group' else 0 for r in rollouts]
  )
  reduce = np.sum if config.tempering_log_ratio == 'sum' else np.mean
  logs = np.array([reduce(s) for s in steps])
  weights = []
  for i, own in enumerate(logs):
    group = logs[together == together[i]]
    exponent = largest_exponent(
      group, config.target_ess_fraction, config.tempering_iterations
    )
    weight = math.exp(exponent * own) / np.exp(exponent * group).sum()
    if config.tempering_scale == 'mean_one':
      weight *= len(group)
    weights.append(np.full(len(steps[i]), weight))
  return weights


def ess(logs, exponent):
  """(sum w)^2 / sum w^2."""
  weights = np.exp(exponent * np.asarray(logs))
  return weights.sum() ** 2 / (weights**2).sum()


def largest_exponent(logs, kappa, iterations):
  """The last point of the bisection's grid that keeps kappa n."""
  number = len(logs)
  if kappa * number <= 1 or np.ptp(logs) == 0:
    return 1.0
  if kappa == 1:
    return 0.0
  spare = lambda exponent: ess(logs, exponent) - kappa * number
  if spare(1.0) >= 0:
    return 1.0
  root = optimize.brentq(spare, 0, 1, xtol=1e-14)
  return math.floor(root * 2**iterations) / 2**iterations


def _inside(config, ratios):
  return (config.window_low <= ratios) & (ratios <= config.window_high)


def kept(config, rollouts, advantages):
  """Which tokens the mask leaves."""
  if config.token_mask == 'none':
    return [np.ones(len(r.steps), bool) for r in rollouts]
  if config.token_mask == 'window':
    return [_inside(config, np.exp(r.steps)) for r in rollouts]
  if config.token_mask == 'geometric_mean':
    return [
      np.full(len(r.steps), _inside(config, math.exp(r.steps.mean())))
      for r in rollouts
    ]
  x = np.concatenate([r.steps for r in rollouts])
  a = np.repeat(advantages, [len(r.steps) for r in rollouts])
  left = _second_moment(config, x**2, x * a > 0)
  ends = np.cumsum([len(r.steps) for r in rollouts])
  return np.split(left, ends[:-1])


def _second_moment(config, squares, trusted):
  """M2PO's loop over the whole minibatch, and its two variants."""
  limit = config.second_moment_threshold
  left = np.ones(len(squares), bool)
  if config.second_moment_variant == 'official_cap':
    inside = squares[trusted]
    if inside.size and inside.mean() > limit:
      caps = [c for c in inside if np.minimum(inside, c).mean() < limit]
      left = ~trusted | (squares < max(caps, default=0))
    return left
  areal = config.second_moment_variant == 'areal'
  if areal:
    trusted = np.ones(len(squares), bool)
  while (trusted & left).sum() > areal:
    if squares[trusted & left].mean() <= limit:
      break
    left[np.argmax(np.where(trusted & left, squares, -1))] = False
  return left


def compared(config, rollouts, weights):
  """What the current policy is compared with, and what factor remains."""
  if config.ratio_to == 'behaviour':
    return [r.behaviour for r in rollouts], weights
  if config.ratio_to == 'group_expectation':
    reduce = np.mean if config.ratio == 'sequence_mean' else np.sum
    out = []
    for r in rollouts:
      q = np.exp([reduce(m.behaviour) for m in rollouts if m.group == r.group])
      share = 1 if config.ratio == 'sequence_mean' else len(r.behaviour)
      expected = math.log((q**2).sum() / q.sum()) / share
      out.append(np.full(len(r.behaviour), expected))
    return out, weights
  if config.surrogate != 'clip_weight':
    return [r.proximal for r in rollouts], weights
  logs = [np.log(np.where(w > 0, w, 1)) for w in weights]
  return (
    [r.proximal - log for r, log in zip(rollouts, logs, strict=True)],
    [(w > 0).astype(float) for w in weights],
  )


def surrogate(config, rollout, advantage, denominator, counted):
  """Loss and slope of every token."""
  log_ratios = rollout.current - denominator
  gain = 1
  if config.ratio != 'token':
    total = log_ratios[counted].sum()
    gain = counted.sum() if config.ratio == 'sequence_sum' else 1
    mean = total / max(counted.sum(), 1)
    log_ratios = np.full(len(log_ratios), gain * mean)
  ratios = np.exp(log_ratios)
  judged = ratios
  if config.clip_region == 'behaviour':
    judged = np.exp(rollout.current - rollout.behaviour)
  losses, slopes = [], []
  for token, ratio in enumerate(ratios):
    logprob = rollout.current[token]
    loss, slope = _token(config, advantage, ratio, judged[token], logprob)
    losses.append(loss)
    slopes.append(slope * gain)
  return np.array(losses), np.array(slopes)


def _token(config, advantage, ratio, judged, logprob):
  low, high = 1 - config.clip_low, 1 + config.clip_high
  if config.surrogate == 'likelihood':
    slope = -min(max(ratio, low), high) * advantage
    return slope * logprob, slope
  loss = slope = -advantage * ratio
  if config.surrogate == 'unclipped':
    return loss, slope
  if advantage > 0 and judged > high:
    loss, slope = -advantage * high, 0.0
  if advantage < 0 and judged < low:
    loss, slope = -advantage * low, 0.0
  if (
    config.dual_clip and advantage < 0 and loss > -config.dual_clip * advantage
  ):
    loss, slope = -config.dual_clip * advantage, 0.0
  return loss, slope


def _shares(config, counted):
  """Each trajectory's factor in the numerator, and what divides it."""
  lengths = np.array([c.sum() for c in counted])
  active = (lengths > 0).sum()
  ones = np.ones(len(lengths))
  return {
    'token_mean': (ones, lengths.sum()),
    'token_sum': (ones, min(active, 1)),
    'seq_mean_token_sum': (ones, active),
    'seq_mean_token_sum_norm': (ones, active * config.aggregation_norm),
    'seq_mean_token_mean': (1 / np.maximum(lengths, 1), active),
  }[config.aggregation]


def solve(config, rollouts):
  """The whole recipe, for the rollouts that count."""
  chosen = [
    r
    for r, counts in zip(rollouts, members(config, rollouts), strict=True)
    if counts
  ]
  answer = Answer([], [], [], 0.0, 0.0, [])
  if not chosen:
    return answer
  answer.advantages = list(advantages(config, chosen))
  raw = corrections(config, chosen)
  left = kept(config, chosen, answer.advantages)
  answer.counted = [
    k if config.denominator == 'kept' else np.ones(len(k), bool) for k in left
  ]
  denominators, factors = compared(config, chosen, raw)
  shares, answer.count = _shares(config, answer.counted)
  for i, rollout in enumerate(chosen):
    weight = np.where(left[i], factors[i], 0)
    losses, slopes = surrogate(
      config, rollout, answer.advantages[i], denominators[i], answer.counted[i]
    )
    answer.weights.append(weight)
    answer.slopes.append(weight * slopes * shares[i])
    answer.numerator += (weight * losses).sum() * shares[i]
  return answer
