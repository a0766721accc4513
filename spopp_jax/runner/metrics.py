"""One record a step: metrics.jsonl, TensorBoard events and a progress line.

A name that `metrics_table.METRICS` does not describe is refused.
"""

import difflib
import json
import math
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import tensorboardX
import tqdm

from spopp_jax.runner.metrics_table import METRICS

_FILE = 'metrics.jsonl'
_EVENTS_FLUSH_S = 5
_PROGRESS_INTERVAL_S = 0.2
_PROGRESS_LINE_INTERVAL_S = 10.0  # where the output is no terminal


class MetricsError(ValueError):
  """metrics.jsonl is damaged or lacks steps; the text says what to do."""


def read_metrics(directory: str | os.PathLike[str]) -> list[dict[str, float]]:
  """Returns the records of a run, one a step; null reads as NaN.

  Args:
    directory: of the run.

  Raises:
    FileNotFoundError: it has no metrics.jsonl.
    MetricsError: a line of it is no JSON.
  """
  records = _read_lines(pathlib.Path(directory) / _FILE)
  return [
    {
      name: math.nan if value is None else value
      for name, value in record.items()
    }
    for record in records
  ]


class MetricsWriter:
  """Writes one record a step, in order and without gaps.

  A written record survives the process being killed in metrics.jsonl; the
  TensorBoard events of its last seconds do not.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    *,
    total_steps: int,
    resume_step: int = 0,
    progress: bool = True,
    stream: TextIO | None = None,
  ):
    """Opens the files; records of `resume_step` and later are taken out.

    Args:
      directory: gets metrics.jsonl and tensorboard/.
      total_steps: learner steps of the whole run.
      resume_step: first step that will be written; 0 starts anew.
      progress: show a progress line; where the stream is no terminal, a new
        line every 10 s.
      stream: where it is shown; None is stderr.

    Raises:
      MetricsError: metrics.jsonl is damaged or lacks a step before
        `resume_step`.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _FILE
    self._attempt = _rewind(path, resume_step)
    self._next_step = resume_step
    self._file = path.open('a', encoding='utf-8')
    self._events = tensorboardX.SummaryWriter(
      str(directory / 'tensorboard'),
      purge_step=resume_step,
      flush_secs=_EVENTS_FLUSH_S,
      # Two files of one second would otherwise share a name.
      filename_suffix=f'.{self._attempt}',
    )
    self._bar = _progress_bar(
      stream or sys.stderr, total_steps, resume_step, progress
    )

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Takes the record of one step.

    Args:
      step: one above the last, or the writer's resume_step.
      metrics: numbers by name; NaN and infinities are written as null.

    Raises:
      ValueError: a name that METRICS lacks, or a step out of order.
    """
    if step != self._next_step:
      raise ValueError(f'step {step} must be {self._next_step}')
    for name in metrics:
      if name not in METRICS:
        near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
        raise ValueError(
          f'unknown metric {name!r}; did you mean {near!r}? METRICS in '
          'runner/metrics_table.py describes every metric'
        )
    values = {name: float(value) for name, value in metrics.items()}
    record: dict[str, Any] = {'step': step, 'attempt': self._attempt}
    for name, value in values.items():
      record[name] = value if math.isfinite(value) else None
    self._file.write(json.dumps(record, allow_nan=False) + '\n')
    self._file.flush()
    for name, value in values.items():
      if math.isfinite(value):
        self._events.add_scalar(name, value, step)
    self._bar.set_postfix_str(_summary(values), refresh=False)
    self._bar.update()
    self._next_step = step + 1

  def close(self) -> None:
    """Ends the progress line and closes the files."""
    self._bar.close()
    self._events.close()
    self._file.close()


def _read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns one record a step, rising; the later of two lines wins."""
  records = {record['step']: record for record in _parse(path)}
  return [records[step] for step in sorted(records)]


def _parse(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  lines = path.read_text(encoding='utf-8').splitlines(keepends=True)
  for number, line in enumerate(lines, start=1):
    # A killed process may leave half a line at the end.
    if line.endswith('\n'):
      try:
        yield json.loads(line)
      except ValueError as error:
        raise MetricsError(f'{path}:{number} is damaged: {error}') from error


def _rewind(path: pathlib.Path, resume_step: int) -> int:
  """Takes out records of `resume_step` and later; returns the new attempt."""
  records = _read_lines(path) if path.exists() else []
  kept = [record for record in records if record['step'] < resume_step]
  missing = set(range(resume_step)) - {record['step'] for record in kept}
  if missing:
    raise MetricsError(
      f'{path} lacks step {min(missing)}, which the checkpoint of step '
      f'{resume_step} has behind it; put the file back, remove the checkpoints '
      'after that step to resume an earlier one, or start without '
      '--config.run.resume=True'
    )
  replacement = path.with_suffix('.partial')
  with replacement.open('w', encoding='utf-8') as file:
    file.writelines(json.dumps(record) + '\n' for record in kept)
    file.flush()
    os.fsync(file.fileno())
  replacement.replace(path)
  return 1 + max((record['attempt'] for record in records), default=0)


class _Lines:
  """Turns a progress bar's repainting into lines of their own."""

  def __init__(self, stream: TextIO):
    self._stream = stream

  def write(self, text: str) -> None:
    text = text.strip('\r\n ')
    if text:
      self._stream.write(text + '\n')

  def flush(self) -> None:
    self._stream.flush()


def _progress_bar(
  stream: TextIO, total_steps: int, resume_step: int, progress: bool
) -> tqdm.tqdm:
  terminal = stream.isatty()
  bar = ' |{bar}|' if terminal else ''
  return tqdm.tqdm(
    total=total_steps,
    initial=resume_step,
    file=stream if terminal else _Lines(stream),
    mininterval=(
      _PROGRESS_INTERVAL_S if terminal else _PROGRESS_LINE_INTERVAL_S
    ),
    miniters=1,
    dynamic_ncols=terminal,
    disable=not progress,
    bar_format=(
      'step {n_fmt}/{total_fmt}' + bar + '{postfix}, {remaining} left'
    ),
  )


def _summary(values: Mapping[str, float]) -> str:
  """Returns what a person watches, as far as it was measured."""
  words = []
  if 'reward_collected' in values:
    words.append(f'reward {values["reward_collected"]:.3f}')
  if 'reward_dispatched' in values:
    words.append(f'unbiased {values["reward_dispatched"]:.3f}')
  if 'lag_events' in values:
    words.append(f'lag {values["lag_events"]:.1f}')
  if 'tokens_per_s' in values:
    words.append(f'{values["tokens_per_s"]:,.0f} tokens/s')
  return ', '.join(words)
