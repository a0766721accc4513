"""TETPO: weights tempered to a target effective sample size per group."""

import dataclasses
import functools

from spopp_jax.objectives import composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published recipe; fields as in `recipe.Config`.

  w_i = n rho_i^alpha / sum_j rho_j^alpha over the group, rho the proximal over
  the behaviour policy and alpha the largest in [0, 1] with ESS >= .85 n.
  """

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'group'
  correction: str = 'tempered'
  clip_region: str = 'behaviour'
  aggregation: str = 'seq_mean_token_mean'


make = functools.partial(composition.compose, 'tetpo')
