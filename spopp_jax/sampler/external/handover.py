"""Hands weights to a server: pause, update, ask, resume; or back to the last.

The server's answer decides: a version counts once the server says that it has
it. What cannot be undone and is not known ends the engine.
"""

import json
import pathlib
import re
import shutil
from collections.abc import Mapping

import numpy as np

from spopp_jax.models import config_files, dense, tensor_files
from spopp_jax.sampler import errors
from spopp_jax.sampler.external import servers

_LABEL = re.compile('[0-9]+-[0-9a-f]{64}')


def label_of(version: int, checksum: str) -> str:
  """Returns the label of a snapshot, which is also a file name."""
  return f'{version}-{checksum}'


class Handover:
  """Writes weights where the server reads them, and has it do so.

  Attributes:
    label: of the weights that the server has from here; '' before the first.
  """

  def __init__(
    self,
    server: servers.Server,
    config: dense.DecoderConfig,
    directory: pathlib.Path,
    *,
    deadline_s: float,
  ):
    """Makes the directory, or clears what an earlier engine left in it.

    Args:
      server: takes the weights.
      config: the decoder.
      directory: of this engine alone; the server sees it under this name.
      deadline_s: of taking weights.

    Raises:
      ValueError: there can be no such directory.
    """
    self.label = ''
    self._server = server
    self._config = config
    self._directory = directory.absolute()
    self._deadline_s = deadline_s
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
      for path in self._directory.iterdir():
        if _LABEL.fullmatch(path.name):
          shutil.rmtree(path)
    except OSError as error:
      raise ValueError(
        f'{self._directory} cannot hold weights: {error}'
      ) from error

  def __call__(self, params: Mapping[str, np.ndarray], label: str) -> None:
    """Has the server take parameters under a label.

    Args:
      params: name -> array, of the decoder.
      label: names them, also as a directory.

    Raises:
      ValueError: they cannot be written, or the server did not take them and
        is back at those from before.
      EngineLost: which weights the server has is not known.
    """
    before = self.label
    try:
      self._write(params, label)
      self._publish(label)
    except OSError as error:
      raise ValueError(
        f'the parameters cannot be written to {self._directory}: {error}'
      ) from error
    finally:
      for name in {before, label} - {self.label, ''}:
        shutil.rmtree(self._directory / name, ignore_errors=True)

  def _write(self, params: Mapping[str, np.ndarray], label: str) -> None:
    directory = self._directory / label
    directory.mkdir(exist_ok=True)
    fields = json.dumps(config_files.to_fields(self._config))
    (directory / 'config.json').write_text(fields)
    tensor_files.write(directory, params)

  def _publish(self, label: str) -> None:
    try:
      self._server.pause()
      self._take(label)
    except errors.EngineError as refusal:
      self._go_back(label, refusal)
      raise ValueError(
        f'the server did not take them ({refusal}); it is back at '
        f'{self.label or "weights that are not used"}'
      ) from refusal
    self.label = label
    try:
      self._server.resume()
    except errors.EngineError as error:
      raise errors.EngineLost(
        f'the server took weights {label} and does not resume: {error}'
      ) from error

  def _go_back(self, label: str, refusal: errors.EngineError) -> None:
    try:
      if self.label:
        self._take(self.label)
      self._server.resume()
    except errors.EngineError as error:
      raise errors.EngineLost(
        f'the server did not take weights {label} ({refusal}) and does not go '
        f'back to {self.label or "what it had"} ({error}): which it has is not '
        'known'
      ) from error

  def _take(self, label: str) -> None:
    self._server.update(
      str(self._directory / label), label, deadline_s=self._deadline_s
    )
    found = self._server.label()
    if found != label:
      raise errors.EngineRefused(
        f'after the update the server says that it has {found!r}'
      )
