"""GRPO: group-relative advantages and PPO clip (arXiv:2402.03300)."""

import dataclasses
import functools

from spopp_jax.objectives import composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """GRPO without its KL term; fields as in `recipe.Config`.

  A = (R - mean) / (std + 1e-6) of the group, clip against the sampler.
  """

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'group'
  ratio_to: str = 'behaviour'
  aggregation: str = 'seq_mean_token_mean'


make = functools.partial(composition.compose, 'grpo')
