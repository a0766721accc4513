"""SPO: receipt-order baseline and trajectory measure (arXiv:2509.13232)."""

import dataclasses

from spopp_jax.objectives import base, single_stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(single_stream.Config):
  """The published SPO recipe; fields as in `single_stream.Config`."""

  measure: str = 'trajectory'
  baseline: str = 'receipt_order'
  dual_clip: float = 10.0


def make(config: Config, *, axis_name: str | None = None) -> base.Objective:
  """Builds SPO: Eq. 2 values, Eq. 4 standardization, dual clip 10.

  Args:
    config: the recipe.
    axis_name: as in `single_stream.compose`.

  Returns:
    The objective.
  """
  return single_stream.compose('spo', config, axis_name=axis_name)
