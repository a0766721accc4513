"""Which services a run uses, in a file that may be edited while it runs."""

import logging
import pathlib
from collections.abc import Callable, Sequence

from spopp_jax.sampler import credentials

LOCAL = 'local'
FILE = 'samplers.txt'
_LOG = logging.getLogger(__name__)
_HEAD = """\
# The sampler services of this run, one address a line. Lines may be added and
# taken out while it runs; the run follows within seconds. A service that is
# taken out finishes what it was asked for.
"""


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
    self._names: list[str] = []
    for address in addresses:
      is_local = address == LOCAL
      count = sum(name.startswith(LOCAL + '-') for name in self._names)
      self._names.append(f'{LOCAL}-{count}' if is_local else address)
    self._path.write_text(_HEAD + '\n'.join(self._names) + '\n')
    self._read_at_ns = self._path.stat().st_mtime_ns

  def __call__(self) -> list[str]:
    """Returns the addresses that stand in the file now.

    A line that is no address is logged and left out; a file that cannot be
    read changes nothing.
    """
    try:
      changed_at_ns = self._path.stat().st_mtime_ns
      if changed_at_ns == self._read_at_ns:
        return self._names
      text = self._path.read_text(encoding='utf-8')
    except (OSError, ValueError) as error:
      _LOG.warning('cannot read %s: %s; the samplers stay', self._path, error)
      return self._names
    self._read_at_ns = changed_at_ns
    lines = [line.strip() for line in text.splitlines()]
    self._names = [
      line
      for line in dict.fromkeys(lines)
      if line and not line.startswith('#') and self._is_name(line)
    ]
    _LOG.warning(
      '%s names %s now', self._path, ', '.join(self._names) or 'none'
    )
    return self._names

  def _is_name(self, line: str) -> bool:
    if line.startswith(LOCAL + '-'):
      return True
    try:
      self._check_address(line)
    except ValueError as error:
      _LOG.warning('%s: %s; the line is left out', self._path, error)
      return False
    return True


def log_name(name: str) -> str:
  """Returns the log file of a service of the run's own: 'sampler-0.log'."""
  return f'sampler-{name.removeprefix(LOCAL + "-")}.log'
