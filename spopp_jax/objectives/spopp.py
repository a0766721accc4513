"""SPO++: event-time baseline and action-token measure (arXiv:2608.24870)."""

import dataclasses

from spopp_jax.objectives import base, composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published SPO++ recipe; fields as in `recipe.Config`."""

  baseline: str = 'event_time'
  measure: str = 'action_token'
  correction: str = 'token'
  clip_high: float = 0.28
  dual_clip: float = 2.0
  aggregation: str = 'token_mean'


def make(config: Config, *, axis_name: str | None = None) -> base.Objective:
  """Builds SPO++: Eq. 3 values, Eq. 6 standardization, dual clip 2.

  Args:
    config: the recipe.
    axis_name: as in `composition.compose`.

  Returns:
    The objective.
  """
  return composition.compose('spopp', config, axis_name=axis_name)
