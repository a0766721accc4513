"""Policy objectives: one file a method, each a composition of kernels.

A method is a module with a `Config` and `make(config, *, axis_name)`; naming
it in `_METHODS` is all it takes to select it from a config.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence

from spopp_jax.objectives import base, spo, spopp

_METHODS = {'spo': spo, 'spopp': spopp}


def objective_names() -> tuple[str, ...]:
  """Returns the names that `make_objective` knows, sorted."""
  return tuple(sorted(_METHODS))


def make_objective(
  name: str,
  overrides: Mapping[str, object],
  *,
  axis_name: str | None = None,
) -> base.Objective:
  """Builds an objective from its name and the fields that differ.

  Args:
    name: one of `objective_names()`.
    overrides: field of the method's Config -> value; absent fields keep the
      published recipe.
    axis_name: mapped axis the trajectories are spread over; None under jit.

  Returns:
    The objective.

  Raises:
    ValueError: unknown name or field (the nearest valid one is named), or a
      value that the Config refuses.
  """
  if name not in _METHODS:
    raise ValueError(_unknown('objective', name, objective_names()))
  method = _METHODS[name]
  fields = [field.name for field in dataclasses.fields(method.Config)]
  for field in overrides:
    if field not in fields:
      raise ValueError(_unknown(f'field of objective {name}', field, fields))
  return method.make(method.Config(**overrides), axis_name=axis_name)


def _unknown(kind: str, given: str, allowed: Sequence[str]) -> str:
  nearest = difflib.get_close_matches(given, allowed, n=1)
  hint = f'did you mean {nearest[0]!r}? ' if nearest else ''
  return f'unknown {kind} {given!r}: {hint}allowed: {", ".join(allowed)}'
