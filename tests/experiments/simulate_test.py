"""The script prints both tables and draws."""

import simulate


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
