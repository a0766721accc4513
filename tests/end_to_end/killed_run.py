"""A tiny deterministic run that kills itself at its n-th step of anything.

  python killed_run.py DIRECTORY POLICY EVENTS SETTING...

It resumes the run in DIRECTORY if there is a checkpoint, else it begins it.
After EVENTS (0: never) calls of the functions below it sends itself SIGKILL.
Each batch that is packed is noted in trained.jsonl.
"""

import json
import os
import pathlib
import shutil
import signal
import sys

import tiny_world

from spopp_jax.learner import checkpoint, update
from spopp_jax.runner import compilation, metrics, training
from spopp_jax.sampler import in_process


def count_calls(owner, name, counter):
  """Ticks before and after every call of `owner.name`."""
  function = getattr(owner, name)

  def counted(*args, **kwargs):
    counter.tick()
    result = function(*args, **kwargs)
    counter.tick()
    return result

  setattr(owner, name, counted)


class Counter:
  """Kills the process at its last tick."""

  def __init__(self, events):
    self.left = events

  def tick(self):
    self.left -= 1
    if self.left == 0:
      os.kill(os.getpid(), signal.SIGKILL)


def note_batches(path):
  """Has every packed batch written down."""
  pack = training.Training.pack

  def noted(self, batch):
    packed = pack(self, batch)
    ids = sorted(item.ticket.request_id for item in batch)
    with path.open('a') as file:
      file.write(json.dumps([self.step, ids]) + '\n')
    return packed

  training.Training.pack = noted


def main(directory, policy, events, *settings):
  folder = pathlib.Path(directory)
  compilation.configure(folder / 'compiled')
  saved = (folder / 'runs' / 'unnamed' / 'checkpoints').glob('[0-9]*')
  resume = any(path.name.isdecimal() for path in saved)
  if not resume:
    # Killed before there was anything to resume: begun anew.
    shutil.rmtree(folder / 'runs', ignore_errors=True)
  config = tiny_world.load(
    folder, f'cold_start.policy={policy}', f'run.resume={resume}', *settings
  )
  counter = Counter(int(events))
  for owner, names in (
    (in_process.InProcessSampler, ('submit', 'next', 'publish')),
    (update.Learner, ('update',)),
    (metrics.MetricsWriter, ('write',)),
    (checkpoint, ('_save_arrays', '_write_durably', '_file_sha256')),
    (pathlib.Path, ('rename', 'mkdir')),
    (shutil, ('rmtree',)),
  ):
    for name in names:
      count_calls(owner, name, counter)
  note_batches(folder / 'trained.jsonl')
  tiny_world.run(config)


if __name__ == '__main__':
  main(*sys.argv[1:])
