"""CISPO: clip a weight, let every token learn (arXiv:2506.13585)."""

import dataclasses
import functools

from spopp_jax.objectives import composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """No lower bound; both bounds relative to 1; see `recipe.Config`.

  loss = -sg(clip(r)) A log pi, token mean.
  """

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'group'
  surrogate: str = 'likelihood'
  ratio_to: str = 'behaviour'
  clip_low: float = 1.0
  aggregation: str = 'token_mean'


make = functools.partial(composition.compose, 'cispo')
