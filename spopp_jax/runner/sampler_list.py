"""Which services a run uses, in a file that may be edited while it runs."""

import itertools
import logging
import pathlib
import re
from collections.abc import Callable, Sequence

from spopp_jax.sampler import credentials

LOCAL = 'local'
FILE = 'samplers.txt'
_LOG = logging.getLogger(__name__)
_HEAD = """\
# The sampler services of this run, one address a line; local starts one of the
# run's own. Lines may be added and taken out while it runs; the run follows
# within seconds. A service that is taken out finishes what it was asked for.
"""
_COMMENT = re.compile(r'(^|\s)#.*')
_OWN = re.compile(LOCAL + r'-\d+')


class SamplerList:
  """The addresses in runs/NAME/samplers.txt, read again when it changes."""

  def __init__(
    self,
    directory: pathlib.Path,
    addresses: Sequence[str],
    check_address: Callable[[str], None] = credentials.check_address,
  ):
    """Writes the file.

    Args:
      directory: the run's.
      addresses: of services; each `local` is numbered, `local-0` and so on.
      check_address: raises ValueError for an added one that may not be used.
    """
    self._check_address = check_address
    self._path = directory / FILE
    self._names = _numbered(addresses)
    self._path.write_text(_HEAD + '\n'.join(self._names) + '\n')
    self._read_at_ns = self._path.stat().st_mtime_ns
    self._problem = ''

  def __call__(self) -> list[str]:
    """Returns the addresses that stand in the file now.

    A line that is no address is logged and left out; a file that cannot be
    read or names none changes nothing.
    """
    try:
      changed_at_ns = self._path.stat().st_mtime_ns
      if changed_at_ns != self._read_at_ns:
        self._read_at_ns = changed_at_ns
        self._read(self._path.read_text(encoding='utf-8'))
      self._problem = ''
    except (OSError, ValueError) as error:
      if str(error) != self._problem:
        _LOG.warning('cannot read %s: %s; the samplers stay', self._path, error)
      self._problem = str(error)
    return self._names

  def _read(self, text: str) -> None:
    lines = [_COMMENT.sub('', line).strip() for line in text.splitlines()]
    names = _numbered([line for line in lines if line and self._is_name(line)])
    if not names:
      raise ValueError('it names no sampler')
    self._names = names
    _LOG.warning('%s names %s now', self._path, ', '.join(names))

  def _is_name(self, line: str) -> bool:
    if line == LOCAL or is_own(line):
      return True
    try:
      self._check_address(line)
    except ValueError as error:
      _LOG.warning('%s: %s; the line is left out', self._path, error)
      return False
    return True


def is_own(name: str) -> bool:
  """Whether a name is that of a service of the run's own: `local-0` etc."""
  return _OWN.fullmatch(name) is not None


def _numbered(addresses: Sequence[str]) -> list[str]:
  """Returns distinct names: each `local` gets the next free number."""
  taken = {name for name in addresses if is_own(name)}
  free = (
    f'{LOCAL}-{i}' for i in itertools.count() if f'{LOCAL}-{i}' not in taken
  )
  return list(
    dict.fromkeys(next(free) if one == LOCAL else one for one in addresses)
  )


def log_name(name: str) -> str:
  """Returns the log file of a service of the run's own: 'sampler-0.log'."""
  return f'sampler-{name.removeprefix(LOCAL + "-")}.log'
