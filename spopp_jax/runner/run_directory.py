"""Where a run writes; earlier runs are never overwritten."""

import json
import pathlib

import ml_collections

from spopp_jax.runner import config as config_lib


def prepare(config: ml_collections.ConfigDict) -> pathlib.Path:
  """Creates or finds the run's directory and records the configuration.

  A new run whose name is taken gets the next free one (`name-2`, ...).

  Raises:
    ConfigError: a run to resume is not there.
  """
  parent = pathlib.Path(config.run.directory)
  path = parent / config.run.name
  if config.run.resume:
    if not path.is_dir():
      found = sorted(p.name for p in parent.glob('*') if p.is_dir())
      raise config_lib.ConfigError(
        f'there is no run to resume at {path}; {parent} holds '
        f'{", ".join(found) or "nothing"}. Name one with --config.run.name=, '
        'or start without --config.run.resume=True'
      )
    return path
  parent.mkdir(parents=True, exist_ok=True)
  number = 1
  while True:
    try:
      path.mkdir()
      break
    except FileExistsError:
      number += 1
      path = parent / f'{config.run.name}-{number}'
  text = json.dumps(config.to_dict(), indent=2, sort_keys=True)
  (path / 'config.json').write_text(text + '\n')
  return path
