"""REINFORCE++-baseline: group mean, then token whitening (arXiv:2501.03262)."""

import dataclasses
import functools

from spopp_jax.objectives import composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published recipe without KL; fields as in `recipe.Config`.

  A = R - group mean, whitened over tokens.
  """

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'action_token'
  ratio_to: str = 'behaviour'
  aggregation: str = 'token_mean'


make = functools.partial(composition.compose, 'reinforce_pp_baseline')
