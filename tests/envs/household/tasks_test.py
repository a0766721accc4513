import json

import pytest

from spopp_jax.envs import household


def test_suite_keeps_order_and_makes_fresh_episodes():
  games = household.generate_games(num_games=3, seed=0)
  suite = household.HouseholdTasks(games)
  assert list(suite.task_ids) == [game.id for game in games]
  first, second = (suite.make(games[1].id) for _ in range(2))
  for command in first.walkthrough:
    first.step(command)
  assert first.won
  assert not second.won
  assert suite.game(games[2].id) is games[2]


def test_suite_rejects():
  games = household.generate_games(num_games=1, seed=0)
  suite = household.HouseholdTasks(games)
  with pytest.raises(KeyError):
    suite.make('missing')
  with pytest.raises(household.GameError, match='occurs twice'):
    household.HouseholdTasks(games * 2)
  with pytest.raises(household.GameError, match='at least one'):
    household.HouseholdTasks([])


def test_load_tasks_draws_own_scenes():
  suite = household.load_tasks(
    num_tasks=4, seed=9, size='medium', task_types=['heat', 'put']
  )
  assert list(suite.task_ids) == [
    'medium-heat-9-0',
    'medium-put-9-1',
    'medium-heat-9-2',
    'medium-put-9-3',
  ]


def test_load_tasks_reads_a_file(tmp_path, golden_rows):
  path = tmp_path / 'games.jsonl'
  path.write_text(
    ''.join(json.dumps(row) + '\n' for row in golden_rows.values())
  )
  assert list(household.load_tasks(path).task_ids) == list(golden_rows)
  suite = household.load_tasks(path, num_tasks=2, task_types=['heat'])
  assert list(suite.task_ids) == ['small-heat-7-3', 'medium-heat-7-3']
  with pytest.raises(household.GameError, match=r'num_tasks \(4\) exceeds'):
    household.load_tasks(path, num_tasks=4, task_types=['heat'])


def test_load_tasks_rejects_nothing_to_draw():
  with pytest.raises(ValueError, match=r'num_games \(0\)'):
    household.load_tasks()
