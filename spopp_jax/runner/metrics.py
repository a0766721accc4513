"""One record a step: metrics.jsonl, TensorBoard events and a progress line.

`METRICS` says what every number means; a name that is not in it is refused.
"""

import difflib
import json
import math
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TextIO

import tensorboardX
import tqdm

from spopp_jax import types

_FILE = 'metrics.jsonl'
_EVENTS_FLUSH_S = 5
_PROGRESS_INTERVAL_S = 0.2
_PROGRESS_LINE_INTERVAL_S = 10.0  # where the output is no terminal


class Metric(NamedTuple):
  """What a number means.

  Attributes:
    meaning: one sentence.
    unit: of the number; '1' for counts, fractions and ratios.
    healthy: the values of a run that goes well.
  """

  meaning: str
  unit: str
  healthy: str


def _weights(level: str) -> dict[str, Metric]:
  of = f'{level} importance weights before truncation'
  return {
    f'weight_{level}_mean': Metric(f'mean of {of}', '1', 'near 1'),
    f'weight_{level}_max': Metric(f'largest of {of}', '1', 'below 100'),
    f'weight_{level}_ess_fraction': Metric(
      f'effective sample size of {of} over their number', '1', 'above 0.5'
    ),
    f'weight_{level}_chi2': Metric(
      f'mean square of {of}, less 1', '1', '0 to 1'
    ),
    f'weight_{level}_used_mean': Metric(
      f'mean of the {level} weights that the loss uses, rejected ones as 0',
      '1',
      '0.8 to 1.2',
    ),
    f'weight_{level}_used_ess_fraction': Metric(
      f'effective sample size of the {level} weights that the loss uses over '
      'their number',
      '1',
      'above the one before',
    ),
  }


