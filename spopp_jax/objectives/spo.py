"""SPO: receipt-order baseline and trajectory measure (arXiv:2509.13232)."""

import dataclasses

from spopp_jax.objectives import base, composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published SPO recipe; fields as in `recipe.Config`."""

  baseline: str = 'receipt_order'
  measure: str = 'trajectory'
  correction: str = 'token'
  clip_high: float = 0.28
  dual_clip: float = 10.0
  aggregation: str = 'token_mean'


def make(config: Config, *, axis_name: str | None = None) -> base.Objective:
  """Builds SPO: Eq. 2 values, Eq. 4 standardization, dual clip 10.

  Args:
    config: the recipe.
    axis_name: as in `composition.compose`.

  Returns:
    The objective.
  """
  return composition.compose('spo', config, axis_name=axis_name)
