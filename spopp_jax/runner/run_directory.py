"""Where a run writes; earlier runs are never overwritten."""

import json
import logging
import pathlib

import ml_collections

from spopp_jax.runner import config as config_lib

_LOG = logging.getLogger(__name__)
_RECORD = 'config.json'
# What a checkpoint speaks of: a resumed run cannot change it.
_FIXED = (
  *('seed', 'environment.', 'model.', 'objective.', 'evidence.', 'lora.'),
)


def prepare(config: ml_collections.ConfigDict) -> pathlib.Path:
  """Creates or finds the run's directory and records the configuration.

  A new run whose name is taken gets the next free one (`name-2`, ...).

  Raises:
    ConfigError: a run to resume is not there, or was started with other tasks
      or another method.
  """
  parent = pathlib.Path(config.run.directory)
  path = parent / config.run.name
  if config.run.resume:
    if not path.is_dir():
      found = sorted(p.parent.name for p in parent.glob(f'*/{_RECORD}'))
      raise config_lib.ConfigError(
        f'there is no run to resume at {path}; {parent} holds '
        f'{", ".join(found) or "nothing"}. Name one with --config.run.name=, '
        'or start without --config.run.resume=True'
      )
    _check_same(config, path / _RECORD)
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
  if number > 1:
    _LOG.warning(
      '%s exists; this run writes to %s and is resumed with '
      '--config.run.name=%s',
      parent / config.run.name,
      path,
      path.name,
    )
  text = json.dumps(config.to_dict(), indent=2, sort_keys=True)
  (path / _RECORD).write_text(text + '\n')
  return path


def _check_same(
  config: ml_collections.ConfigDict, record: pathlib.Path
) -> None:
  """Refuses to resume with settings that the saved state does not fit."""
  try:
    saved = json.loads(record.read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    raise config_lib.ConfigError(
      f'cannot read the settings of the run to resume, {record}: {error}; '
      'start without --config.run.resume=True'
    ) from error
  # The same round trip for both: JSON has no tuples.
  present = json.loads(json.dumps(config.to_dict()))
  before, now = (
    config_lib.leaf_values(ml_collections.ConfigDict(d))
    for d in (saved, present)
  )
  for name in sorted(before.keys() | now.keys()):
    if name.startswith(_FIXED) and before.get(name) != now.get(name):
      raise config_lib.ConfigError(
        f'the run to resume has {name} {before.get(name)!r}, asked is '
        f'{now.get(name)!r}; {record} holds its settings. Resume with them, '
        'or start a new run without --config.run.resume=True'
      )
