"""GEPO: ratios against what the group expects (arXiv:2508.17850)."""

import dataclasses

from spopp_jax.objectives import base, composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """Its authors' code, lengths normalised; fields as in `recipe.Config`."""

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'none'
  ratio: str = 'sequence_mean'
  ratio_to: str = 'group_expectation'
  aggregation: str = 'seq_mean_token_mean'


def make(config: Config, *, axis_name: str | None = None) -> base.Objective:
  """Builds GEPO: w = p / E_q[q] of the group, clip .2, R - group mean.

  Args:
    config: the recipe.
    axis_name: as in `composition.compose`.

  Returns:
    The objective.
  """
  return composition.compose('gepo', config, axis_name=axis_name)
