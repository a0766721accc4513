"""Checkpoints of a run: arrays by orbax, one rename commits them all.

A checkpoint is the directory `<step>` with `arrays/` (orbax) and
`contents.json` (everything else, and a sha256 of every file). It is written
under another name and renamed when complete, so what bears a step's name is
whole unless a disk or a person damaged it, which the checksums show.
"""

import hashlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

_CONTENTS = 'contents.json'
_PARTIAL = '.partial'


class CheckpointError(ValueError):
  """A checkpoint is missing, damaged or of another run; says what to do."""


class Checkpoint(NamedTuple):
  """What `restore` returns.

  Attributes:
    step: the step it was saved under.
    arrays: the parts that were saved, by name.
    extra: the JSON values that were saved.
  """

  step: int
  arrays: dict[str, Any]
  extra: dict[str, Any]


class CheckpointStore:
  """The checkpoints of one run, the newest `keep` of them."""

  def __init__(self, directory: str | os.PathLike[str], keep: int = 2):
    """Names the directory; nothing is read or written yet.

    Args:
      directory: holds one directory a checkpoint; made by the first save.
      keep: checkpoints kept, at least 1.

    Raises:
      ValueError: `keep` is below 1.
    """
    if keep < 1:
      raise ValueError(f'keep ({keep}) must be at least 1')
    self._directory = pathlib.Path(directory).absolute()
    self._keep = keep

  def steps(self) -> list[int]:
    """Returns the steps of complete checkpoints, rising."""
    if not self._directory.is_dir():
      return []
    names = [path.name for path in self._directory.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())

  def latest_step(self) -> int | None:
    """Returns the newest complete checkpoint's step; None without any."""
    return max(self.steps(), default=None)

  def clear(self) -> None:
    """Removes every checkpoint; a run that starts anew calls it."""
    for step in self.steps():
      shutil.rmtree(self._path(step))

  def save(
    self, step: int, arrays: Mapping[str, Any], extra: Mapping[str, Any]
  ) -> None:
    """Writes one checkpoint; it exists as a whole or not at all.

    Args:
      step: above every saved step.
      arrays: parts by name, each a pytree of jax or numpy arrays whose dict
        keys are str without '/'. Any dtype and shape, also empty ones; 64-bit
        numpy arrays keep all their bits.
      extra: what JSON holds exactly, such as random generators' states as
        dicts of int.

    Raises:
      CheckpointError: a checkpoint of this or a later step exists.
      ValueError: a leaf is no array, or `extra` would change in JSON.
    """
    latest = self.latest_step()
    if latest is not None and step <= latest:
      raise CheckpointError(
        f'{self._path(latest)} exists already, step {step} cannot follow it; '
        'resume that run or give this one another run.name'
      )
    flat = {name: _flatten(name, part) for name, part in arrays.items()}
    leaves = {path: leaf for part in flat.values() for path, leaf in part}
    body = {
      'extra': _json_exact(extra),
      'arrays': {path: _describe(leaf) for path, leaf in leaves.items()},
      'parts': {name: _is_plain(part) for name, part in arrays.items()},
    }

    partial = self._path(step).with_suffix(_PARTIAL)
    self._directory.mkdir(parents=True, exist_ok=True)
    for path in self._directory.glob('*' + _PARTIAL):
      shutil.rmtree(path)
    partial.mkdir()
    _save_arrays(partial / 'arrays', leaves)
    body['sha256'] = {
      str(path.relative_to(partial)): _file_sha256(path)
      for path in sorted(partial.rglob('*'))
      if path.is_file()
    }
    text = json.dumps(body, sort_keys=True)
    _write_durably(
      partial / _CONTENTS, json.dumps([_sha256(text.encode()), body])
    )
    partial.rename(self._path(step))
    for old in self.steps()[: -self._keep]:
      shutil.rmtree(self._path(old))

  def restore(
    self, like: Mapping[str, Any], step: int | None = None
  ) -> Checkpoint:
    """Reads a checkpoint back.

    Args:
      like: parts by name as pytrees of arrays or jax.ShapeDtypeStruct: the
        structure, shapes and dtypes expected. numpy leaves, and those that
        lie on other hosts too, come back as numpy, all others on the leaf's
        sharding (without one, on the first device). Parts not named here must
        be nested dicts of numpy arrays; they come back as they were saved.
      step: which one; None is the newest.

    Returns:
      The checkpoint.

    Raises:
      CheckpointError: there is none, a file of it is damaged (named), or a
        leaf (named) differs from `like`.
      ValueError: a part of another kind than nested dicts is not in `like`.
    """
    if step is None:
      step = self.latest_step()
    if step is None or step not in self.steps():
      which = '' if step is None else f' of step {step}'
      raise CheckpointError(
        f'there is no checkpoint{which} in {self._directory} (steps there: '
        f'{self.steps() or "none"}); start without --config.run.resume=True'
      )
    body = self._read_contents(step)
    self._check_files(step, body['sha256'])
    for name, plain in body['parts'].items():
      if not plain and name not in like:
        raise ValueError(f'part {name!r} must be named in `like`')

    targets = {
      path: np.empty(shape, dtype)
      for path, (dtype, shape) in body['arrays'].items()
    }
    for name, part in like.items():
      wanted = dict(_flatten(name, part))
      self._check_leaves(step, name, wanted, body['arrays'])
      targets |= {path: _target(leaf) for path, leaf in wanted.items()}
    leaves = _restore_arrays(self._path(step) / 'arrays', targets)

    arrays = {name: _nest(name, leaves) for name in body['parts']}
    for name, part in like.items():
      arrays[name] = jax.tree.unflatten(
        jax.tree.structure(part),
        [leaves[path] for path, _ in _flatten(name, part)],
      )
    return Checkpoint(step, arrays, body['extra'])

  def _path(self, step: int) -> pathlib.Path:
    return self._directory / str(step)

  def _read_contents(self, step: int) -> dict[str, Any]:
    path = self._path(step) / _CONTENTS
    try:
      digest, body = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, TypeError) as error:
      raise self._damaged(step, path, str(error)) from error
    if digest != _sha256(json.dumps(body, sort_keys=True).encode()):
      raise self._damaged(step, path, 'its checksum differs')
    return body

  def _check_files(self, step: int, digests: Mapping[str, str]) -> None:
    for name, digest in digests.items():
      path = self._path(step) / name
      try:
        present = _file_sha256(path)
      except OSError as error:
        raise self._damaged(step, path, str(error)) from error
      if present != digest:
        raise self._damaged(step, path, 'its checksum differs')

  def _damaged(
    self, step: int, path: pathlib.Path, reason: str
  ) -> CheckpointError:
    earlier = [other for other in self.steps() if other < step]
    remedy = (
      f'remove {self._path(step)} and step {earlier[-1]} is resumed'
      if earlier
      else 'no earlier one is left: start without --config.run.resume=True'
    )
    return CheckpointError(f'{path} is damaged ({reason}); {remedy}')

  def _check_leaves(
    self,
    step: int,
    name: str,
    wanted: Mapping[str, Any],
    stored: Mapping[str, Any],
  ) -> None:
    have = {path for path in stored if path.startswith(name + '/')}
    have |= {name} & stored.keys()
    for path in sorted(have | wanted.keys()):
      there = stored.get(path) if path in have else None
      here = _describe(wanted[path]) if path in wanted else None
      if there != here:
        raise CheckpointError(
          f'{self._path(step)}: {path} is {_words(there)} there and '
          f'{_words(here)} here; resume with the configuration that wrote it, '
          'or give this run another run.name'
        )


