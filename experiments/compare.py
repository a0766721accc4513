"""Compares methods in matched replicates: table, plot and curves.

  python experiments/compare.py --config=configs/household_compare.py

Within a replicate (one seed) every method has the same starting policy,
prompts, offline values, sampler settings and budget; only the objective
differs. Results go to runs/<run.name>/: comparison.png, comparison.md and
curves.json, beside the directories of the single runs.
"""

import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_collections
import numpy as np
import train  # the script beside this one: it also writes each run's report
from absl import flags

from spopp_jax.evaluation import curves, paired, plots
from spopp_jax.runner import compilation, config, experiment, metrics

# Method -> what it changes in the block `objective`.
METHODS: Mapping[str, Mapping[str, str]] = {
  'SPO': {'name': 'spo'},
  'SPO++': {'name': 'spopp'},
  'SPO++, trajectory measure': {'name': 'spopp', 'measure': 'trajectory'},
}
PAIRS = (
  ('SPO++', 'SPO'),
  ('SPO++, trajectory measure', 'SPO'),
  ('SPO++', 'SPO++, trajectory measure'),
)
STATISTICS: Mapping[str, Callable[[np.ndarray], float]] = {
  'area': curves.area,
  'final five': curves.final_five,
}
# Method -> seed -> curve [T] of rewards.
Curves = dict[str, dict[int, np.ndarray]]


def main(argv: list[str]) -> None:
  """Runs every method with every seed and reports."""
  own = flags.FlagValues()
  flags.DEFINE_list(
    'seeds', ['0', '1', '2'], 'Seeds of the replicates.', flag_values=own
  )
  base = config.parse_command_line(argv, own)
  try:
    seeds = [int(seed) for seed in own.seeds]
  except ValueError:
    sys.exit(f'compare.py: error: --seeds ({own.seeds}) must be whole numbers')
  directory = pathlib.Path(base.run.directory) / base.run.name
  compilation.configure(pathlib.Path(base.run.directory) / '.compilation_cache')
  unbiased: Curves = {method: {} for method in METHODS}
  success: dict[str, dict[int, float]] = {method: {} for method in METHODS}
  try:
    for seed in seeds:
      for method, summary, rewards in replicate(base, directory, seed):
        unbiased[method][seed] = rewards
        success[method][seed] = summary['success_after']
  except experiment.EXPECTED_ERRORS as error:
    sys.exit(f'compare.py: error: {error}')
  table = render_table(unbiased, success)
  (directory / 'comparison.md').write_text(table, encoding='utf-8')
  plots.comparison(
    directory / 'comparison.png',
    {method: list(runs.values()) for method, runs in unbiased.items()},
  )
  write_curves(directory / 'curves.json', unbiased, success)
  print(f'{table}\nsee {directory}')


def replicate(
  base: ml_collections.ConfigDict, directory: pathlib.Path, seed: int
) -> Iterator[tuple[str, dict[str, float], np.ndarray]]:
  """Yields (method, summary, unbiased curve) of one seed's matched runs."""
  start: pathlib.Path | None = None
  for method in METHODS:
    settings = matched(base, directory, seed, method, start=start)
    print(f'seed {seed}, {method}', flush=True)
    result = experiment.run(settings)
    start = start or result.directory
    records = metrics.read_metrics(result.directory)
    rewards = np.array([record['reward_dispatched'] for record in records])
    yield method, train.report(result), rewards


def matched(
  base: ml_collections.ConfigDict,
  directory: pathlib.Path,
  seed: int,
  method: str,
  *,
  start: pathlib.Path | None,
) -> ml_collections.ConfigDict:
  """Returns the settings of one run.

  Args:
    base: what all runs share.
    directory: gets a directory a seed.
    seed: of the replicate.
    method: a key of METHODS.
    start: the replicate's first run, whose starting policy and offline values
      the others use; None for the first run itself.
  """
  settings = base.copy_and_resolve_references()
  settings.seed = seed
  settings.run.directory = str(pathlib.Path(directory) / f'seed_{seed}')
  settings.run.name = method.replace(',', '').replace(' ', '_')
  settings.objective.update(METHODS[method])
  if start is not None:
    settings.cold_start.policy = str(start / 'policy')
    settings.offline.path = str(start / 'offline.json')
  config.validate_config(settings)
  return settings


def render_table(
  rewards: Curves, success: Mapping[str, Mapping[int, float]]
) -> str:
  """Returns the Markdown tables: levels, then paired differences in points."""
  count = len(next(iter(rewards.values())))
  lines = [
    f'Reward of everything dispatched; mean +- sample sd of {count} replicates',
    '',
    '| method | area | final five | success over all tasks |',
    '|---|---|---|---|',
  ]
  for method, runs in rewards.items():
    cells = [
      _spread([statistic(run) for run in runs.values()])
      for statistic in STATISTICS.values()
    ]
    cells.append(_spread(list(success[method].values())))
    lines.append(f'| {method} | {" | ".join(cells)} |')
  lines += [
    '',
    'Paired differences in percentage points (replicates in favour)',
    '',
    '| pair | area | final five | success over all tasks |',
    '|---|---|---|---|',
  ]
  for first, second in PAIRS:
    cells = [
      _points(
        paired.paired_difference(
          rewards[first], rewards[second], statistic
        ).differences
      )
      for statistic in STATISTICS.values()
    ]
    cells.append(
      _points(
        [
          success[first][seed] - success[second][seed]
          for seed in success[first]
        ]
      )
    )
    lines.append(f'| {first} - {second} | {" | ".join(cells)} |')
  return '\n'.join(lines) + '\n'


def write_curves(
  path: pathlib.Path,
  rewards: Curves,
  success: Mapping[str, Mapping[int, float]],
) -> None:
  """Writes what the table was computed from."""
  content = {
    method: {
      str(seed): {
        'reward_dispatched': curve.tolist(),
        'success_after': success[method][seed],
      }
      for seed, curve in runs.items()
    }
    for method, runs in rewards.items()
  }
  path.write_text(json.dumps(content) + '\n')


def _spread(values: Sequence[float]) -> str:
  if len(values) < 2:
    return f'{np.mean(values):.3f}'
  return f'{np.mean(values):.3f} +- {np.std(values, ddof=1):.3f}'


def _points(differences: Sequence[float]) -> str:
  points = 100 * np.asarray(differences)
  wins = int((points > 0).sum())
  spread = f' +- {points.std(ddof=1):.1f}' if points.size > 1 else ''
  return f'{points.mean():+.1f}{spread} ({wins}/{points.size})'


if __name__ == '__main__':
  main(sys.argv)
