"""Measures what this project costs; the report is Markdown on stdout.

  python experiments/benchmark.py kernels
  python experiments/benchmark.py control_plane
  python experiments/benchmark.py sampler
  python experiments/benchmark.py learner

`python experiments/benchmark.py --help` lists what can be measured.
"""

import argparse
import sys

import benchmark_control_plane
import benchmark_kernels
import benchmark_learner
import benchmark_report
import benchmark_sampler
import benchmark_worker

# Sub-command -> module with a docstring, add_arguments(parser) and
# run(arguments) -> report.
COMMANDS = {
  'kernels': benchmark_kernels,
  'control_plane': benchmark_control_plane,
  'sampler': benchmark_sampler,
  'learner': benchmark_learner,
}


def main(argv: list[str]) -> None:
  """Measures what the command line names and prints the report."""
  arguments = _parser().parse_args(argv[1:])
  try:
    print(COMMANDS[arguments.command].run(arguments))
  except (
    benchmark_report.Disagreement,
    benchmark_worker.WorkerError,
  ) as error:
    sys.exit(f'benchmark.py: error: {error}')


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='benchmark.py', description='Measures what this project costs.'
  )
  commands = parser.add_subparsers(
    dest='command', required=True, metavar='COMMAND'
  )
  for name, module in COMMANDS.items():
    first, _, _ = module.__doc__.partition('\n')
    command = commands.add_parser(
      name,
      help=first,
      description=module.__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(command)
  return parser


if __name__ == '__main__':
  main(sys.argv)