def _flatten(name: str, part: Any) -> list[tuple[str, Any]]:
  """Returns (path, leaf) in the order of the tree's leaves."""
  result = []
  for keys, leaf in jax.tree_util.tree_flatten_with_path(part)[0]:
    words = [name, *(jax.tree_util.keystr((k,), simple=True) for k in keys)]
    path = '/'.join(words)
    if any('/' in word for word in words):
      raise ValueError(f'{path!r}: keys must not contain "/"')
    if not isinstance(leaf, np.ndarray | jax.Array | jax.ShapeDtypeStruct):
      raise ValueError(
        f'{path} must be an array, got {type(leaf).__name__}; '
        'other values belong in `extra`'
      )
    result.append((path, leaf))
  return result


def _describe(leaf: Any) -> list[Any]:
  return [np.dtype(leaf.dtype).name, list(leaf.shape)]


def _words(description: list[Any] | None) -> str:
  if description is None:
    return 'absent'
  return f'{description[0]}{description[1]}'


def _is_plain(part: Any) -> bool:
  """Whether names and values alone describe the part."""
  if isinstance(part, dict):
    return all(isinstance(key, str) for key in part) and all(
      map(_is_plain, part.values())
    )
  return isinstance(part, np.ndarray)


def _nest(name: str, leaves: Mapping[str, Any]) -> Any:
  """Rebuilds nested dicts from paths; inverse of `_flatten` for them."""
  if name in leaves:
    return leaves[name]
  tree: dict[str, Any] = {}
  for path, leaf in leaves.items():
    first, *inner = path.split('/')
    if first == name:
      branch = tree
      for word in inner[:-1]:
        branch = branch.setdefault(word, {})
      branch[inner[-1]] = leaf
  return tree


