"""RLOO: REINFORCE with a leave-one-out baseline (arXiv:2402.14740)."""

import dataclasses
import functools

from spopp_jax.objectives import composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """REINFORCE on token ratios, without KL; fields as in `recipe.Config`.

  A = (R - mean) n / (n - 1), no clip, sums over tokens.
  """

  group_size: int = 8
  baseline: str = 'leave_one_out'
  measure: str = 'none'
  surrogate: str = 'unclipped'
  ratio_to: str = 'behaviour'
  aggregation: str = 'seq_mean_token_sum'


make = functools.partial(composition.compose, 'rloo')
