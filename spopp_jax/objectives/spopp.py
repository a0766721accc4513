"""SPO++: event-time baseline and action-token measure (arXiv:2608.24870)."""

import dataclasses

from spopp_jax.objectives import base, single_stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(single_stream.Config):
  """The published SPO++ recipe; fields as in `single_stream.Config`."""

  measure: str = 'action_token'
  baseline: str = 'event_time'
  dual_clip: float = 2.0


def make(config: Config, *, axis_name: str | None = None) -> base.Objective:
  """Builds SPO++: Eq. 3 values, Eq. 6 standardization, dual clip 2.

  Args:
    config: the recipe.
    axis_name: as in `single_stream.compose`.

  Returns:
    The objective.
  """
  return single_stream.compose('spopp', config, axis_name=axis_name)