def _target(leaf: Any) -> Any:
  if isinstance(leaf, np.ndarray):
    return np.empty(leaf.shape, leaf.dtype)
  if not _is_here(leaf):
    return np.empty(leaf.shape, leaf.dtype)
  sharding = getattr(leaf, 'sharding', None)
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _is_here(leaf: Any) -> bool:
  """Whether all of an array lies on this host's devices."""
  return getattr(leaf, 'is_fully_addressable', True)


def _checkpointer() -> ocp.Checkpointer:
  """Waits for no other host."""
  host = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(
    primary_host=host,
    active_processes={host},
    barrier_sync_key_prefix=f'host_{host}',
  )
  return ocp.Checkpointer(
    ocp.StandardCheckpointHandler(multiprocessing_options=alone),
    multiprocessing_options=alone,
  )


def _save_arrays(path: pathlib.Path, leaves: Mapping[str, Any]) -> None:
  # orbax refuses arrays of size 0; their description restores them.
  filled = {
    # Of several hosts this one alone saves, and each holds all.
    key: leaf if _is_here(leaf) else np.asarray(leaf)
    for key, leaf in leaves.items()
    if leaf.size
  }
  if filled:
    with _checkpointer() as checkpointer:
      checkpointer.save(path, args=ocp.args.StandardSave(filled))


def _restore_arrays(
  path: pathlib.Path, targets: Mapping[str, Any]
) -> dict[str, Any]:
  filled = {key: t for key, t in targets.items() if math.prod(t.shape)}
  result = {
    key: target
    if isinstance(target, np.ndarray)
    else jnp.empty(target.shape, target.dtype, device=target.sharding)
    for key, target in targets.items()
    if key not in filled
  }
  if filled:
    with _checkpointer() as checkpointer:
      result |= checkpointer.restore(
        path, args=ocp.args.StandardRestore(filled)
      )
  return result


def _json_exact(extra: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `extra` if JSON gives back the very same."""
  for key, value in extra.items():
    try:
      same = json.loads(json.dumps({key: value}, allow_nan=False))
    except (TypeError, ValueError) as error:
      raise ValueError(f'extra[{key!r}] cannot be JSON: {error}') from error
    if same != {key: value}:
      raise ValueError(
        f'extra[{key!r}] would change in JSON: use str keys, lists for tuples'
      )
  return dict(extra)


def _sha256(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()


def _file_sha256(path: pathlib.Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _write_durably(path: pathlib.Path, text: str) -> None:
  with path.open('w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
