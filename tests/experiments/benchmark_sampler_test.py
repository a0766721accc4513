import sys

import benchmark
import benchmark_libraries
import benchmark_policies
import benchmark_report as report
import benchmark_sampler
import benchmark_worker
import jax
import numpy as np
import pytest

from spopp_jax.models import dense

CONFIG = dense.DecoderConfig(
  vocab_size=32,
  hidden_size=16,
  num_hidden_layers=1,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=8,
  intermediate_size=16,
  rope_theta=1e6,
)
TINY = ('sampler', '--scale=0.01', '--repeats=1')


@pytest.fixture(autouse=True)
def _quick(monkeypatch, jax_settings):
  jax.config.update('jax_disable_most_optimizations', True)
  monkeypatch.setattr(report, '_PAUSE_S', 0.0)
  monkeypatch.setattr(benchmark_policies, 'SIZES', {'micro': CONFIG})
  monkeypatch.setattr(benchmark_sampler, 'SLOTS', (64,))
  monkeypatch.setattr(benchmark_sampler, 'NEW_TOKENS', 6)
  monkeypatch.setattr(benchmark_sampler, 'FIRST_TOKENS', 8)


@pytest.fixture
def without_torch(monkeypatch):
  monkeypatch.delitem(sys.modules, 'benchmark_transformers', raising=False)
  monkeypatch.setitem(sys.modules, 'torch', None)


def run(*arguments):
  benchmark.main(['benchmark.py', *arguments])


def test_what_is_not_installed_is_not_measured(capsys, without_torch):
  run(*TINY)
  output, _ = capsys.readouterr()
  assert "torch: pip install -e '.[benchmark]'" in output
  tables = [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in output.splitlines()
    if line.startswith('| ') and 'micro' in line
  ]
  decoded, episodes = tables
  assert decoded[1] == 'micro (d = 16, 1 layers, 32 ids), 2 slots'
  assert float(decoded[2].replace(',', '')) > 0
  assert decoded[3:7] == ['not measured', '-'] * 2
  assert decoded[7].endswith('tunix >= 1: not measured')
  assert episodes[0] == '2 turns of 5 tokens'
  assert float(episodes[4]) > 0  # kept / fed again
  assert episodes[5:7] == ['not measured', '-']
  assert episodes[7].startswith('fed again >= 5: ')


def test_transformers_samples_what_the_engine_samples():
  pytest.importorskip('torch')
  with benchmark_libraries.loaded('micro', CONFIG, '') as libraries:
    for versions in (
      benchmark_sampler.decoding(libraries, 3),
      benchmark_sampler.turns(libraries, 2, 3),
    ):
      assert benchmark_libraries.HUGGING_FACE in versions
      benchmark_sampler.check('work', versions)


def test_feeding_again_gives_the_tokens_of_a_cache(without_torch):
  with benchmark_libraries.loaded('micro', CONFIG, '') as libraries:
    versions = benchmark_sampler.turns(libraries, 2, 3)
  benchmark_sampler.check('work', versions)
  (tokens,) = versions[report.OURS].result()
  assert tokens.shape == (2, 3 * benchmark_sampler.ACTION_TOKENS)
  # The id that ends a turn never comes, others vary.
  assert (tokens != benchmark_policies.unused_id(CONFIG)).all()
  assert len(np.unique(tokens)) > 3


def test_other_tokens_are_not_timed():
  version = lambda *rows: benchmark_libraries.returning(
    lambda: (np.array(rows),)
  )
  ours = {report.OURS: version([1, 2], [3, 4])}
  benchmark_sampler.check('w', ours | {'same': version([1, 2], [3, 4])})
  with pytest.raises(report.Disagreement, match=r'w: b .* in 1 of 2 slots'):
    benchmark_sampler.check('w', ours | {'b': version([1, 2], [3, 5])})
  with pytest.raises(report.Disagreement, match=r'c .* in their number'):
    benchmark_sampler.check('w', ours | {'c': version([1, 2])})


def test_a_worker_that_is_none_is_reported(tmp_path, capsys):
  program = tmp_path / 'program.py'
  program.write_text('raise SystemExit(3)')
  with (
    benchmark_worker.started(sys.executable, program) as worker,
    pytest.raises(benchmark_worker.WorkerError, match="ended at 'load'"),
  ):
    worker.ask('load', 'x')


def test_a_worker_answers(tmp_path):
  program = tmp_path / 'program.py'
  program.write_text(
    'import sys\n'
    'from multiprocessing import connection\n'
    'requests = connection.Connection(int(sys.argv[1]))\n'
    'name, arguments = requests.recv()\n'
    "requests.send(('ok', [name, *arguments]))\n"
    'requests.recv()\n'
    "requests.send(('ok', [(bytes([1, 0, 2, 0]), '<i2', (1, 2))]))\n"
  )
  with benchmark_worker.started(sys.executable, program) as worker:
    assert worker.ask('add', 1, 2) == ['add', 1, 2]
    np.testing.assert_array_equal(worker.result(), [[[1, 2]]])
