"""Dr. GRPO: GRPO without its length and scale biases (arXiv:2503.20783)."""

import dataclasses
import functools

from spopp_jax.objectives import composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published recipe, up to 3,000 tokens; fields as in `recipe.Config`.

  A = R - group mean, token sums over a constant.
  """

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'none'
  ratio_to: str = 'behaviour'
  aggregation: str = 'seq_mean_token_sum_norm'
  aggregation_norm: float = 3000.0


make = functools.partial(composition.compose, 'dr_grpo')
