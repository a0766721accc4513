import sys

import benchmark
import benchmark_kernels
import benchmark_numpy
import benchmark_objective_share
import benchmark_report as report
import jax
import numpy as np
import pytest

from spopp_jax import objectives
from spopp_jax.models import parameters
from spopp_jax.runner import config

TINY_MODEL = ('hidden_size=16', 'num_layers=1', 'head_dim=4')
TINY = ('--scale=0.001', '--repeats=1')
WORK = [
  'standardize (Eq. 6)',
  'L_i, the sums over packed tokens',
  'L_i, then standardize',
  'target ESS: exponents and weights',
  *(f'{name}: loss and gradient' for name in benchmark_numpy.OBJECTIVES),
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch, jax_settings):
  """Tiny programs run as fast, and compile in less time."""
  jax.config.update('jax_disable_most_optimizations', True)
  monkeypatch.setattr(report, '_PAUSE_S', 0.0)


@pytest.fixture
def without_torch(monkeypatch):
  monkeypatch.delitem(sys.modules, 'benchmark_torch', raising=False)
  monkeypatch.setitem(sys.modules, 'torch', None)


@pytest.fixture
def clock(monkeypatch):
  """A clock that only `spend` moves."""

  class Clock:
    now = 0.0
    calls = ()

    def spend(self, name, *seconds):
      left = iter(seconds)

      def work():
        self.calls = (*self.calls, name)
        self.now += next(left)
        return (np.ones(4),)

      return work

  clock = Clock()
  monkeypatch.setattr(report.time, 'perf_counter', lambda: clock.now)
  return clock


def cells(output):
  """Returns every table row as its cells, header and rule left out."""
  rows = [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in output.splitlines()
    if line.startswith('|')
  ]
  return [r for r in rows if r[0] not in ('what', 'objective', '---')]


def run(*arguments):
  benchmark.main(['benchmark.py', *arguments])


def test_the_report_has_a_row_for_all_work(
  capsys, monkeypatch, without_torch, tmp_path
):
  tiny = tmp_path / 'tiny.py'
  changes = '; '.join(f'config.model.{size}' for size in TINY_MODEL)
  tiny.write_text(
    'from configs import common\n'
    'def get_config(arg=""):\n'
    f'  config = common.get_config(arg); {changes}; return config\n'
  )
  monkeypatch.setattr(benchmark_objective_share, 'CONFIG', str(tiny))
  monkeypatch.setattr(benchmark_objective_share, 'METHODS', ('spopp',))
  run('kernels', *TINY)
  output, progress = capsys.readouterr()
  *work, share = cells(output)
  assert [row[0] for row in work] == WORK
  assert all(what in progress for what in WORK)
  for row in work:
    _, _, ours, theirs, host, ratio, host_ratio, target = row
    assert float(ours) > 0
    assert float(host) > 0
    assert float(host_ratio) > 0
    assert (theirs, ratio) == ('not installed', '-')
    assert target.startswith('torch >= 1: not measured')
  assert 'numpy/scipy >= 50: ' in work[3][-1]
  assert "torch is not installed: pip install -e '.[benchmark]'" in output
  assert share[:2] == ['spopp', '16 trajectories, [2, 8, 192] tokens']
  assert float(share[2]) < float(share[3])
  assert share[4].endswith('%')
  assert share[5].startswith('< 1%: ')


@pytest.mark.parametrize('library', [report.HOST, report.TORCH])
def test_the_versions_agree(library):
  if library == report.TORCH:
    pytest.importorskip('torch')
  plain = {library: benchmark_kernels.libraries()[library]}
  for comparison in benchmark_kernels.comparisons(0.001, plain):
    ours = jax.tree.leaves(comparison.versions[report.OURS]())
    theirs = jax.tree.leaves(comparison.versions[library]())
    assert report.disagreement(ours, theirs) < 1e-4, comparison.what


def test_every_bound_of_the_objectives_has_something_to_do():
  batch, proximal, current = benchmark_kernels.packed_batch(
    2, np.random.default_rng(0)
  )
  mask = batch.action_mask
  step = np.exp(current - proximal)[mask]
  rollout = np.exp(proximal - batch.behaviour_logprobs)[mask]
  assert (step > 2).any()
  assert (step < 0.8).any()
  assert (rollout > 2).any()
  assert np.square(np.log(rollout)).mean() > 0.04
  sums = np.bincount(
    batch.trajectory_ids[mask], (proximal - batch.behaviour_logprobs)[mask]
  )
  for group in range(2):
    weights = np.exp(sums[batch.group_ids == group])
    assert weights.sum() ** 2 / (weights**2).sum() < 0.85 * 8
  assert sorted(np.bincount(batch.group_ids)) == [8, 8]


