"""REINFORCE++-baseline: group mean, then token whitening (arXiv:2501.03262)."""

import dataclasses

from spopp_jax.objectives import base, composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published recipe without KL; fields as in `recipe.Config`."""

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'action_token'
  ratio_to: str = 'behaviour'
  aggregation: str = 'token_mean'


def make(config: Config, *, axis_name: str | None = None) -> base.Objective:
  """Builds REINFORCE++-baseline: R - group mean, whitened over tokens.

  Args:
    config: the recipe.
    axis_name: as in `composition.compose`.

  Returns:
    The objective.
  """
  return composition.compose(
    'reinforce_pp_baseline', config, axis_name=axis_name
  )
