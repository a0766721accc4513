"""Trains a starting policy on demonstrations and says how often it succeeds.

  python experiments/cold_start.py --config=configs/quickstart.py \
      --output=policies/household
  python experiments/train.py --config=configs/quickstart.py \
      --config.cold_start.policy=policies/household

The same seed gives the policy that `train.py` would train itself.
"""

import json
import logging
import pathlib
import sys

from absl import flags

from spopp_jax import envs
from spopp_jax.models import policy_files
from spopp_jax.runner import (
  cold_start,
  compilation,
  config,
  estimate,
  experiment,
  sampling,
  serving,
)
from spopp_jax.sampler import in_process, retries


def main(argv: list[str]) -> None:
  """Trains, saves and measures the policy of the command line."""
  own = flags.FlagValues()
  flags.DEFINE_string(
    'output',
    None,
    'Directory that gets the policy and success.json; must be new.',
    flag_values=own,
  )
  settings = config.parse_command_line(argv, own)
  logging.basicConfig(level=logging.WARNING)
  if not own.output:
    sys.exit('cold_start.py: error: --output=DIRECTORY is needed')
  output = pathlib.Path(own.output)
  if output.exists():
    sys.exit(
      f'cold_start.py: error: {output} exists and would be overwritten; name '
      'another --output'
    )
  compilation.configure(
    pathlib.Path(settings.run.directory) / '.compilation_cache'
  )
  try:
    tasks = envs.load_tasks(settings.environment)
    policy = cold_start.train_policy(settings, tasks)
    policy_files.save(output, policy)
    success = measure(settings, policy, tasks)
  except experiment.EXPECTED_ERRORS as error:
    sys.exit(f'cold_start.py: error: {error}')
  (output / 'success.json').write_text(json.dumps({'success': success}) + '\n')
  print(f'success over all tasks {success:.3f}; the policy is in {output}')


def measure(settings, policy, tasks) -> float:
  """Returns the success over all tasks, sampled in this process."""
  sampler = in_process.InProcessSampler(
    serving.make_driver(settings, policy, tasks)
  )
  batcher = sampling.make_batcher(
    settings, sampler, retries.RetryBudget(settings.dispatch.attempts)
  )
  batcher.publish(policy.params, 0)
  return estimate.measure(
    batcher,
    tasks.task_ids,
    rollouts=settings.evaluation.rollouts_per_task,
    policy_version=0,
    seed=settings.seed,
    purpose='evaluation',
    progress=settings.run.progress,
  ).success


if __name__ == '__main__':
  main(sys.argv)