def test_other_results_are_not_timed(capsys, monkeypatch, without_torch):
  right = benchmark_numpy.standardize
  monkeypatch.setattr(
    benchmark_numpy, 'standardize', lambda *inputs: 1.001 * right(*inputs)
  )
  with pytest.raises(SystemExit) as caught:
    run('kernels', *TINY)
  assert caught.value.code.startswith(
    'benchmark.py: error: standardize (Eq. 6): numpy/scipy differs by 1.0e-03'
  )
  assert capsys.readouterr().out == ''


def test_disagreement_is_that_of_the_worst_array():
  ours = [np.array(1.0), np.array([3.0, 1.0, 9.0])]
  # |1 - 4| / 4; (|3 - 4| + |1 - 1|) / (4 + 1), the last entry has no partner
  assert report.disagreement(ours, [4.0, [4.0, 1.0]]) == 0.75
  assert report.disagreement(ours[1:], [[4.0, 1.0]]) == 0.2
  assert report.disagreement(ours[:1], [0.75]) == 0.25
  assert report.disagreement(ours, ours) == 0
  assert report.disagreement([np.array([np.nan])], [[1.0]]) == np.inf
  assert report.disagreement([np.zeros(2)], [np.zeros(2)]) == np.inf
  with pytest.raises(ValueError, match='argument 2'):
    report.disagreement(ours, ours[:1])


def test_versions_take_turns_and_ratios_are_of_one_round(clock):
  versions = {
    'a': clock.spend('a', 1.0, 2.0, 10.0),
    'b': clock.spend('b', 3.0, 1.0, 20.0),
  }
  timings = report.timed(versions, 3, {'b': 0.5})
  assert clock.calls == ('a', 'b') * 3
  # b is half of its work: 6, 2, 40 s; ratios 6, 1, 4.
  assert timings['a'] == (2000.0, 1.0)
  assert timings['b'] == (6000.0, 4.0)


@pytest.mark.parametrize(
  'seconds, verdict', [(2.0, 'torch >= 2: pass'), (1.9, 'torch >= 2: short')]
)
def test_a_row_says_whether_the_target_is_met(clock, seconds, verdict):
  versions = {
    report.OURS: clock.spend('ours', 9.0, 1.0),
    report.TORCH: clock.spend('torch', 9.0, seconds),
  }
  row = report.compare(
    report.Comparison('w', 's', versions, {}, {report.TORCH: 2.0}), 1
  )
  milliseconds = f'{1000 * seconds:.2f}'
  assert row == [
    *('w', 's', '1000.00', milliseconds, '-'),
    *(f'{seconds:.2f}', '-', verdict),
  ]


def test_the_objectives_part_is_that_of_the_learner():
  settings = config.load_config(
    benchmark_objective_share.CONFIG, [f'model.{size}' for size in TINY_MODEL]
  )
  model, trajectories = benchmark_objective_share.episodes(settings, 0.01)
  params = parameters.initial(model, 0)
  objective = objectives.make_objective('tetpo', {})
  learner = benchmark_objective_share._learner(settings, model, objective)
  batch = benchmark_objective_share._pack(settings, trajectories, 8)
  current = np.zeros(batch.tokens.shape, np.float32)
  logprobs = learner.score(params, trajectories)
  for i, values in enumerate(logprobs):
    current[np.asarray(batch.trajectory_ids) == i] = values
  current = np.where(batch.action_mask, current, 0)
  _, diagnostics = jax.jit(benchmark_objective_share.objective_step(objective))(
    batch, current
  )
  _, metrics = learner.update(learner.init(params), batch)
  assert diagnostics.keys() <= metrics.keys()
  for name, value in diagnostics.items():
    np.testing.assert_allclose(
      value, metrics[name], rtol=1e-4, atol=1e-5, err_msg=name
    )


def test_help_lists_the_commands_and_their_options(capsys):
  with pytest.raises(SystemExit) as caught:
    run('--help')
  assert caught.value.code == 0
  assert 'kernels' in capsys.readouterr().out
  with pytest.raises(SystemExit):
    run('kernels', '--help')
  text = capsys.readouterr().out
  assert '--repeats' in text
  assert '--scale' in text
  assert 'quickstart' in text


@pytest.mark.parametrize(
  'arguments, words',
  [
    ((), 'COMMAND'),
    (('kernel',), "'kernel'"),
    (('control_plane', '--prompts=-5'), "'-5' must be a whole number above 0"),
    (('kernels', '--repeats=0'), "'0' must be a whole number above 0"),
    (('kernels', '--scale=2'), "'2' must be in (0, 1]"),
    (('kernels', '--scale=nan'), "'nan' must be a finite number"),
  ],
)
def test_what_cannot_be_run_is_refused(arguments, words, capsys):
  with pytest.raises(SystemExit) as caught:
    run(*arguments)
  assert caught.value.code == 2
  assert words in capsys.readouterr().err
