"""Serves rollouts of one policy and one task suite over gRPC.

  python experiments/serve_sampler.py --config=configs/quickstart.py \
      --policy=runs/quickstart/policy --address=127.0.0.1:50051

then, with the same settings of `environment` and `sampler`,

  python experiments/train.py --config=configs/quickstart.py \
      --config.cold_start.policy=runs/quickstart/policy \
      --config.sampler.addresses="('127.0.0.1:50051',)"

A service that other machines reach needs --tls_ca, --tls_certificate and
--tls_key. They are the service's own; those of the run are
--config.sampler.tls_ca and so on.

With --engine=vllm:http://127.0.0.1:8000 (or sglang:) the tokens come from such
a server, which must have been started on the same policy directory; README says
with which options.

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
from spopp_jax.runner import compilation, config, serving
from spopp_jax.sampler import credentials, errors, lifeline

_FILES = {
  'tls_ca': 'PEM file of the CA that signed the certificates of the runs that '
  'may connect; a run without one is refused.',
  'tls_certificate': "PEM file of the service's certificate; its "
  'subjectAltName names the host that the runs connect to.',
  'tls_key': 'PEM file of its private key, not encrypted.',
  'token_file': 'File with one line, at least 16 characters, that a run must '
  'know to be served; for example of openssl rand -hex 32.',
}


def main(argv: list[str]) -> None:
  """Serves until SIGTERM, SIGINT or the end of the process that started it."""
  own = flags.FlagValues()
  flags.DEFINE_string(
    'policy', None, 'Policy directory to serve.', flag_values=own
  )
  flags.DEFINE_string(
    'address',
    '127.0.0.1:0',
    'host:port (port 0 is any free one) or unix:path; one that other machines '
    'reach, such as 0.0.0.0:50051, needs the three files of TLS.',
    flag_values=own,
  )
  flags.DEFINE_string(
    'engine',
    '',
    'vllm:http://host:port or sglang:http://host:port generates; nothing is '
    'the engine in this process.',
    flag_values=own,
  )
  flags.DEFINE_string(
    'engine_weights',
    '',
    'Directory through which weights get to --engine, which must see it under '
    'this name; nothing is one in run.directory.',
    flag_values=own,
  )
  for name, what in _FILES.items():
    flags.DEFINE_string(name, '', what, flag_values=own)
  flags.DEFINE_bool(
    'allow_insecure',
    False,
    'Lets other machines in without TLS. Whoever reaches the address can then '
    'read and replace rollouts and parameters.',
    flag_values=own,
  )
  settings = config.parse_command_line(argv, own)
  logging.basicConfig(
    level=logging.INFO,
    format='%(asctime)s %(levelname)s %(name)s: %(message)s',
  )
  if not own.policy:
    sys.exit('serve_sampler.py: error: --policy=DIRECTORY is needed')
  runs = pathlib.Path(settings.run.directory)
  compilation.configure(runs / '.compilation_cache')
  try:
    policy = policy_files.load(own.policy)
    decoder = None
    if own.engine:
      weights = pathlib.Path(own.engine_weights or runs / '.engine_weights')
      decoder = serving.external_engine(settings, policy, own.engine, weights)
    server = serving.serve(
      settings,
      policy,
      envs.load_tasks(settings.environment),
      own.address,
      decoder=decoder,
      own=credentials.Credentials(*(own[name].value for name in _FILES)),
      allow_insecure=own.allow_insecure,
    )
  except (ValueError, errors.SamplerError) as error:
    sys.exit(f'serve_sampler.py: error: {error}')
  lifeline.run(server)


if __name__ == '__main__':
  main(sys.argv)
