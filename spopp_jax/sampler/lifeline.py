"""How a local service process tells its parent where it is, and dies with it.

The parent keeps the write end of the child's standard input. When the parent
ends, by whatever signal, the kernel closes it and the child reads its end.
"""

import json
import logging
import os
import signal
import sys
import threading

from spopp_jax.sampler import service

_logger = logging.getLogger(__name__)

# Set by the parent; without it a service outlives a closed standard input.
PARENT_VARIABLE = 'SPOPP_SAMPLER_HAS_PARENT'
_POLL_S = 0.5


def ready_line(address: str) -> str:
  """Returns the one line that a service prints once it accepts calls."""
  return json.dumps({'sampler_ready': address})


def parse_ready_line(line: str) -> str | None:
  """Returns the address of a ready line; None for any other line."""
  try:
    message = json.loads(line)
  except ValueError:
    return None
  if not isinstance(message, dict):
    return None
  return message.get('sampler_ready')


def run(server: service.SamplerServer) -> None:
  """Says that the service is ready, waits for its end, and ends the process.

  It ends on SIGTERM or SIGINT, when the parent is gone (only where
  `PARENT_VARIABLE` is set) with exit code 0, and when the engine fails with
  exit code 1. Call it last, from the main thread. It does not return: an
  environment that never answers must not keep the process alive.

  Args:
    server: started.
  """
  ending = threading.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: ending.set())
  if os.environ.get(PARENT_VARIABLE):
    threading.Thread(
      target=_watch_parent, args=(ending,), name='parent-watch', daemon=True
    ).start()
  sys.stdout.write(ready_line(server.address) + '\n')
  sys.stdout.flush()
  failure = ''
  while not failure and not ending.is_set():
    failure = server.wait(_POLL_S)
  server.stop()
  _logger.info('the service ends: %s', failure or 'it was asked to')
  logging.shutdown()
  sys.stderr.flush()
  os._exit(1 if failure else 0)


def _watch_parent(ending: threading.Event) -> None:
  # os.read, not sys.stdin: its lock would block the interpreter's exit.
  while os.read(0, 4096):
    pass
  ending.set()
