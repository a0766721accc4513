"""Trains a language-model agent; everything it makes is in runs/<name>/.

  python experiments/train.py --config=configs/quickstart.py
  python experiments/train.py --config=configs/quickstart.py \
      --config.objective.name=spo --config.run.name=spo
  python experiments/train.py --config=configs/quickstart.py \
      --config.run.resume=True

  python experiments/train.py --config=configs/alfworld_qwen35_0p8b.py \
      --config.run.dry_run=True

A learner of several hosts is started by the same command on each of them, with
hosts.count, hosts.coordinator (an address of host 0) and its own hosts.index.

On SIGTERM, SIGHUP and Ctrl-C it saves a checkpoint, says how to continue and
ends with code 0; a second one ends it at once.

`--help` lists every setting. A run writes config.json, policy/ (the start),
trained/ (the end), adapter/ (of LoRA, for PEFT), offline.json, metrics.jsonl,
tensorboard/, checkpoints/, sampler-0.log, reward_curve.png, transcripts/ and
summary.json.
"""

import contextlib
import json
import logging
import pathlib
import signal
import sys

import jax
import ml_collections
import numpy as np

from spopp_jax.evaluation import plots
from spopp_jax.models import policy_files
from spopp_jax.runner import (
  compilation,
  config,
  dry_run,
  experiment,
  following,
  hosts,
  meeting,
  metrics,
  preemption,
  transcript,
)

_SAMPLES = 3
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(argv: list[str]) -> None:
  """Runs the experiment of the command line."""
  settings = config.parse_command_line(argv)
  logging.basicConfig(
    level=logging.WARNING, format='%(levelname)s %(name)s: %(message)s'
  )
  # It says what a step needs before the first one.
  logging.getLogger(experiment.__name__).setLevel(logging.INFO)
  compilation.configure(
    pathlib.Path(settings.run.directory) / '.compilation_cache'
  )
  try:
    if settings.run.dry_run:
      dry_run.use_cpu_devices(settings)
      print(dry_run.report(settings))
      return
    result = run(settings)
  except preemption.Stopped as stopped:
    if stopped.exit_code:
      hosts.exit_alone(f'train.py: {stopped}')
    print(f'train.py: {stopped}', flush=True)
    return
  except hosts.HostLost as error:
    hosts.exit_alone(f'train.py: error: {error}')
  except jax.errors.JaxRuntimeError as error:
    if settings.hosts.count == 1:
      raise
    hosts.exit_alone(f'train.py: error: {hosts.failed_computation(error)}')
  except experiment.EXPECTED_ERRORS as error:
    sys.exit(f'train.py: error: {error}')
  except KeyboardInterrupt:
    sys.exit(
      'train.py: interrupted; continue from the last checkpoint with '
      '--config.run.resume=True'
    )
  if result is None:
    return
  summary = report(result)
  print(
    f'{settings.objective.name}, {summary["steps"]} steps: success over all '
    f'tasks {summary["success_before"]:.3f} -> {summary["success_after"]:.3f} '
    f'in {summary["wall_s"]:.0f} s; see {result.directory}'
  )


def run(settings: ml_collections.ConfigDict) -> experiment.Result | None:
  """Runs this host's part; None at a host that does not lead."""
  stop = preemption.StopRequest()
  link = meeting.start(settings)
  if not isinstance(link, hosts.Follower):
    stop.listen(*_SIGNALS)
    with link.leading(stop) if link else contextlib.nullcontext():
      return experiment.run(settings, stop=stop, lead=link)
  stop.listen(*_SIGNALS, on_signal=link.ask_to_stop)
  try:
    updates = following.follow(settings, link)
  finally:
    link.close()
  print(
    f'host {link.index} of {settings.hosts.count}: learned along from '
    f'{updates} batches; the run is in {settings.run.directory} of host 0'
  )
  return None


def report(result: experiment.Result) -> dict[str, float]:
  """Writes plot, policy, transcripts and summary of a finished run.

  Args:
    result: what `experiment.run` returned.

  Returns:
    The summary as written to summary.json.
  """
  directory = result.directory
  records = metrics.read_metrics(directory)
  curve = {
    name: np.array([record[name] for record in records])
    for name in ('reward_collected', 'reward_dispatched')
  }
  plots.reward_curve(
    directory / 'reward_curve.png',
    collected=curve['reward_collected'],
    dispatched=curve['reward_dispatched'],
  )
  policy_files.save(
    directory / 'trained',
    result.policy._replace(params=result.training.published),
  )
  write_transcripts(result)
  total = lambda name: int(sum(record[name] for record in records))
  summary = {
    'seed': result.training.config.seed,
    'steps': len(records),
    'success_before': result.before.success,
    'success_after': result.after.success,
    'reward_first5': float(curve['reward_dispatched'][:5].mean()),
    'reward_last5': float(curve['reward_dispatched'][-5:].mean()),
    'wall_s': result.wall_s,
    'trajectories': total('trajectories'),
    'action_tokens': total('action_tokens'),
  }
  (directory / 'summary.json').write_text(json.dumps(summary, indent=2) + '\n')
  return summary


def write_transcripts(result: experiment.Result) -> None:
  """Writes three episodes of the final policy, of three different tasks."""
  folder = result.directory / 'transcripts'
  folder.mkdir(exist_ok=True)
  by_task = {t.task_id: t for t in result.after.trajectories}
  for number, task in enumerate(sorted(by_task)[:_SAMPLES], start=1):
    text = transcript.render(by_task[task], result.policy.tokenizer)
    (folder / f'{number}.txt').write_text(text, encoding='utf-8')


if __name__ == '__main__':
  main(sys.argv)
