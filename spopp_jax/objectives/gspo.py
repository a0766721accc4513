"""GSPO: the clipped ratio is the trajectory's (arXiv:2507.18071)."""

import dataclasses
import functools

from spopp_jax.objectives import composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published recipe; fields as in `recipe.Config`.

  s_i = exp(mean log-ratio), clip 3e-4/4e-4.
  """

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'group'
  ratio: str = 'sequence_mean'
  ratio_to: str = 'behaviour'
  clip_low: float = 3e-4
  clip_high: float = 4e-4
  aggregation: str = 'seq_mean_token_mean'


make = functools.partial(composition.compose, 'gspo')
