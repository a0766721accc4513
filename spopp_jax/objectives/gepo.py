"""GEPO: ratios against what the group expects (arXiv:2508.17850)."""

import dataclasses
import functools

from spopp_jax.objectives import composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """Its authors' code, lengths normalised; fields as in `recipe.Config`.

  w = p / E_q[q] of the group, clip .2, A = R - group mean.
  """

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'none'
  ratio: str = 'sequence_mean'
  ratio_to: str = 'group_expectation'
  aggregation: str = 'seq_mean_token_mean'


make = functools.partial(composition.compose, 'gepo')
