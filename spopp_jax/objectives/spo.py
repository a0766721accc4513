"""SPO: receipt-order baseline and trajectory measure (arXiv:2509.13232)."""

import dataclasses
import functools

from spopp_jax.objectives import composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published SPO recipe; fields as in `recipe.Config`.

  Eq. 2 values, Eq. 4 standardization, dual clip 10.
  """

  baseline: str = 'receipt_order'
  measure: str = 'trajectory'
  correction: str = 'token'
  clip_high: float = 0.28
  dual_clip: float = 10.0
  aggregation: str = 'token_mean'


make = functools.partial(composition.compose, 'spo')