METRICS: dict[str, Metric] = {
  # What the policy earns.
  'reward_collected': Metric(
    'mean reward of the trained batch; flattered where the first finished '
    'are kept, since successes are short',
    '1',
    'rises to 1',
  ),
  'reward_dispatched': Metric(
    'mean reward of everything dispatched, late arrivals included: unbiased',
    '1',
    'rises to 1',
  ),
  'value_mean': Metric(
    'mean of the baselines v-hat frozen at dispatch', '1', 'follows the reward'
  ),
  # What was collected.
  'trajectories': Metric('trajectories trained on', '1', 'the batch size'),
  'late_trajectories': Metric(
    'trajectories that finished after the batch was full', '1', 'below 25%'
  ),
  'action_tokens': Metric('action tokens trained on', 'tokens', 'steady'),
  'action_tokens_mean': Metric(
    'action tokens a trajectory', 'tokens', 'falls as games are won sooner'
  ),
  'turns_mean': Metric(
    'environment interactions a trajectory', '1', 'below the step limit'
  ),
  'lag_events': Metric(
    'mean policy updates between the snapshot that generated the batch and '
    'the parameters that train on it',
    '1',
    'at most dispatch.max_lag_events',
  ),
  **{
    f'status/{status.name.lower()}': Metric(
      f'requests so far that ended as {status.name}',
      '1',
      'rises' if status is types.Status.OK else '0 or rare',
    )
    for status in types.Status
  },
  # The update.
  'loss': Metric(
    'policy loss, aggregated as the objective says',
    '1',
    'near 0; no trend expected',
  ),
  'grad_norm': Metric(
    'global gradient norm before clipping, mean of the minibatches',
    '1',
    'steady',
  ),
  'ratio': Metric('mean current-to-proximal ratio', '1', '0.9 to 1.1'),
  'clip_fraction': Metric(
    'tokens whose gradient the clip stops', '1', 'below 0.2'
  ),
  'dual_clip_fraction': Metric(
    'tokens whose gradient the dual clip stops', '1', 'below 0.02'
  ),
  'k1': Metric('mean of -log ratio', 'nats', '-0.05 to 0.05'),
  'k3': Metric('mean of ratio - 1 - log ratio', 'nats', '0 to 0.05'),
  'rollout_weight': Metric(
    'mean truncated rollout weight in the loss', '1', '0.8 to 1.2'
  ),
  'skipped_update': Metric(
    'minibatches not applied: empty, or a gradient that is not finite',
    '1',
    '0',
  ),
  'skipped_in_a_row': Metric(
    'updates skipped one after another for gradients that are not finite',
    '1',
    '0',
  ),
  # Advantages and weights of the whole batch.
  'advantage_token_mean': Metric(
    'token mean of the standardized advantage (SPO++ Eq. 5 residual under '
    'trajectory standardization)',
    '1',
    '0 for SPO++; -0.3 to 0 for SPO',
  ),
  'advantage_weighted_token_mean': Metric(
    'token mean of weight times standardized advantage', '1', '-0.1 to 0.1'
  ),
  'degenerate_batch': Metric(
    '1 where all advantages are equal and nothing can be learnt', '1', '0'
  ),
  'length_advantage_covariance': Metric(
    'covariance of length and advantage', 'tokens', 'negative or near 0'
  ),
  'length_residual': Metric(
    'covariance of length and advantage over the mean length', '1', '-0.3 to 0'
  ),
  'length_advantage_correlation': Metric(
    'correlation of length and advantage', '1', 'negative where success is fast'
  ),
  **_weights('token'),
  **_weights('sequence'),
  'weight_truncated_fraction': Metric(
    'tokens whose rollout weight is truncated', '1', 'below 0.05'
  ),
  'log_ratio_nonfinite': Metric(
    'trajectories whose importance weight is not finite', '1', '0'
  ),
  'tempering_exponent': Metric(
    'mean tempering exponent of the prompt groups (TETPO alpha)',
    '1',
    '1 on fresh data, above 0.1 on stale data',
  ),
  'tempering_exponent_min': Metric(
    'smallest tempering exponent of a prompt group', '1', 'above 0'
  ),
  'tempered_ess_fraction': Metric(
    'mean effective share of a prompt group after tempering',
    '1',
    'at least target_ess_fraction',
  ),
  'tempering_dropped': Metric(
    'trajectories left out of tempering, their weight being not finite',
    '1',
    '0',
  ),
  'rejected_fraction': Metric(
    'tokens that the token mask rejects', '1', 'below 0.1'
  ),
  'second_moment': Metric(
    'mean squared log-ratio of the tokens that M2PO bounds',
    'nats^2',
    'below 0.1',
  ),
  'second_moment_kept': Metric(
    'the same of the tokens that are kept',
    'nats^2',
    'at most second_moment_threshold',
  ),
  'second_moment_all_masked': Metric(
    'share of minibatches in which M2PO rejects all tokens it bounds', '1', '0'
  ),
  'groups_equal_fraction': Metric(
    'prompt groups of equal rewards: no signal', '1', 'below 0.5'
  ),
  'groups_all_zero_fraction': Metric(
    'prompt groups of which no rollout succeeds', '1', 'falls'
  ),
  'groups_all_one_fraction': Metric(
    'prompt groups of which every rollout succeeds', '1', 'rises'
  ),
  # Where the time goes.
  'tokens_per_s': Metric(
    'tokens of the step over its time', 'tokens/s', 'high'
  ),
  'step_s': Metric('whole step', 's', 'steady'),
  'collect_s': Metric('waiting for the batch', 's', 'most of a step'),
  'drain_s': Metric('waiting for the late ones', 's', 'below collect_s'),
  'update_s': Metric('packing and the update', 's', 'steady after step 0'),
  'publish_s': Metric('publishing and dispatching', 's', 'below update_s'),
}


def describe_metrics() -> str:
  """Returns the table of all metrics in Markdown."""
  lines = ['| metric | meaning | unit | healthy |', '|---|---|---|---|']
  lines += [
    f'| {name} | {metric.meaning} | {metric.unit} | {metric.healthy} |'
    for name, metric in METRICS.items()
  ]
  return '\n'.join(lines) + '\n'


def read_metrics(directory: str | os.PathLike[str]) -> list[dict[str, float]]:
  """Returns the records of a run, one a step; null reads as NaN.

  Args:
    directory: of the run.

  Raises:
    FileNotFoundError: it has no metrics.jsonl.
    ValueError: a line of it is no JSON.
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
      ValueError: metrics.jsonl is damaged or lacks a step before
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
          'runner/metrics.py describes every metric'
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
        raise ValueError(f'{path}:{number} is damaged: {error}') from error


def _rewind(path: pathlib.Path, resume_step: int) -> int:
  """Takes out records of `resume_step` and later; returns the new attempt."""
  records = _read_lines(path) if path.exists() else []
  kept = [record for record in records if record['step'] < resume_step]
  missing = set(range(resume_step)) - {record['step'] for record in kept}
  if missing:
    raise ValueError(
      f'{path} lacks step {min(missing)}, which the checkpoint of step '
      f'{resume_step} has behind it; put the file back or start without '
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
