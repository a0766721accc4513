"""RLOO: REINFORCE with a leave-one-out baseline (arXiv:2402.14740)."""

import dataclasses

from spopp_jax.objectives import base, composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """REINFORCE on token ratios, without KL; fields as in `recipe.Config`."""

  group_size: int = 8
  baseline: str = 'leave_one_out'
  measure: str = 'none'
  surrogate: str = 'unclipped'
  ratio_to: str = 'behaviour'
  aggregation: str = 'seq_mean_token_sum'


def make(config: Config, *, axis_name: str | None = None) -> base.Objective:
  """Builds RLOO: (R - mean) n / (n - 1), no clip, sums over tokens.

  Args:
    config: the recipe.
    axis_name: as in `composition.compose`.

  Returns:
    The objective.
  """
  return composition.compose('rloo', config, axis_name=axis_name)
