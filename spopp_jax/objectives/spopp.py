"""SPO++: event-time baseline and action-token measure (arXiv:2608.24870)."""

import dataclasses
import functools

from spopp_jax.objectives import composition, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Config):
  """The published SPO++ recipe; fields as in `recipe.Config`.

  Eq. 3 values, Eq. 6 standardization, dual clip 2.
  """

  baseline: str = 'event_time'
  measure: str = 'action_token'
  correction: str = 'token'
  clip_high: float = 0.28
  dual_clip: float = 2.0
  aggregation: str = 'token_mean'


make = functools.partial(composition.compose, 'spopp')
