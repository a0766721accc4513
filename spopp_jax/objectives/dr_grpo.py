"""Dr. GRPO: GRPO without its length and scale biases (arXiv:2503.20783)."""

import dataclasses

from spopp_jax.objectives import base, composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published recipe, up to 3,000 tokens; fields as in `recipe.Config`."""

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'none'
  ratio_to: str = 'behaviour'
  aggregation: str = 'seq_mean_token_sum_norm'
  aggregation_norm: float = 3000.0


def make(config: Config, *, axis_name: str | None = None) -> base.Objective:
  """Builds Dr. GRPO: R - group mean, token sums over a constant.

  Args:
    config: the recipe.
    axis_name: as in `composition.compose`.

  Returns:
    The objective.
  """
  return composition.compose('dr_grpo', config, axis_name=axis_name)
