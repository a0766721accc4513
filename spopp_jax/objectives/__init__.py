"""Policy objectives: one file a method, each a composition of kernels.

Every method is a `recipe.Config`, read in this order: baseline / measure;
correction or mask; surrogate and its ratio; aggregation. The file of a method
is its name; README has the same as a table.

  spopp    SPO++ Eq. 3 and 6, section 2.4 (arXiv:2608.24870)
           event_time / action_token; token weight up to 2; clip .2/.28 with
           dual clip 2 on current/proximal; token_mean
  spo      Eq. 2 and 4 there; SPO (arXiv:2509.13232)
           receipt_order / trajectory; token weight up to 2; clip .2/.28 with
           dual clip 10 on current/proximal; token_mean
  tetpo    TETPO: w = rho^alpha, ESS(alpha) >= .85 n
           group_mean / group; tempered per group; clip .2 on current/proximal,
           judged on current/behaviour; seq_mean_token_mean
  grpo     A = (R - mean) / std (arXiv:2402.03300)
           group_mean / group; clip .2 on current/behaviour;
           seq_mean_token_mean
  dr_grpo  A = R - mean (arXiv:2503.20783)
           group_mean / none; clip .2 on current/behaviour;
           seq_mean_token_sum_norm
  rloo     A = (R - mean) n / (n - 1) (arXiv:2402.14740)
           leave_one_out / none; unclipped current/behaviour;
           seq_mean_token_sum
  dapo     GRPO's A, overlong penalty, varied groups (arXiv:2503.14476)
           group_mean / group; clip .2/.28 on current/behaviour; token_mean
  gspo     s = exp(mean log-ratio) (arXiv:2507.18071)
           group_mean / group; clip 3e-4/4e-4 on sequence_mean of
           current/behaviour; seq_mean_token_mean
  cispo    -sg(clip(r)) A log pi (arXiv:2506.13585)
           group_mean / group; likelihood, current/behaviour up to 1.2;
           token_mean
  reinforce_pp_baseline
           R - mean, whitened over tokens (arXiv:2501.03262)
           group_mean / action_token; clip .2 on current/behaviour; token_mean
  m2po     mean of (log r)^2 <= .04 (arXiv:2510.01161)
           group_mean / group; second_moment mask; unclipped
           current/behaviour; token_mean
  gepo     w = p / E_q[q] (arXiv:2508.17850)
           group_mean / none; clip .2 on sequence_mean of
           current/group_expectation; seq_mean_token_mean

A module of this package with a `Config` and `make(config, *, axis_name)` is a
method; its file name selects it from a config.
"""

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from types import ModuleType

from spopp_jax.objectives import base, recipe


def _methods() -> dict[str, ModuleType]:
  modules = {
    found.name: importlib.import_module(f'{__name__}.{found.name}')
    for found in pkgutil.iter_modules(__path__)
  }
  return {name: m for name, m in modules.items() if hasattr(m, 'make')}


def objective_names() -> tuple[str, ...]:
  """Returns the names that `make_objective` knows, sorted."""
  return tuple(sorted(_methods()))


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
  config = _method(name).Config
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
  return _method(name).make(config, axis_name=axis_name)


def _method(name: str) -> ModuleType:
  methods = _methods()
  if name not in methods:
    raise ValueError(_unknown('objective', name, sorted(methods)))
  return methods[name]


def _unknown(kind: str, given: str, allowed: Sequence[str]) -> str:
  nearest = difflib.get_close_matches(given, allowed, n=1)
  hint = f'did you mean {nearest[0]!r}? ' if nearest else ''
  return f'unknown {kind} {given!r}: {hint}allowed: {", ".join(allowed)}'
