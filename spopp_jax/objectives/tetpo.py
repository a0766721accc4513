"""TETPO: weights tempered to a target effective sample size per group."""

import dataclasses

from spopp_jax.objectives import base, composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published recipe; fields as in `recipe.Config`."""

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'group'
  correction: str = 'tempered'
  clip_region: str = 'behaviour'
  aggregation: str = 'seq_mean_token_mean'


def make(config: Config, *, axis_name: str | None = None) -> base.Objective:
  """Builds TETPO: weights rho^alpha, alpha the largest with ESS >= .85 n.

  Args:
    config: the recipe.
    axis_name: as in `composition.compose`.

  Returns:
    The objective.
  """
  return composition.compose('tetpo', config, axis_name=axis_name)
