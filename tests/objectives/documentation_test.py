"""README's table of methods is true, CONTRIBUTING's example works."""

import pathlib
import re
import sys

import numpy as np
import pytest

from spopp_jax import objectives
from spopp_jax.runner import config as config_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _rows(text, first_column):
  """Rows of the Markdown table whose header starts so, as dicts."""
  lines = iter(text.splitlines())
  header = next(x for x in lines if x.startswith(f'| {first_column} |'))
  names = [cell.strip() for cell in header.strip('|').split('|')]
  next(lines)
  for line in lines:
    if not line.startswith('|'):
      return
    cells = [cell.strip() for cell in line.strip('|').split('|')]
    yield dict(zip(names, cells, strict=True))


def test_the_table_of_methods_is_what_the_recipes_say():
  readme = (ROOT / 'README.md').read_text(encoding='utf-8')
  rows = list(_rows(readme, 'method | baseline'))
  assert sorted(row['method'] for row in rows) == list(
    objectives.objective_names()
  )
  for row in rows:
    config = objectives.config_of(row.pop('method'), {})
    assert row == {name: str(getattr(config, name)) for name in row}
  sources = list(_rows(readme, 'method | equation'))
  assert sorted(row['method'] for row in sources) == list(
    objectives.objective_names()
  )
  for row in sources:
    for path in re.findall('`([a-z_/]+[.]py)`', row['file']):
      assert (ROOT / 'spopp_jax' / path).is_file()


def test_the_package_describes_every_method():
  described = re.findall('^  ([a-z_0-9]+)(?:  |$)', objectives.__doc__, re.M)
  assert sorted(described) == list(objectives.objective_names())


@pytest.fixture
def mine(tmp_path, monkeypatch):
  """The example of CONTRIBUTING as a module of the package."""
  text = (ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8')
  (example,) = re.findall('```python\n(.*?)```', text, re.S)
  (tmp_path / 'mine.py').write_text(example, encoding='utf-8')
  monkeypatch.setattr(
    objectives, '__path__', [*objectives.__path__, str(tmp_path)]
  )
  yield example
  sys.modules.pop('spopp_jax.objectives.mine', None)


def test_the_example_objective_is_one_file_and_one_setting(mine, episodes):
  assert mine.count('\n') <= 30
  assert 'mine' in objectives.objective_names()
  config = config_lib.load_config(
    str(ROOT / 'configs' / 'quickstart.py'), ['objective.name=mine']
  )
  assert config.objective.name == 'mine'
  batch, proximal, current = episodes.pack()
  both = [
    objectives.make_objective(name, {'group_size': 2})
    for name in ('mine', 'grpo')
  ]
  lighter, plain = (objective.advantages(batch) for objective in both)
  np.testing.assert_allclose(lighter, np.where(plain < 0, plain / 2, plain))
  assert (plain < 0).any()
  assert (plain > 0).any()
  weights, _ = both[0].weights(batch, proximal, lighter)
  numerator, count, _ = both[0].loss(current, batch, lighter, weights)
  assert np.isfinite(numerator)
  assert count == batch.action_mask.sum()
