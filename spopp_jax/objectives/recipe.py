"""What a method decides: the choices that every objective is made of.

  advantage   baseline x measure            whose mean, under which weights
  weight      correction x token_mask       sampler to learner, detached
  surrogate   surrogate x ratio x ratio_to  what carries the gradient
  loss        aggregation                   what is divided by what

A method is one `Config` of these fields; an ablation changes one word.
"""

import dataclasses
import math
import numbers

_CHOICES = {
  'baseline': ('event_time', 'receipt_order', 'group_mean', 'leave_one_out'),
  'measure': ('action_token', 'trajectory', 'group', 'none'),
  'correction': ('none', 'token', 'sequence', 'icepop', 'tempered'),
  'tempering_scope': ('group', 'batch'),
  'tempering_log_ratio': ('sum', 'mean'),
  'tempering_scale': ('mean_one', 'sum_one'),
  'token_mask': ('none', 'window', 'geometric_mean', 'second_moment'),
  'second_moment_variant': ('paper', 'official_cap', 'areal'),
  'denominator': ('all', 'kept'),
  'surrogate': ('clip', 'clip_weight', 'unclipped', 'likelihood'),
  'ratio': ('token', 'sequence_mean', 'sequence_sum'),
  'ratio_to': ('proximal', 'behaviour', 'group_expectation'),
  'clip_region': ('ratio', 'behaviour'),
  'aggregation': (
    'token_mean',
    'token_sum',
    'seq_mean_token_mean',
    'seq_mean_token_sum',
    'seq_mean_token_sum_norm',
  ),
}
_RANGES = {
  'group_size': (lambda n: n >= 1, 'must be at least 1'),
  'overlong_limit': (lambda n: n >= 0, 'must be at least 0 (0 is off)'),
  'overlong_buffer': (lambda n: n >= 0, 'must be at least 0'),
  'rollout_cap': (lambda c: c >= 1, 'must be at least 1'),
  'window_low': (lambda w: w >= 0, 'must be at least 0'),
  'window_high': (lambda w: w > 0, 'must exceed 0'),
  'target_ess_fraction': (lambda k: 0 < k <= 1, 'must lie in (0, 1]'),
  'tempering_iterations': (lambda n: n >= 1, 'must be at least 1'),
  'second_moment_threshold': (lambda t: t > 0, 'must exceed 0'),
  'clip_low': (lambda e: 0 <= e <= 1, 'must lie in [0, 1]'),
  'clip_high': (lambda e: e >= 0, 'must be at least 0'),
  'dual_clip': (lambda c: c > 1 or c == 0, 'must exceed 1 (0 is off)'),
  'aggregation_norm': (lambda n: n >= 0, 'must be at least 0'),
}
_INTEGERS = ('group_size', 'tempering_iterations')
_FLAGS = ('center', 'scale', 'drop_equal_groups')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The composition of an objective; methods give every field a default.

  Attributes:
    baseline: what the reward is compared with: the prompt's evidence by
      'event_time' (SPO++ Eq. 3) or 'receipt_order' (SPO, Eq. 2), or the
      'group_mean' or 'leave_one_out' mean of the prompt group.
    measure: standardization of the whole batch under the 'action_token'
      (SPO++ Eq. 6) or 'trajectory' (Eq. 4) measure; 'group' divides by each
      group's deviation; 'none'.
    aggregation: token losses to one number; see `kernels.aggregate`.
    group_size: rollouts a prompt and dispatch; 1 is single-stream.
    center: a batch measure subtracts the mean.
    scale: a batch measure divides by the deviation.
    drop_equal_groups: groups of equal rewards leave loss and denominators.
    overlong_limit: tokens; from overlong_buffer before it on, rewards are
      lowered by up to 1; 0 is off.
    overlong_buffer: tokens, in (0, overlong_limit].
    correction: weight from sampler to learner: 'none', truncated per 'token'
      or 'sequence', 'icepop' (0 outside the window), or 'tempered' to a target
      effective sample size (TETPO).
    rollout_cap: >= 1; upper truncation of 'token' and 'sequence'.
    window_low: >= 0; smallest ratio of 'icepop', 'window', 'geometric_mean'.
    window_high: > window_low; largest ratio of the same.
    target_ess_fraction: kappa in (0, 1] of 'tempered'.
    tempering_iterations: halvings of its bisection.
    tempering_scope: what is tempered together: 'group' or 'batch'.
    tempering_log_ratio: 'sum' over tokens, or 'mean'.
    tempering_scale: weights 'mean_one' or 'sum_one'.
    token_mask: tokens that are rejected: 'none', outside the ratio 'window',
      trajectories outside the window of their 'geometric_mean', or
      'second_moment' (M2PO). All look at the proximal policy, that of the
      step's start, also in later minibatches.
    second_moment_threshold: > 0, nats^2.
    second_moment_variant: see `kernels.second_moment_mask`.
    denominator: the loss divides by 'all' action tokens or by the 'kept'.
    surrogate: 'clip' (PPO), 'clip_weight' (the weight is part of the clipped
      ratio, so metrics of used weights show 1), 'unclipped', or 'likelihood'
      (CISPO).
    ratio: of the 'token', or of the trajectory: its geometric mean
      'sequence_mean' (GSPO) or its product 'sequence_sum'.
    ratio_to: what the current policy is compared with: the 'proximal' one
      (decoupled), the 'behaviour' one (no weight then), or the
      'group_expectation' of it (GEPO).
    clip_low: [0, 1]; the judged ratio's range is [1 - clip_low, 1 + clip_high].
    clip_high: >= 0.
    clip_region: the ratio judged: the 'ratio' itself, or the token's to
      'behaviour'.
    dual_clip: c > 1; loss cap -c A where the advantage is negative; 0 is off.
    aggregation_norm: tokens; the constant that seq_mean_token_sum_norm needs.
  """

  baseline: str
  measure: str
  aggregation: str
  group_size: int = 1
  center: bool = True
  scale: bool = True
  drop_equal_groups: bool = False
  overlong_limit: float = 0.0
  overlong_buffer: float = 0.0
  correction: str = 'none'
  rollout_cap: float = 2.0
  window_low: float = 0.5
  window_high: float = 5.0
  target_ess_fraction: float = 0.85
  tempering_iterations: int = 24
  tempering_scope: str = 'group'
  tempering_log_ratio: str = 'sum'
  tempering_scale: str = 'mean_one'
  token_mask: str = 'none'
  second_moment_threshold: float = 0.04
  second_moment_variant: str = 'paper'
  denominator: str = 'all'
  surrogate: str = 'clip'
  ratio: str = 'token'
  ratio_to: str = 'proximal'
  clip_low: float = 0.2
  clip_high: float = 0.2
  clip_region: str = 'ratio'
  dual_clip: float = 0.0
  aggregation_norm: float = 0.0

  def __post_init__(self):
    for name, allowed in _CHOICES.items():
      value = getattr(self, name)
      if value not in allowed:
        raise ValueError(f'{name} ({value!r}) must be one of {allowed}')
    for name in _FLAGS:
      if not isinstance(getattr(self, name), bool):
        raise ValueError(f'{name} ({getattr(self, name)!r}) must be a bool')
    for name, (holds, sentence) in _RANGES.items():
      _require_number(name, getattr(self, name), holds, sentence)
    for name in _INTEGERS:
      if not isinstance(getattr(self, name), numbers.Integral):
        raise ValueError(f'{name} ({getattr(self, name)}) must be an integer')
    for wrong, sentence in (*_of_advantages(self), *_of_loss(self)):
      if wrong:
        raise ValueError(sentence)

  @property
  def grouped(self) -> bool:
    """Whether advantages need the other rollouts of the prompt."""
    return self.baseline in ('group_mean', 'leave_one_out')

  @property
  def evidence(self) -> str:
    """Which evidence gives `values`; 'none' for group baselines."""
    return 'none' if self.grouped else self.baseline


def _require_number(name, value, holds, sentence):
  number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not number:
    raise ValueError(f'{name} ({value!r}) must be a number')
  if not (math.isfinite(value) and holds(value)):
    raise ValueError(f'{name} ({value}) {sentence} and be finite')


def _of_advantages(c: Config) -> list[tuple[bool, str]]:
  """Choices that do not go together: (whether made, why not)."""
  batch_measure = c.measure in ('action_token', 'trajectory')
  return [
    (
      c.grouped and c.group_size < 2,
      f'baseline {c.baseline!r} compares the rollouts of a prompt: group_size '
      f'({c.group_size}) must be at least 2',
    ),
    (
      not c.grouped and c.group_size > 1,
      f'baseline {c.baseline!r} freezes one value for one request: group_size '
      f'({c.group_size}) must be 1',
    ),
    (
      c.measure == 'group' and not c.grouped,
      "measure 'group' divides by the deviation of a prompt group, which "
      f'baseline {c.baseline!r} does not have: use action_token, trajectory '
      'or none',
    ),
    (
      not batch_measure and not (c.center and c.scale),
      f'center and scale are switches of action_token and trajectory: measure '
      f'{c.measure!r} leaves nothing to switch off',
    ),
    (
      c.drop_equal_groups and not c.grouped,
      'drop_equal_groups would drop everything: every trajectory of baseline '
      f'{c.baseline!r} is a group of one',
    ),
    (
      c.overlong_limit > 0 and not 0 < c.overlong_buffer <= c.overlong_limit,
      f'overlong_buffer ({c.overlong_buffer}) must lie in (0, overlong_limit '
      f'({c.overlong_limit})]',
    ),
  ]


def _of_loss(c: Config) -> list[tuple[bool, str]]:
  """Choices that do not go together: (whether made, why not)."""
  weighted = c.correction != 'none'
  return [
    (
      not c.window_low < c.window_high,
      f'window_low ({c.window_low}) must lie below window_high '
      f'({c.window_high})',
    ),
    (
      c.correction == 'tempered'
      and c.tempering_scope == 'group'
      and not c.grouped,
      "tempering_scope 'group' leaves a group of one as it is: baseline "
      f"{c.baseline!r} needs tempering_scope 'batch'",
    ),
    (
      weighted and c.ratio_to != 'proximal',
      f'correction {c.correction!r} and ratio_to {c.ratio_to!r} both carry the '
      'step from the sampler to the learner, it would count twice: use '
      "correction 'none' or ratio_to 'proximal'",
    ),
    (
      c.surrogate == 'clip_weight' and not weighted,
      "surrogate 'clip_weight' clips the correction's weight: correction must "
      "not be 'none'",
    ),
    (
      c.ratio_to == 'group_expectation' and c.ratio == 'token',
      "ratio_to 'group_expectation' is a ratio of trajectories: ratio must be "
      'sequence_mean or sequence_sum',
    ),
    (
      c.surrogate == 'likelihood' and c.ratio != 'token',
      "surrogate 'likelihood' weighs each token's own log-prob: ratio must be "
      "'token'",
    ),
    (
      c.clip_region == 'behaviour'
      and (c.surrogate, c.ratio, c.ratio_to) != ('clip', 'token', 'proximal'),
      "clip_region 'behaviour' needs surrogate 'clip', ratio 'token' and "
      "ratio_to 'proximal'",
    ),
    (
      c.dual_clip > 0 and c.surrogate in ('unclipped', 'likelihood'),
      f'dual_clip ({c.dual_clip}) has no meaning for surrogate '
      f'{c.surrogate!r}: set it to 0',
    ),
    (
      c.aggregation == 'seq_mean_token_sum_norm' and not c.aggregation_norm,
      "aggregation 'seq_mean_token_sum_norm' divides by a stated constant: "
      'aggregation_norm must exceed 0, such as the largest response in tokens',
    ),
    (
      c.denominator == 'kept' and c.token_mask == 'none',
      "denominator 'kept' needs a token_mask that rejects tokens",
    ),
  ]
