"""The script prints both tables and draws."""

import logging

import pytest
import simulate


@pytest.fixture(autouse=True)
def _log_level():
  """The script speaks of errors alone; other tests want warnings too."""
  logger = logging.getLogger('spopp_jax')
  level = logger.level
  yield
  logger.setLevel(level)


def test_tables_and_plot(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(simulate, 'POLICIES', simulate.POLICIES[:1])
  path = tmp_path / 'speed.png'
  simulate.main(
    [
      '--batch=8',
      '--group=4',
      '--steps=2',
      '--seeds=1',
      f'--plot={path}',
    ]
  )
  lines = capsys.readouterr().out.splitlines()
  assert len([line for line in lines if line.startswith('| drain')]) == 8
  assert '| drain, max_lag 0 | 4 | 1 |' in lines[2]
  assert '| 1.00x |' in lines[2]
  assert path.read_bytes()[1:4] == b'PNG'


@pytest.mark.parametrize(
  'option', ['--seeds=0', '--group=0', '--median_s=-1', '--sigma=nan']
)
def test_nonsense_is_refused(option, capsys):
  with pytest.raises(SystemExit, match='2'):
    simulate.main([option])
  assert f'argument {option.split("=")[0]}' in capsys.readouterr().err
