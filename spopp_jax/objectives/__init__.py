"""Policy objectives: one file a method, each a composition of kernels.

A method is a module with a `Config` and `make(config, *, axis_name)`; naming
it in `_METHODS` is all it takes to select it from a config.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence

from spopp_jax.objectives import (
  base,
  cispo,
  dapo,
  dr_grpo,
  gepo,
  grpo,
  gspo,
  m2po,
  recipe,
  reinforce_pp_baseline,
  rloo,
  spo,
  spopp,
  tetpo,
)

_METHODS = {
  'cispo': cispo,
  'dapo': dapo,
  'dr_grpo': dr_grpo,
  'gepo': gepo,
  'grpo': grpo,
  'gspo': gspo,
  'm2po': m2po,
  'reinforce_pp_baseline': reinforce_pp_baseline,
  'rloo': rloo,
  'spo': spo,
  'spopp': spopp,
  'tetpo': tetpo,
}


def objective_names() -> tuple[str, ...]:
  """Returns the names that `make_objective` knows, sorted."""
  return tuple(sorted(_METHODS))


def config_of(name: str, overrides: Mapping[str, object]) -> recipe.Config:
  """Returns a method's recipe with some fields changed.

  Args:
    name: one of `objective_names()`.
    overrides: field of the method's Config -> value; absent fields keep the
      published recipe.

  Raises:
    ValueError: unknown name or field (the nearest valid one is named), or a
      value or combination that the Config refuses.
  """
  if name not in _METHODS:
    raise ValueError(_unknown('objective', name, objective_names()))
  config = _METHODS[name].Config
  fields = [field.name for field in dataclasses.fields(config)]
  for field in overrides:
    if field not in fields:
      raise ValueError(_unknown(f'field of objective {name}', field, fields))
  return config(**overrides)


def make_objective(
  name: str,
  overrides: Mapping[str, object],
  *,
  axis_name: str | None = None,
) -> base.Objective:
  """Builds an objective from its name and the fields that differ.

  Args:
    name: one of `objective_names()`.
    overrides: as in `config_of`.
    axis_name: mapped axis the trajectories are spread over; None under jit.

  Returns:
    The objective.

  Raises:
    ValueError: as in `config_of`.
  """
  config = config_of(name, overrides)
  return _METHODS[name].make(config, axis_name=axis_name)


def _unknown(kind: str, given: str, allowed: Sequence[str]) -> str:
  nearest = difflib.get_close_matches(given, allowed, n=1)
  hint = f'did you mean {nearest[0]!r}? ' if nearest else ''
  return f'unknown {kind} {given!r}: {hint}allowed: {", ".join(allowed)}'
