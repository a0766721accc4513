import contextlib
import io
import json
import math
import struct

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from spopp_jax.runner import metrics as metrics_lib


def write_steps(directory, steps, **arguments):
  writer = metrics_lib.MetricsWriter(
    directory, total_steps=10, progress=False, **arguments
  )
  with contextlib.closing(writer):
    for step in steps:
      writer.write(step, {'loss': step / 2})


def read_lines(directory):
  text = (directory / 'metrics.jsonl').read_text()
  return [
    json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()
  ]


def read_events(directory):
  """Returns (step, tag, value) of every scalar, file after file."""
  return [
    (event.step, value.tag, value.simple_value)
    for event in all_events(directory)
    for value in event.summary.value
  ]


def all_events(directory):
  for path in sorted((directory / 'tensorboard').iterdir()):
    content, at = path.read_bytes(), 0
    while at < len(content):
      (size,) = struct.unpack_from('<Q', content, at)
      event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
      yield event
      at += 16 + size


def test_one_line_and_one_event_a_step(tmp_path):
  write_steps(tmp_path, range(3))
  assert read_lines(tmp_path) == [
    {'step': step, 'attempt': 1, 'loss': step / 2} for step in range(3)
  ]
  assert read_events(tmp_path) == [
    (step, 'loss', step / 2) for step in range(3)
  ]


def test_resume_leaves_no_gap_and_no_duplicate(tmp_path):
  write_steps(tmp_path, range(5))
  write_steps(tmp_path, range(3, 7), resume_step=3)
  write_steps(tmp_path, range(6, 8), resume_step=6)
  lines = read_lines(tmp_path)
  assert [line['step'] for line in lines] == list(range(8))
  assert [line['attempt'] for line in lines] == [1, 1, 1, 2, 2, 2, 3, 3]


def test_tensorboard_is_told_which_steps_a_resume_replaces(tmp_path):
  write_steps(tmp_path, range(5))
  write_steps(tmp_path, range(3, 5), resume_step=3)
  starts = [
    event.step
    for event in all_events(tmp_path)
    if event.session_log.status == event_pb2.SessionLog.START
  ]
  assert starts == [0, 3]
  assert [step for step, _, _ in read_events(tmp_path)] == [0, 1, 2, 3, 4, 3, 4]


def test_a_written_step_survives_a_kill(tmp_path):
  writer = metrics_lib.MetricsWriter(tmp_path, total_steps=1, progress=False)
  with contextlib.closing(writer):
    writer.write(0, {'loss': 1.0})
    assert len(read_lines(tmp_path)) == 1


def test_attempt_counts_attempts_whose_steps_are_gone(tmp_path):
  write_steps(tmp_path, range(3))
  write_steps(tmp_path, range(2, 3), resume_step=2)
  write_steps(tmp_path, range(1, 2), resume_step=1)
  assert [line['attempt'] for line in read_lines(tmp_path)] == [1, 3]


def test_a_fresh_start_drops_everything(tmp_path):
  write_steps(tmp_path, range(5))
  write_steps(tmp_path, range(1))
  assert [line['step'] for line in read_lines(tmp_path)] == [0]


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path):
  write_steps(tmp_path, range(3))
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 3, "att')
  write_steps(tmp_path, range(3, 4), resume_step=3)
  assert [line['step'] for line in read_lines(tmp_path)] == [0, 1, 2, 3]


def test_a_damaged_line_is_named(tmp_path):
  write_steps(tmp_path, range(3))
  lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  lines[1] = lines[1][:-4]
  (tmp_path / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
  with pytest.raises(ValueError, match=r'metrics\.jsonl:2 is damaged'):
    write_steps(tmp_path, range(3, 4), resume_step=3)


def test_resume_without_the_earlier_steps_is_refused(tmp_path):
  write_steps(tmp_path, range(3))
  with pytest.raises(ValueError, match=r'metrics\.jsonl lacks step 3'):
    write_steps(tmp_path, [], resume_step=5)
  assert len(read_lines(tmp_path)) == 3


def test_what_is_not_finite_is_null_and_reads_as_nan(tmp_path):
  writer = metrics_lib.MetricsWriter(tmp_path, total_steps=1, progress=False)
  writer.write(
    0, {'loss': math.nan, 'grad_norm': math.inf, 'k1': np.float32(2)}
  )
  writer.close()
  (line,) = read_lines(tmp_path)
  assert line['loss'] is None
  assert line['grad_norm'] is None
  assert line['k1'] == 2.0
  (record,) = metrics_lib.read_metrics(tmp_path)
  assert math.isnan(record['loss'])
  assert record['step'] == 0
  assert [tag for _, tag, _ in read_events(tmp_path)] == ['k1']


def test_unknown_name_is_refused_with_the_nearest(tmp_path):
  writer = metrics_lib.MetricsWriter(tmp_path, total_steps=1, progress=False)
  with pytest.raises(ValueError, match=r"'clip_fracton'.*'clip_fraction'"):
    writer.write(0, {'loss': 1.0, 'clip_fracton': 0.0})
  writer.write(0, {'loss': 1.0})
  writer.close()
  assert len(read_lines(tmp_path)) == 1


@pytest.mark.parametrize('step', [1, 3])
def test_a_step_out_of_order_is_refused(tmp_path, step):
  write_steps(tmp_path, range(2))
  with pytest.raises(ValueError, match=f'step {step} must be 2'):
    write_steps(tmp_path, [step], resume_step=2)


class Terminal(io.StringIO):
  def isatty(self):
    return True


RECORD = {
  'reward_collected': 0.25,
  'reward_dispatched': 0.125,
  'lag_events': 1.0,
  'tokens_per_s': 1234.5,
}


def shown(tmp_path, stream, monkeypatch, **arguments):
  monkeypatch.setattr(metrics_lib, '_PROGRESS_INTERVAL_S', 0)
  monkeypatch.setattr(metrics_lib, '_PROGRESS_LINE_INTERVAL_S', 0)
  writer = metrics_lib.MetricsWriter(
    tmp_path, total_steps=4, stream=stream, **arguments
  )
  for step in range(2):
    writer.write(step, RECORD)
  writer.close()
  return stream.getvalue()


WORDS = 'reward 0.250, unbiased 0.125, lag 1.0, 1,234 tokens/s, 00:00 left'


def test_progress_on_a_terminal_repaints_one_line(tmp_path, monkeypatch):
  text = shown(tmp_path, Terminal(), monkeypatch)
  assert '\rstep 1/4 |' in text
  assert text.rstrip().endswith(WORDS)
  assert text.count('\n') == 1


def test_progress_elsewhere_is_whole_lines(tmp_path, monkeypatch):
  lines = shown(tmp_path, io.StringIO(), monkeypatch).splitlines()
  assert '\r' not in ''.join(lines)
  assert f'step 1/4, {WORDS}' in lines
  assert f'step 2/4, {WORDS}' in lines
  assert all(line.startswith('step ') for line in lines)


def test_progress_can_be_off(tmp_path, monkeypatch):
  assert shown(tmp_path, io.StringIO(), monkeypatch, progress=False) == ''


def test_progress_starts_at_the_resumed_step(tmp_path):
  write_steps(tmp_path, range(3))
  stream = io.StringIO()
  metrics_lib.MetricsWriter(
    tmp_path, total_steps=4, resume_step=3, stream=stream
  ).close()
  assert stream.getvalue().startswith('step 3/4')
