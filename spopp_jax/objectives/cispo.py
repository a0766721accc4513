"""CISPO: clip a weight, let every token learn (arXiv:2506.13585)."""

import dataclasses

from spopp_jax.objectives import base, composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """No lower bound; both bounds relative to 1; see `recipe.Config`."""

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'group'
  surrogate: str = 'likelihood'
  ratio_to: str = 'behaviour'
  clip_low: float = 1.0
  aggregation: str = 'token_mean'


def make(config: Config, *, axis_name: str | None = None) -> base.Objective:
  """Builds CISPO: -sg(clip(r)) A log pi, token mean.

  Args:
    config: the recipe.
    axis_name: as in `composition.compose`.

  Returns:
    The objective.
  """
  return composition.compose('cispo', config, axis_name=axis_name)
