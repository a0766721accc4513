import json

import compare
import numpy as np
import pytest
import tiny_world

from spopp_jax.runner import config

CONFIG = str(tiny_world.ROOT / 'configs' / 'household_compare.py')
# Area and final five of a constant curve are the constant.
REWARDS = {
  'SPO': {0: np.full(6, 0.5), 1: np.full(6, 0.4)},
  'SPO++': {0: np.full(6, 0.6), 1: np.full(6, 0.7)},
  'SPO++, trajectory measure': {0: np.full(6, 0.6), 1: np.full(6, 0.3)},
}
SUCCESS = {
  'SPO': {0: 0.5, 1: 0.5},
  'SPO++': {0: 0.7, 1: 0.9},
  'SPO++, trajectory measure': {0: 0.5, 1: 0.4},
}


def row(table, name):
  (line,) = [r for r in table.splitlines() if r.startswith(f'| {name} |')]
  return [cell.strip() for cell in line.strip('|').split('|')][1:]


def test_the_table_gives_levels_and_paired_differences():
  table = compare.render_table(REWARDS, SUCCESS)
  # mean .65, sample sd of (.6, .7) = .0707; success .8, sd .1414
  assert row(table, 'SPO++') == [
    '0.650 +- 0.071',
    '0.650 +- 0.071',
    '0.800 +- 0.141',
  ]
  # differences +10 and +30 points: mean 20, sample sd 14.1
  assert row(table, 'SPO++ - SPO') == [
    '+20.0 +- 14.1 (2/2)',
    '+20.0 +- 14.1 (2/2)',
    '+30.0 +- 14.1 (2/2)',
  ]
  # 0 and +40 points; success +20 and +50
  assert row(table, 'SPO++ - SPO++, trajectory measure') == [
    '+20.0 +- 28.3 (1/2)',
    '+20.0 +- 28.3 (1/2)',
    '+35.0 +- 21.2 (2/2)',
  ]


def test_one_replicate_has_no_spread():
  one = {method: {0: runs[0]} for method, runs in REWARDS.items()}
  after = {method: {0: values[0]} for method, values in SUCCESS.items()}
  table = compare.render_table(one, after)
  assert row(table, 'SPO')[0] == '0.500'
  assert row(table, 'SPO++ - SPO')[0] == '+10.0 (1/1)'


@pytest.mark.parametrize('method', list(compare.METHODS))
def test_methods_differ_in_the_objective_alone(method):
  base = config.load_config(CONFIG)
  settings = compare.matched(base, 'runs', 7, method, start=None)
  config.validate_config(settings)
  changed = {
    name
    for name, value in config.leaf_values(settings).items()
    if value != config.leaf_values(base)[name]
  }
  assert changed - {'objective.name', 'objective.measure'} <= {
    'seed',
    'run.directory',
    'run.name',
  }
  assert settings.seed == 7


def test_later_methods_start_where_the_first_did(tmp_path):
  base = config.load_config(CONFIG)
  settings = compare.matched(base, tmp_path, 0, 'SPO++', start=tmp_path / 'a')
  assert settings.cold_start.policy == str(tmp_path / 'a' / 'policy')
  assert settings.offline.path == str(tmp_path / 'a' / 'offline.json')


def test_curves_are_written_as_they_were_compared(tmp_path):
  compare.write_curves(tmp_path / 'curves.json', REWARDS, SUCCESS)
  content = json.loads((tmp_path / 'curves.json').read_text())
  assert content['SPO++']['1'] == {
    'reward_dispatched': [0.7] * 6,
    'success_after': 0.9,
  }
