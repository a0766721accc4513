"""Serves rollouts of one policy and one task suite over gRPC.

  python experiments/serve_sampler.py --config=configs/quickstart.py \
      --policy=runs/quickstart/policy --address=127.0.0.1:50051

then, with the same settings of `environment` and `sampler`,

  python experiments/train.py --config=configs/quickstart.py \
      --config.cold_start.policy=runs/quickstart/policy \
      --config.sampler.addresses="('127.0.0.1:50051',)"

It serves one run at a time, one after another. The policy directory gives
sizes and tokenizer; parameters come from the runner. One JSON line on standard
output says when and where it listens.
"""

import logging
import pathlib
import sys

from absl import flags

from spopp_jax import envs
from spopp_jax.models import policy_files
from spopp_jax.runner import compilation, config, sampling
from spopp_jax.sampler import errors, lifeline


def main(argv: list[str]) -> None:
  """Serves until SIGTERM, SIGINT or the end of the process that started it."""
  own = flags.FlagValues()
  flags.DEFINE_string(
    'policy', None, 'Policy directory to serve.', flag_values=own
  )
  flags.DEFINE_string(
    'address',
    '127.0.0.1:0',
    'Loopback host:port (port 0 is any free one) or unix:path.',
    flag_values=own,
  )
  settings = config.parse_command_line(argv, own)
  logging.basicConfig(
    level=logging.INFO,
    format='%(asctime)s %(levelname)s %(name)s: %(message)s',
  )
  if not own.policy:
    sys.exit('serve_sampler.py: error: --policy=DIRECTORY is needed')
  compilation.configure(
    pathlib.Path(settings.run.directory) / '.compilation_cache'
  )
  try:
    server = sampling.serve(
      settings,
      policy_files.load(own.policy),
      envs.load_tasks(settings.environment),
      own.address,
    )
  except (ValueError, errors.SamplerError) as error:
    sys.exit(f'serve_sampler.py: error: {error}')
  lifeline.run(server)


if __name__ == '__main__':
  main(sys.argv)
