"""Simulates what waiting for groups costs under long-tailed episodes.

  python experiments/simulate.py --sigma=1.0 --plot=speed.png

The loop, dispatcher, batcher, staleness policies and pool are those of a
training run; services and clock are simulated and the learner is none. A
markdown table goes to standard output: throughput of every policy with single
rollouts and with groups, and how much shorter the trained rollouts are than
the dispatched ones. Durations are lognormal: `--sigma` is the deviation of
their logarithm.
"""

import argparse
import logging
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import option_types

from spopp_jax.runner import collection_speed, simulated_services, simulation

# Label, policy, max_lag, discard_overdue.
POLICIES = (
  ('drain, max_lag 0', 'drain', 0, False),
  ('drain, max_lag 1', 'drain', 1, False),
  ('bounded, max_lag 1', 'bounded', 1, False),
  ('bounded, max_lag 4', 'bounded', 4, False),
  ('bounded, max_lag 4, discards', 'bounded', 4, True),
  ('interruptible, max_lag 4', 'interruptible', 4, False),
  ('interruptible, max_lag 4, discards', 'interruptible', 4, True),
)


class Row(NamedTuple):
  """One line of the table."""

  label: str
  group_size: int
  over: float
  speed: collection_speed.Speed


def main(arguments: list[str] | None = None) -> None:
  """Prints the tables and draws the plot."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  count, above, from_0 = (
    {'type': kind}
    for kind in (
      option_types.positive_int,
      option_types.positive_float,
      option_types.not_negative_float,
    )
  )
  for name, kind, default, words in (
    ('sigma', from_0, 1.0, 'of log durations'),
    ('median_s', above, 10.0, 's an episode'),
    ('batch', count, 48, 'rollouts a step'),
    ('group', count, 8, 'rollouts a group'),
    ('update_s', from_0, 5.0, 's an update'),
    ('steps', count, 40, 'learner steps'),
    ('seeds', count, 3, 'runs averaged'),
  ):
    add(f'--{name}', default=default, help=f'{words} (%(default)s)', **kind)
  add('--plot', metavar='PNG', help='draws length bias over over-dispatch')
  given = parser.parse_args(arguments)
  if given.batch % given.group:
    parser.error(f'--group {given.group} must divide --batch {given.batch}')
  logging.getLogger('spopp_jax').setLevel(logging.ERROR)
  rows = list(measure(given))
  print(table(rows))
  print()
  print(first_batches())
  if given.plot:
    draw(given.plot, rows)


def measure(given: argparse.Namespace) -> Iterator[Row]:
  """Yields every line."""
  for label, policy, max_lag, discards in POLICIES:
    for group_size in (given.group, 1):
      for over in (1.0, 1.5, 2.0, 4.0):
        in_flight = int(given.batch * over) // group_size * group_size
        setting = simulation.Setting(
          staleness=policy,
          max_lag=max_lag,
          discard_overdue=discards,
          batch_size=given.batch,
          in_flight=in_flight,
          group_size=group_size,
          num_tasks=4 * in_flight,
          steps=given.steps,
          update_s=given.update_s,
          site=simulated_services.Site(
            services=-(-in_flight // 4),
            durations=simulated_services.lognormal(given.median_s, given.sigma),
            request_timeout_s=1e6,
          ),
        )
        speed = collection_speed.measure(setting, range(given.seeds))
        yield Row(label, group_size, over, speed)


def table(rows: list[Row]) -> str:
  """Returns the lines as markdown; speed-up over groups, synchronous."""
  start = rows[0].speed.trajectories_per_s
  lines = [
    '| policy | group | in flight / batch | trajectories/s | steps/s | '
    'speed-up | length bias |',
    '|---|---|---|---|---|---|---|',
  ]
  for label, group_size, over, speed in rows:
    lines.append(
      f'| {label} | {group_size} | {over:g} | {speed.trajectories_per_s:.2f} | '
      f'{speed.steps_per_s:.3f} | {speed.trajectories_per_s / start:.2f}x | '
      f'{speed.length_bias:+.1%} |'
    )
  return '\n'.join(lines)


def first_batches() -> str:
  """Returns how much later the first batch of groups is there, as markdown."""
  lines = [
    'Time to a first batch of 24: groups of 8 over the first to finish.',
    '',
    '| sigma | 3 of 3 groups, 24 of 48 alone | 3 of 6 groups, 24 of 48 alone |',
    '|---|---|---|',
  ]
  rng = np.random.default_rng(0)
  for sigma in (0.25, 0.5, 0.75, 1.0, 1.5):
    draws = rng.lognormal(0, sigma, (10_000, 48))
    free = np.sort(draws, axis=1)[:, 23].mean()
    same = collection_speed.first_batch_ratio(
      draws, batch_size=24, group_size=8
    )
    lines.append(
      f'| {sigma} | {draws[:, :24].max(axis=1).mean() / free:.2f}x | '
      f'{same:.2f}x |'
    )
  return '\n'.join(lines)


def draw(path: str, rows: list[Row]) -> None:
  """Draws the length bias of single rollouts over over-dispatch."""
  import matplotlib.figure

  figure = matplotlib.figure.Figure(figsize=(10, 4.5), layout='constrained')
  speed, bias = figure.subplots(1, 2)
  for label, *_ in POLICIES:
    mine = [row for row in rows if row.label == label and row.group_size == 1]
    over = [row.over for row in mine]
    speed.plot(over, [r.speed.trajectories_per_s for r in mine], marker='o')
    bias.plot(
      over, [r.speed.length_bias for r in mine], marker='o', label=label
    )
  for axes, name in ((speed, 'trajectories/s'), (bias, 'length bias')):
    axes.set_xlabel('in flight / batch')
    axes.set_ylabel(name)
  figure.legend(loc='outside lower center', ncols=4, fontsize='small')
  figure.savefig(path, dpi=120)


if __name__ == '__main__':
  main()
