"""The messages behind the last failures, kept to be looked at.

Each is a JSON file: when, from whom, why it is a failure, and the message as
`google.protobuf.json_format` writes it, bytes in base64, so that
`json_format.ParseDict` reads it back.
"""

import datetime
import json
import logging
import pathlib
from typing import Any

from google.protobuf import json_format

_LOG = logging.getLogger(__name__)


class Failures:
  """Keeps the newest failures in a directory; for one thread at a time."""

  def __init__(
    self,
    directory: pathlib.Path,
    *,
    keep: int = 32,
    max_bytes: int = 64 * 2**20,
  ):
    """Goes on after the last one that is there.

    Args:
      directory: made when there is something to keep.
      keep: files at most.
      max_bytes: of all files together; the newest one may be larger.
    """
    self._directory = directory
    self._keep = keep
    self._max_bytes = max_bytes
    found = [path for path in directory.glob('*.json') if path.stem.isdecimal()]
    self._files = sorted(found, key=lambda path: int(path.stem))
    self._next = int(self._files[-1].stem) + 1 if found else 0

  def add(self, message: Any, reason: str, source: str) -> None:
    """Writes one down; what is too many goes, oldest first.

    A disk that takes no file costs a warning, not the run.

    Args:
      message: a protobuf message.
      reason: why it is a failure.
      source: whose message it is.
    """
    path = self._directory / f'{self._next:06d}.json'
    record = {
      'at': datetime.datetime.now(datetime.UTC).isoformat(),
      'from': source,
      'reason': reason,
      'message': json_format.MessageToDict(message),
    }
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
      path.write_text(json.dumps(record, indent=1) + '\n', encoding='utf-8')
      self._files.append(path)
      self._next += 1
      self._remove_oldest()
    except OSError as error:
      _LOG.warning('cannot keep a message that failed: %s', error)

  def _remove_oldest(self) -> None:
    sizes = [path.stat().st_size for path in self._files if path.exists()]
    surplus = len(self._files) - self._keep
    while len(self._files) > 1 and (
      surplus > 0 or sum(sizes) > self._max_bytes
    ):
      self._files.pop(0).unlink(missing_ok=True)
      sizes = sizes[1:]
      surplus -= 1
