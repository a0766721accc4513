import json

import pytest

from spopp_jax.runner import config as config_lib
from spopp_jax.runner import run_directory


def load(tmp_path, *overrides):
  return config_lib.load_config(
    'configs/quickstart.py',
    [f'run.directory={tmp_path / "runs"}', 'run.name=mine', *overrides],
  )


def resumed(tmp_path, *overrides):
  return run_directory.prepare(load(tmp_path, 'run.resume=True', *overrides))


def refused(tmp_path, *overrides):
  with pytest.raises(config_lib.ConfigError) as caught:
    resumed(tmp_path, *overrides)
  return str(caught.value)


@pytest.fixture(autouse=True)
def _checkout(monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)


def test_a_new_run_records_its_settings(tmp_path):
  path = run_directory.prepare(load(tmp_path, 'run.steps=3'))
  assert path == tmp_path / 'runs' / 'mine'
  recorded = json.loads((path / 'config.json').read_text())
  assert recorded['run']['steps'] == 3
  assert recorded['objective']['clip_low'] is None
  assert recorded['environment']['task_types'] == ['put']


def test_earlier_runs_are_kept_and_the_new_name_is_said(tmp_path, caplog):
  first = run_directory.prepare(load(tmp_path))
  (first / 'metrics.jsonl').write_text('kept')
  assert caplog.text == ''
  assert run_directory.prepare(load(tmp_path)).name == 'mine-2'
  assert run_directory.prepare(load(tmp_path)).name == 'mine-3'
  assert (first / 'metrics.jsonl').read_text() == 'kept'
  assert '--config.run.name=mine-3' in caplog.text


def test_a_resumed_run_is_found_and_left_as_it_was(tmp_path):
  path = run_directory.prepare(load(tmp_path))
  before = (path / 'config.json').read_bytes()
  assert resumed(tmp_path, 'run.steps=500') == path
  assert (path / 'config.json').read_bytes() == before
  assert [p.name for p in path.parent.iterdir()] == ['mine']


def test_a_run_that_is_not_there_is_named_with_those_that_are(tmp_path):
  assert 'holds nothing' in refused(tmp_path)
  assert not (tmp_path / 'runs').exists()
  run_directory.prepare(load(tmp_path))
  (tmp_path / 'runs' / '.compilation_cache').mkdir()
  message = refused(tmp_path, 'run.name=yours')
  assert str(tmp_path / 'runs' / 'yours') in message
  assert 'holds mine.' in message
  assert '--config.run.name=' in message
  assert not (tmp_path / 'runs' / 'yours').exists()


@pytest.mark.parametrize(
  'override, words',
  [
    ('seed=1', ['seed 0', '1']),
    ('objective.name=spo', ["objective.name 'spopp'", "'spo'"]),
    ('evidence.retention=0.5', ['evidence.retention None', '0.5']),
    ('environment.seed=1', ['environment.seed 0']),
    ("environment.task_types=('heat',)", ["['put']", "['heat']"]),
    ('model.num_layers=7', ['model.num_layers', '7']),
    ('lora.alpha=1.0', ['lora.alpha 32.0', '1.0']),
  ],
)
def test_another_method_or_other_tasks_are_refused(tmp_path, override, words):
  run_directory.prepare(load(tmp_path))
  message = refused(tmp_path, override)
  for word in (*words, 'config.json', 'without --config.run.resume=True'):
    assert word in message


@pytest.mark.parametrize(
  'override',
  [
    'optimizer.learning_rate=1e-5',
    'run.progress=False',
    "sampler.addresses=('127.0.0.1:1',)",
  ],
)
def test_what_the_saved_state_does_not_depend_on_may_change(tmp_path, override):
  run_directory.prepare(load(tmp_path))
  resumed(tmp_path, override)


@pytest.mark.parametrize('text', [None, '{'])
def test_a_directory_that_is_no_run_is_named(tmp_path, text):
  path = run_directory.prepare(load(tmp_path)) / 'config.json'
  path.unlink()
  if text:
    path.write_text(text)
  assert str(path) in refused(tmp_path)
