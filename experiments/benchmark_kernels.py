"""The kernels beside plain torch and numpy/scipy versions of the same work.

First table: kernels and whole objectives, all versions in turn on the same
input. Second table: the share of an objective's kernels in a learner step of
the quickstart model.
"""

import argparse
import functools
import os
import types as python_types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import benchmark_numpy
import benchmark_objective_share
import benchmark_report as report
import jax
import jax.numpy as jnp
import numpy as np
import option_types

from spopp_jax import objectives, types
from spopp_jax.kernels import segments, standardize, target_ess
from spopp_jax.objectives import base

TRAJECTORIES = 1_000_000
# Packed tokens a trajectory, from and to.
TOKENS_EACH = (8, 16)
ROW_LENGTH = 2048
GROUPS = 65_536
ROWS = 64
GROUP_SIZE = benchmark_numpy.GROUP_SIZE
ROOT_FINDER_TARGET = 50.0

# Version -> module with the same functions as `benchmark_numpy`.
Libraries = Mapping[str, python_types.ModuleType]


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the options of this sub-command."""
  parser.add_argument(
    '--repeats',
    type=option_types.positive_int,
    default=15,
    help='rounds in which every version runs once (default: 15)',
  )
  parser.add_argument(
    '--scale',
    type=option_types.share,
    default=1.0,
    help='factor in (0, 1] on all sizes, to try it out (default: 1)',
  )


def run(arguments: argparse.Namespace) -> str:
  """Returns the report of this sub-command.

  Raises:
    Disagreement: a version gives other results than ours.
  """
  scale, repeats = arguments.scale, arguments.repeats
  plain = libraries()
  machine = _machine(plain, repeats)
  rows = [report.compare(c, repeats) for c in comparisons(scale, plain)]
  parts = [
    machine,
    report.table(report.HEADER, rows),
    'All kernels of an objective (advantages, weights, loss with gradient and '
    'metrics, diagnostics) and a learner step, at the sizes of '
    'configs/quickstart.py:',
    report.table(
      benchmark_objective_share.HEADER,
      benchmark_objective_share.shares(scale, repeats),
    ),
  ]
  return '\n\n'.join(parts)


def libraries() -> dict[str, python_types.ModuleType]:
  """Returns what there is to compare with; torch only if it is installed."""
  found = {report.HOST: benchmark_numpy}
  try:
    import benchmark_torch
  except ModuleNotFoundError as error:
    if error.name != 'torch':
      raise
    return found
  return {report.TORCH: benchmark_torch, **found}


def comparisons(scale: float, plain: Libraries) -> Iterator[report.Comparison]:
  """Yields the work of the first table.

  Args:
    scale: factor on all sizes.
    plain: as from `libraries`.
  """
  rng = np.random.default_rng(0)
  yield from _standardization(scale, plain, rng)
  yield _tempering(scale, plain, rng)
  inputs = packed_batch(max(2, round(ROWS * scale)), rng)
  for name in benchmark_numpy.OBJECTIVES:
    yield _objective(name, plain, inputs)


def packed_batch(
  num_rows: int, rng: np.random.Generator
) -> tuple[types.PackedBatch, np.ndarray, np.ndarray]:
  """Returns eight trajectories a row, proximal and current log-probs.

  Prompt groups lie scattered over the rows. Clips, truncation, tempering and
  M2PO's mask all have something to do.
  """
  shape, number = (num_rows, ROW_LENGTH), num_rows * GROUP_SIZE
  lengths = rng.integers(ROW_LENGTH // 16, ROW_LENGTH // 8, number)
  ids, positions = _layout(lengths, num_rows)
  action_mask = (positions > 0) & (rng.random(shape) < 0.5)

  def draw(scale):
    values = rng.normal(0, scale, shape).astype(np.float32)
    return np.where(action_mask, values, 0)

  behaviour = draw(0.5) - 2 * action_mask.astype(np.float32)
  proximal = behaviour + draw(0.3)
  batch = types.PackedBatch(
    tokens=np.zeros(shape, np.int32),  # for the model, as segment_ids
    positions=positions,
    segment_ids=np.ones(shape, np.int32),
    trajectory_ids=ids,
    action_mask=action_mask,
    behaviour_logprobs=behaviour,
    kept_ids=np.zeros((*shape, 0), np.int32),
    rewards=(rng.random(number) < 0.5).astype(np.float32),
    values=rng.random(number).astype(np.float32),
    usable=np.ones(number, bool),
    group_ids=rng.permutation(number).astype(np.int32) // GROUP_SIZE,
  )
  return batch, proximal, proximal + draw(0.3)


def value_and_gradient(objective: base.Objective) -> Callable[..., Any]:
  """Returns (batch, proximal, current) -> loss [] and gradient [B, S]."""

  def whole(batch, proximal, current):
    advantages = objective.advantages(batch)
    weights, _ = objective.weights(batch, proximal, advantages)

    def mean(current):
      numerator, count, _ = objective.loss(current, batch, advantages, weights)
      return numerator / count

    return jax.value_and_grad(mean)(current)

  return whole


def _standardization(scale, plain, rng):
  """The standardization, the sums that it needs, and one after the other."""
  number = max(64, round(TRAJECTORIES * scale))
  lengths = rng.integers(*TOKENS_EACH, number, endpoint=True)
  ids, _ = _layout(lengths, -(-lengths.sum() // ROW_LENGTH))
  mask = (rng.random(ids.shape) < 0.6) & (ids < number)
  advantages = rng.normal(size=number).astype(np.float32)
  usable = rng.random(number) < 0.99
  sizes = f'{number:,} trajectories'
  tokens = f'{sizes}, {lengths.sum():,} tokens'

  def counting(library):
    return functools.partial(
      library.trajectory_lengths, num_trajectories=number
    )

  def joined(lengths, standardized):
    return lambda mask, ids, advantages, usable: standardized(
      advantages, lengths(mask, ids), usable
    )

  yield _comparison(
    plain,
    'standardize (Eq. 6)',
    sizes,
    (advantages, lengths.astype(np.float32), usable),
    ours=standardize.standardize,
    theirs=lambda library: library.standardize,
  )
  yield _comparison(
    plain,
    'L_i, the sums over packed tokens',
    tokens,
    (mask, ids),
    ours=counting(segments),
    theirs=counting,
  )
  yield _comparison(
    plain,
    'L_i, then standardize',
    tokens,
    (mask, ids, advantages, usable),
    ours=joined(counting(segments), standardize.standardize),
    theirs=lambda library: joined(counting(library), library.standardize),
  )


def _tempering(scale, plain, rng):
  """Exponents and weights of groups; one in eight has a free slot."""
  shape = (max(64, round(GROUPS * scale)), GROUP_SIZE)
  log_ratios = rng.normal(0, 1.5, shape).astype(np.float32)
  valid = np.ones(shape, bool)
  valid[::8, -1] = False
  sample = min(benchmark_numpy.SAMPLE, len(valid))

  def of_group(log_ratios, valid):
    exponent = target_ess.tempering_exponent(
      log_ratios,
      valid,
      target_ess_fraction=benchmark_numpy.KAPPA,
      iterations=benchmark_numpy.BISECTIONS,
    )
    return exponent, target_ess.tempered_weights(log_ratios, valid, exponent)

  return _comparison(
    plain,
    'target ESS: exponents and weights',
    f'{shape[0]:,} groups of {shape[1]} (scipy: brentq on {sample:,} of them, '
    'scaled up)',
    (log_ratios, valid),
    ours=jax.vmap(of_group),
    theirs=lambda library: library.tempering,
    targets={report.TORCH: 1.0, report.HOST: ROOT_FINDER_TARGET},
    shares={report.HOST: sample / len(valid)},
  )


def _objective(name, plain, inputs):
  batch = inputs[0]
  return _comparison(
    plain,
    f'{name}: loss and gradient',
    f'{list(batch.tokens.shape)} tokens, {batch.usable.size} trajectories',
    inputs,
    ours=value_and_gradient(objectives.make_objective(name, {})),
    theirs=lambda library: functools.partial(library.value_and_gradient, name),
  )


def _comparison(
  plain, what, sizes, inputs, *, ours, theirs, targets=None, shares=None
):
  """One work on one input, which every library holds beforehand."""
  held = jax.tree.map(jnp.asarray, inputs)
  versions = {report.OURS: report.ready(jax.jit(ours), *held)}
  for name, library in plain.items():
    held = jax.tree.map(library.held, inputs)
    versions[name] = functools.partial(theirs(library), *held)
  return report.Comparison(
    what=what,
    sizes=sizes,
    versions=versions,
    targets=targets or {report.TORCH: 1.0},
    shares=shares or {},
  )


def _layout(lengths, num_rows):
  """Trajectory ids and positions [B, S] of trajectories laid end to end."""
  number, total = len(lengths), lengths.sum()
  starts = np.cumsum(lengths) - lengths
  ids = np.full(num_rows * ROW_LENGTH, number, np.int32)
  positions = np.zeros(ids.shape, np.int32)
  ids[:total] = np.repeat(np.arange(number, dtype=np.int32), lengths)
  positions[:total] = np.arange(total) - starts[ids[:total]]
  shape = (num_rows, ROW_LENGTH)
  return ids.reshape(shape), positions.reshape(shape)


def _machine(plain, repeats):
  """What was measured how, in words."""
  cores = os.cpu_count()
  lines = [
    f'jax {jax.__version__} on {jax.default_backend()}, {cores} cores; '
    f'numpy {np.__version__}; medians of {repeats} rounds in which every '
    'version ran once; a ratio is the median of the ratios of a round.'
  ]
  if report.TORCH in plain:
    lines.append(plain[report.TORCH].use_threads(cores))
  else:
    lines.append("torch is not installed: pip install -e '.[benchmark]'")
  return '\n'.join(lines)
