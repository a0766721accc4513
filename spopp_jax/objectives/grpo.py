"""GRPO: group-relative advantages and PPO clip (arXiv:2402.03300)."""

import dataclasses

from spopp_jax.objectives import base, composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """GRPO without its KL term; fields as in `recipe.Config`."""

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'group'
  ratio_to: str = 'behaviour'
  aggregation: str = 'seq_mean_token_mean'


def make(config: Config, *, axis_name: str | None = None) -> base.Objective:
  """Builds GRPO: (R - mean) / std of the group, clip against the sampler.

  Args:
    config: the recipe.
    axis_name: as in `composition.compose`.

  Returns:
    The objective.
  """
  return composition.compose('grpo', config, axis_name=axis_name)
