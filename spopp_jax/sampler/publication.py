"""Policy snapshots in versioned directories that runner and services share.

    DIRECTORY/7/params-1f0c9a3e55d20b84.safetensors
    DIRECTORY/7/manifest.json

A version is there exactly when its manifest is, and that appears, and is
replaced, in one rename after everything that it names is on the disk.
"""

import collections
import hashlib
import json
import logging
import os
import pathlib
import shutil
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from spopp_jax.sampler import errors, weights

_LOG = logging.getLogger(__name__)
_MANIFEST = 'manifest.json'
_PARTIAL = '.partial'
_MAX_MANIFEST_BYTES = 2**20


class Store:
  """Writes versions for services to read; of one runner, thread-safe.

  Leases live as long as this object: after a restart of the runner a version
  is garbage until it is written or leased again.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    """Opens or makes the directory and clears what broken writes left there.

    Args:
      directory: of this store alone; services need to read it.

    Raises:
      PublicationError: it cannot be made.
    """
    self.directory = pathlib.Path(directory).absolute()
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise self._unusable(error) from error
    self._lock = threading.Lock()
    self._writing = threading.Lock()
    self._unfinished: int | None = None
    self._leases: dict[int, set[str]] = collections.defaultdict(set)
    for path in self.directory.iterdir():
      if path.name.isdecimal() and path.is_dir():
        _clear(path)
    self._newest = max(self.versions(), default=None)

  def _unusable(self, error: OSError) -> errors.PublicationError:
    return errors.PublicationError(
      f'cannot write snapshots to {self.directory} ({error}); make room there, '
      'or have them sent with --config.sampler.transport=grpc; a run goes on '
      'from its last checkpoint with --config.run.resume=True'
    )

  def versions(self) -> list[int]:
    """Returns the versions that are there, in rising order."""
    return sorted(
      int(path.parent.name)
      for path in self.directory.glob(f'*/{_MANIFEST}')
      if path.parent.name.isdecimal()
    )

  def write(
    self, params: Mapping[str, np.ndarray], version: int
  ) -> weights.Snapshot:
    """Writes a version, which is the newest from then on.

    A version that is there already is kept when it is whole and the same, else
    replaced: a service that reads meanwhile gets the one or the other, or finds
    it damaged, and never a mixture.

    Args:
      params: name -> array, see `weights.to_bytes`.
      version: number of optimizer updates published, >= 0.

    Returns:
      The snapshot, whose bytes are in its file.

    Raises:
      ValueError: `version` is negative, or a parameter cannot be written.
      PublicationError: the disk took it not; what was there before still is.
    """
    if version < 0:
      raise ValueError(f'version ({version}) must be at least 0')
    data = weights.to_bytes(params)
    checksum = weights.checksum(data)
    path = self.directory / str(version)
    file = path / f'params-{checksum[:16]}.safetensors'
    with self._writing:
      with self._lock:
        self._unfinished = version
      try:
        if not file.exists() or not _holds(path, checksum):
          self._write_files(path, file, data, version, checksum)
        self._newest = version
      except OSError as error:
        raise self._unusable(error) from error
      finally:
        with self._lock:
          self._unfinished = None
    return weights.Snapshot(version, checksum, len(data), path=file)

  def lease(self, version: int, holder: str) -> None:
    """Keeps a version from `collect` until it is released.

    Args:
      version: one that is there.
      holder: who needs it; leasing twice is like once.

    Raises:
      PublicationError: there is no such version.
    """
    with self._lock:
      if not (self.directory / str(version) / _MANIFEST).exists():
        raise errors.PublicationError(
          f'version {version} is not in {self.directory}, which holds '
          f'{self.versions()}; write it first'
        )
      self._leases[version].add(holder)

  def release(self, version: int, holder: str) -> None:
    """Ends a lease; nothing happens when there is none."""
    with self._lock:
      self._leases[version].discard(holder)

  def hold_only(self, holder: str, version: int | None = None) -> None:
    """Leases one version, or none, in place of what the holder leased before.

    What nobody needs any more is removed.

    Args:
      holder: who needs it.
      version: one that is there.

    Raises:
      PublicationError: there is no such version.
    """
    if version is not None:
      self.lease(version, holder)
    with self._lock:
      for other, holders in self._leases.items():
        if other != version:
          holders.discard(holder)
    removed = self.collect()
    if removed:
      _LOG.info('versions %s were removed: nobody needs them', removed)

  def collect(self) -> list[int]:
    """Removes every version but the newest that nobody leases.

    The newest is the one written last, not the highest: a resumed run writes
    versions below those that it left.

    Returns:
      The versions removed.
    """
    with self._lock:
      old = [
        version
        for version in self.versions()
        if version not in (self._newest, self._unfinished)
        and not self._leases[version]
      ]
      for version in old:
        path = self.directory / str(version)
        # Without it the rest is rubbish, whenever this ends.
        (path / _MANIFEST).unlink()
        shutil.rmtree(path)
        del self._leases[version]
    return old

  def _write_files(
    self,
    path: pathlib.Path,
    file: pathlib.Path,
    data: bytes,
    version: int,
    checksum: str,
  ) -> None:
    manifest = {
      'version': version,
      'checksum': checksum,
      'files': [
        {'name': file.name, 'size_bytes': len(data), 'sha256': checksum}
      ],
    }
    path.mkdir(parents=True, exist_ok=True)
    _sync_directory(self.directory)
    try:
      _write(file, data)
      _write(path / _MANIFEST, json.dumps(manifest, indent=2).encode())
    finally:
      _clear(path)


def read(
  directory: str | os.PathLike[str], checksum: str
) -> dict[str, np.ndarray]:
  """Reads a version and verifies all of it before any is used.

  Args:
    directory: of one version.
    checksum: sha256 over the bytes of its files in order, 64 hex digits.

  Returns:
    name -> array.

  Raises:
    SnapshotUnseen: there is no such snapshot to be read: no manifest, or that
      of another one.
    PublicationError: it is damaged: a size or sha256 differs from the manifest,
      or this is none.
  """
  path = pathlib.Path(directory)
  manifest = _read_manifest(path)
  if manifest['checksum'] != checksum:
    raise errors.SnapshotUnseen(
      f'{path} holds a snapshot with sha256 {manifest["checksum"]} here, '
      f'announced was {errors.shown(checksum)}'
    )
  total = hashlib.sha256()
  params: dict[str, np.ndarray] = {}
  for entry in manifest['files']:
    data = _read_verified(path / entry['name'], entry)
    total.update(data)
    params.update(weights.from_bytes(data))
  if total.hexdigest() != checksum:
    raise errors.PublicationError(
      f'the sha256 of all files in {path} is {total.hexdigest()}, announced '
      f'was {checksum}; publish again'
    )
  return params


def _read_manifest(path: pathlib.Path) -> dict[str, Any]:
  try:
    with (path / _MANIFEST).open('rb') as file:
      text = file.read(_MAX_MANIFEST_BYTES)
  except (OSError, ValueError) as error:
    # ValueError: a null byte in the path, which may come from the network.
    manifest_path = errors.shown(path / _MANIFEST)
    raise errors.SnapshotUnseen(
      f'cannot read {manifest_path} here ({errors.shown(error)})'
    ) from error
  try:
    manifest = json.loads(text)
    is_whole = (
      type(manifest['version']) is int
      and isinstance(manifest['checksum'], str)
      and len(manifest['files']) >= 1
      and all(_is_entry(entry) for entry in manifest['files'])
    )
  except (ValueError, KeyError, TypeError):
    is_whole = False
  if not is_whole:
    raise errors.PublicationError(
      f'{path / _MANIFEST} is no manifest with version, checksum and files '
      '(name, size_bytes, sha256); publish again'
    )
  return manifest


def _is_entry(entry: dict[str, Any]) -> bool:
  # A name with a separator could be any file of the machine.
  name = entry['name']
  return (
    isinstance(name, str)
    and name == os.path.basename(name)
    and name not in ('', '.', '..')
    and type(entry['size_bytes']) is int
    and isinstance(entry['sha256'], str)
  )


def _read_verified(path: pathlib.Path, entry: Mapping[str, Any]) -> bytes:
  try:
    there = path.stat().st_size
    if there != entry['size_bytes']:
      raise errors.PublicationError(
        f'{path} has {there} bytes, its manifest says {entry["size_bytes"]}; '
        'publish again'
      )
    data = path.read_bytes()
  except OSError as error:
    raise errors.PublicationError(
      f'cannot read {path} ({error.strerror}), which its manifest names; '
      'publish again'
    ) from error
  sha256 = hashlib.sha256(data).hexdigest()
  if sha256 != entry['sha256']:
    raise errors.PublicationError(
      f'the sha256 of {path} is {sha256}, its manifest says '
      f'{entry["sha256"]}; publish again'
    )
  return data


def _holds(path: pathlib.Path, checksum: str) -> bool:
  """Says whether a version is there, whole and with that checksum."""
  try:
    read(path, checksum)
  except errors.SnapshotUnseen:
    return False
  except errors.PublicationError as error:
    _LOG.warning('%s; it is written again', error)
    return False
  return True


def _write(path: pathlib.Path, data: bytes) -> None:
  """Makes or replaces a file in one step that survives a loss of power."""
  partial = path.with_name(path.name + _PARTIAL)
  with partial.open('wb') as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path)
  _sync_directory(path.parent)


def _sync_directory(path: pathlib.Path) -> None:
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def _clear(path: pathlib.Path) -> None:
  """Removes what the manifest does not name; all of it without a manifest."""
  try:
    names = {entry['name'] for entry in _read_manifest(path)['files']}
  except errors.PublicationError:
    _LOG.info('removing %s, which was never finished', path)
    shutil.rmtree(path)
    return
  for file in path.iterdir():
    if file.name not in names and file.name != _MANIFEST:
      file.unlink()
