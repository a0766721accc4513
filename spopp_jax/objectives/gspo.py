"""GSPO: the clipped ratio is the trajectory's (arXiv:2507.18071)."""

import dataclasses

from spopp_jax.objectives import base, composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published recipe; fields as in `recipe.Config`."""

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'group'
  ratio: str = 'sequence_mean'
  ratio_to: str = 'behaviour'
  clip_low: float = 3e-4
  clip_high: float = 4e-4
  aggregation: str = 'seq_mean_token_mean'


def make(config: Config, *, axis_name: str | None = None) -> base.Objective:
  """Builds GSPO: s = exp(mean log-ratio), clip 3e-4/4e-4.

  Args:
    config: the recipe.
    axis_name: as in `composition.compose`.

  Returns:
    The objective.
  """
  return composition.compose('gspo', config, axis_name=axis_name)
