"""Forward and backward of a learner step beside padded torch and tunix.

All take the same policy-gradient loss of the same episodes of household games:

  -sum over trained tokens of advantage x log-probability / their number

Ours packs episodes into rows and makes logits for trained tokens alone; torch
and tunix pad prompts on the left and what follows on the right and make logits
for all that follows, torch as TRL's GRPO trainer does, tunix as its own. (What
tunix packs relies on a kernel that the CPU has not.) Times are printed only if
loss and gradient agree.
"""

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import benchmark_libraries
import benchmark_objective_share
import benchmark_policies as policies
import benchmark_report as report
import jax
import jax.numpy as jnp
import numpy as np

from spopp_jax import types
from spopp_jax.learner import forward, packing
from spopp_jax.models import dense, mesh, parameters
from spopp_jax.runner import config

# Useful tokens a second beside those of ours; what should be and the goal.
TARGETS: Mapping[str, float] = {
  benchmark_libraries.HUGGING_FACE: 1.0,
  benchmark_libraries.TUNIX: 1.0,
}
HEADER = (
  *('sizes', 'useful tokens', 'library', 'tokens with padding', 'ms'),
  *('useful tokens/s', 'ours / library', 'per padded token', 'target'),
)


class Episodes(NamedTuple):
  """Which games are played, and how they are packed.

  Attributes:
    words: what they are.
    overrides: of the quickstart's settings.
    number: episodes at scale 1.
    row_length: S, tokens of a packed row.
  """

  words: str
  overrides: Sequence[str]
  number: int
  row_length: int


# Size of the policy -> the games that it learns from.
GAMES = {
  'tiny': Episodes('small rooms', (), 96, 192),
  'small': Episodes(
    'large rooms',
    ('environment.size=large', 'environment.step_limit=30'),
    32,
    512,
  ),
}


