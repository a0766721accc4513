"""A library that is measured in an environment and a process of its own."""

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from typing import Any

import numpy as np

# Of one answer; compilation is part of the first.
_TIMEOUT_S = 600.0


class WorkerError(Exception):
  """The other process has ended, or does not answer."""


class Worker:
  """Asks a program that answers as `benchmark_tunix` does."""

  def __init__(self, requests: connection.Connection, program: str):
    self._requests = requests
    self._program = program

  def ask(self, name: str, *arguments: Any) -> Any:
    """Returns the answer to a request.

    Raises:
      WorkerError: there is none.
    """
    try:
      self._requests.send((name, arguments))
      if not self._requests.poll(_TIMEOUT_S):
        raise WorkerError(f'{self._program}: no answer in {_TIMEOUT_S:.0f} s')
      _, value = self._requests.recv()
    except (EOFError, OSError) as error:
      raise WorkerError(
        f'{self._program} ended at {name!r}; its last words are above'
      ) from error
    return value

  def result(self) -> Sequence[np.ndarray]:
    """Returns the arrays that the last work has left."""
    return [
      np.frombuffer(data, dtype).reshape(shape)
      for data, dtype, shape in self.ask('result')
    ]


@contextlib.contextmanager
def started(python: str, program: pathlib.Path) -> Iterator[Worker]:
  """Runs a program with an interpreter for the length of the context."""
  ours, theirs = connection.Pipe()
  with ours:
    command = [python, str(program), str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    try:
      yield Worker(ours, ' '.join(command[:2]))
    finally:
      ours.close()
      try:
        process.wait(10)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
