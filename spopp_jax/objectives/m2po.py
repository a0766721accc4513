"""M2PO: a bound on the second moment of the log-ratio (arXiv:2510.01161)."""

import dataclasses
import functools

from spopp_jax.objectives import composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published recipe, no ratio clip; fields as in `recipe.Config`.

  Mask the largest squared log-ratios down to a mean of .04.
  """

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'group'
  token_mask: str = 'second_moment'
  surrogate: str = 'unclipped'
  ratio_to: str = 'behaviour'
  aggregation: str = 'token_mean'


make = functools.partial(composition.compose, 'm2po')