class Padded(NamedTuple):
  """Episodes as other libraries take them.

  Attributes:
    prompts: [N, P] int64; what comes before the first action, padded on the
      left.
    completions: [N, C] int64; the rest, padded on the right.
    weights: [N, C] float32; advantage / number of trained tokens at these.
  """

  prompts: np.ndarray
  completions: np.ndarray
  weights: np.ndarray


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the options of this sub-command."""
  benchmark_libraries.add_arguments(parser, repeats=9, scaled='episodes')


def run(arguments: argparse.Namespace) -> str:
  """Returns the report of this sub-command.

  Raises:
    Disagreement: a library has another loss or gradient than ours.
    WorkerError: tunix's process ended.
  """
  rows, machine = [], ''
  for name, sizes in policies.SIZES.items():
    with benchmark_libraries.loaded(name, sizes, arguments.tunix) as libraries:
      rows += _compared(libraries, arguments)
      machine = libraries.describe(arguments.repeats)
  return '\n\n'.join([machine, report.table(HEADER, rows)])


def trajectories(games: Episodes, scale: float) -> list[types.Trajectory]:
  """Returns episodes of the expert, with rewards of a coin."""
  settings = config.load_config(
    benchmark_objective_share.CONFIG, list(games.overrides)
  )
  _, played = benchmark_objective_share.episodes(
    settings, games.number * scale / settings.dispatch.batch_size
  )
  return played[: max(2, round(games.number * scale))]


def advantages(played: Sequence[types.Trajectory]) -> np.ndarray:
  """Returns [N] float32: rewards less their mean."""
  rewards = np.array([t.reward for t in played], np.float32)
  return rewards - rewards.mean()


def packed(
  played: Sequence[types.Trajectory], row_length: int
) -> types.PackedBatch:
  """Returns one minibatch [B, S] with as few rows as first-fit needs."""
  batch = packing.pack(
    played,
    [0.0] * len(played),
    num_slots=len(played),
    minibatches=1,
    row_length=row_length,
    row_buckets=range(1, len(played) + 1),
  )
  first = {name: getattr(batch, name)[0] for name in mesh.PER_TOKEN}
  return batch._replace(**first)


def padded(played: Sequence[types.Trajectory], unused_id: int) -> Padded:
  """Pads episodes to the longest prompt and the longest rest."""
  starts = [int(np.argmax(t.action_mask)) for t in played]
  prompt_width = max(starts)
  width = max(len(t.tokens) - s for t, s in zip(played, starts, strict=True))
  prompts = np.full((len(played), prompt_width), unused_id)
  completions = np.full((len(played), width), unused_id)
  weights = np.zeros(completions.shape, np.float32)
  trained = sum(t.action_mask.sum() for t in played)
  for i, (t, start) in enumerate(zip(played, starts, strict=True)):
    rest = len(t.tokens) - start
    prompts[i, prompt_width - start :] = t.tokens[:start]
    completions[i, :rest] = t.tokens[start:]
    weights[i, :rest] = t.action_mask[start:] / trained
  return Padded(prompts, completions, weights * advantages(played)[:, None])


def packed_step(
  sizes: dense.DecoderConfig,
  params: Mapping[str, np.ndarray],
  batch: types.PackedBatch,
  advantages: np.ndarray,
) -> Callable[[], Any]:
  """Returns the work of ours: loss, embedding's gradient, gradient's norm."""
  graphdef, _ = parameters.graph(sizes)
  logprobs = functools.partial(
    forward.packed_logprobs, graphdef, forward.Settings()
  )

  def loss(params, batch, advantages):
    mask = batch.action_mask
    # Padding belongs to the trajectory after the last.
    each = jnp.append(advantages, 0)[batch.trajectory_ids]
    total = jnp.where(mask, each * logprobs(params, batch), 0).sum()
    return -total / mask.sum()

  def step(params, batch, advantages):
    value, gradient = jax.value_and_grad(loss)(params, batch, advantages)
    squares = [jnp.square(leaf).sum() for leaf in jax.tree.leaves(gradient)]
    embedding = gradient['model.embed_tokens.weight']
    # The whole gradient, so that all of it is computed.
    return value, embedding, jnp.sqrt(sum(squares)), gradient

  held = jax.tree.map(jnp.asarray, (dict(params), batch, advantages))
  return report.ready(jax.jit(step), *held)


def versions(
  libraries: benchmark_libraries.Libraries,
  played: Sequence[types.Trajectory],
  row_length: int,
) -> dict[str, benchmark_libraries.Version]:
  """Returns the versions of the step; ours first."""
  unused_id = policies.unused_id(libraries.config)
  step = packed_step(
    libraries.config,
    libraries.params,
    packed(played, row_length),
    advantages(played),
  )
  found = {report.OURS: benchmark_libraries.returning(step)}
  wide = padded(played, unused_id)
  if libraries.model is not None:
    module = libraries.transformers
    theirs = module.PaddedStep(libraries.model, *wide, unused_id)
    found[benchmark_libraries.HUGGING_FACE] = benchmark_libraries.returning(
      module.OnFastestThreads(theirs)
    )
  if libraries.tunix is not None:
    ask = libraries.tunix.ask
    ask('hold_episodes', *(x.tolist() for x in wide))
    found[benchmark_libraries.TUNIX] = benchmark_libraries.Version(
      functools.partial(ask, 'learn'), libraries.tunix.result
    )
  return found


def _compared(libraries, arguments):
  """Returns a table row a library."""
  games = GAMES[libraries.name]
  played = trajectories(games, arguments.scale)
  lengths = np.array([len(t.tokens) for t in played])
  sizes = (
    f'{libraries.words()}, {len(played)} episodes of {games.words}: '
    f'{lengths.min()} to {lengths.max()} tokens, mean {lengths.mean():.0f}'
  )
  report.say(sizes)
  compared = versions(libraries, played, games.row_length)
  check(sizes, compared)
  works = {name: version.work for name, version in compared.items()}
  timings = report.timed(works, arguments.repeats, {})
  wide = padded(played, 0)
  outer = dict.fromkeys(compared, wide.prompts.size + wide.completions.size) | {
    report.OURS: packed(played, games.row_length).tokens.size
  }
  rows = []
  for name, timing in timings.items():
    useful = lengths.sum() / timing.milliseconds * 1e3
    per_padded = timing.ratio * outer[report.OURS] / outer[name]
    target = TARGETS.get(name)
    verdict = ''
    if target is not None:
      verdict = f'>= {target:g}: {report.passed(timing.ratio >= target)}'
    rows.append(
      [
        sizes,
        f'{lengths.sum():,}',
        name,
        f'{outer[name]:,}',
        f'{timing.milliseconds:.1f}',
        f'{useful:,.0f}',
        f'{timing.ratio:.2f}',
        f'{per_padded:.2f}',
        verdict,
      ]
    )
  return rows


def check(
  what: str, compared: Mapping[str, benchmark_libraries.Version]
) -> None:
  """Runs all versions once.

  Raises:
    Disagreement: a loss or gradient differs from ours.
  """
  found = {}
  for name, version in compared.items():
    version.work()
    found[name] = version.result()[:3]
  ours = found.pop(report.OURS)
  for name, theirs in found.items():
    error = report.disagreement(ours, theirs)
    if not error <= report.TOLERANCE:
      raise report.Disagreement(
        f'{what}: loss or gradient of {name} differs by {error:.1e}, allowed '
        f'is {report.TOLERANCE:.0e}; no time is worth printing'
      )
