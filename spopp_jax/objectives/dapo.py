"""DAPO: clip-higher, token mean, varied groups alone (arXiv:2503.14476)."""

import dataclasses
import functools

from spopp_jax.objectives import composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published recipe, lengths in tokens; fields as in `recipe.Config`.

  GRPO advantages, clip .2/.28, overlong penalty, token mean.
  """

  group_size: int = 8
  baseline: str = 'group_mean'
  measure: str = 'group'
  drop_equal_groups: bool = True
  overlong_limit: float = 20480.0
  overlong_buffer: float = 4096.0
  ratio_to: str = 'behaviour'
  clip_high: float = 0.28
  aggregation: str = 'token_mean'


make = functools.partial(composition.compose, 'dapo')
