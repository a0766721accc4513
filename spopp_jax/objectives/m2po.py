"""M2PO: a bound on the second moment of the log-ratio (arXiv:2510.01161)."""

import dataclasses

from spopp_jax.objectives import base, composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published recipe, no ratio clip; fields as in `recipe.Config`."""

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'group'
  token_mask: str = 'second_moment'
  surrogate: str = 'unclipped'
  ratio_to: str = 'behaviour'
  aggregation: str = 'token_mean'


def make(config: Config, *, axis_name: str | None = None) -> base.Objective:
  """Builds M2PO: mask the largest squared log-ratios down to a mean of .04.

  Args:
    config: the recipe.
    axis_name: as in `composition.compose`.

  Returns:
    The objective.
  """
  return composition.compose('m2po', config, axis_name=axis_name)
