import pathlib
import subprocess
import sys

import numpy as np
import pytest

from spopp_jax.evaluation import curves, plots

ROOT = pathlib.Path(__file__).resolve().parents[2]


def is_png(path):
  return path.read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'


def test_a_run_shows_both_rewards_and_their_trailing_means(tmp_path):
  rng = np.random.default_rng(0)
  collected, dispatched = rng.uniform(size=(2, 12))
  figure = plots.reward_curve(
    tmp_path / 'curve.png', collected=collected, dispatched=dispatched
  )
  assert is_png(tmp_path / 'curve.png')
  (axes,) = figure.axes
  shown = [line.get_ydata() for line in axes.lines]
  expected = [
    collected,
    curves.trailing_mean(collected),
    dispatched,
    curves.trailing_mean(dispatched),
  ]
  for got, wanted in zip(shown, expected, strict=True):
    np.testing.assert_array_equal(got, wanted)
  labels = [text.get_text() for text in axes.get_legend().get_texts()]
  assert labels == ['collected batch', 'all dispatched (unbiased)']


def test_a_comparison_shows_replicates_thin_and_the_mean_thick(tmp_path):
  rng = np.random.default_rng(0)
  runs = {'spo': rng.uniform(size=(2, 6)), 'spopp': [rng.uniform(size=7)] * 2}
  runs = {name: list(curve) for name, curve in runs.items()}
  runs['spopp'].append(rng.uniform(size=5))
  figure = plots.comparison(tmp_path / 'comparison.png', runs)
  assert is_png(tmp_path / 'comparison.png')
  (axes,) = figure.axes
  lines = axes.lines
  assert len(lines) == 2 + 1 + 3 + 1
  mean, thin = lines[-1], lines[3:6]
  smooth = [curves.trailing_mean(run)[:5] for run in runs['spopp']]
  np.testing.assert_allclose(mean.get_ydata(), np.mean(smooth, axis=0))
  assert all(line.get_linewidth() < mean.get_linewidth() for line in thin)
  assert {line.get_color() for line in thin} == {mean.get_color()}
  labels = [text.get_text() for text in axes.get_legend().get_texts()]
  assert labels == ['spo', 'spopp']


def test_nothing_to_show_is_refused(tmp_path):
  with pytest.raises(ValueError, match='spo has no replicates'):
    plots.comparison(tmp_path / 'x.png', {'spo': []})
  with pytest.raises(ValueError, match='0 steps'):
    plots.reward_curve(tmp_path / 'x.png', collected=[], dispatched=[])
  assert not (tmp_path / 'x.png').exists()


def test_importing_the_package_does_not_import_matplotlib_or_jax():
  program = (
    'import sys\n'
    'from spopp_jax.evaluation import curves, paired, passk, plots\n'
    'print(sorted({"matplotlib", "jax"} & set(sys.modules)))\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', program],
    env={'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=60,
    check=True,
  )
  assert done.stdout == '[]\n'
