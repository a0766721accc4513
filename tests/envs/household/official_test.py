import dataclasses
import json
import lzma

import pytest

from spopp_jax.envs import household
from spopp_jax.envs.household import official


@pytest.fixture
def row(golden_rows):
  return dict(golden_rows['medium-heat-7-3'])


def _grammar(task, template='move {o} to {r}'):
  return f'''grammar :: """{{"task": [
    {{"rhs": "Your task is to: {task}"}}]}}""";
    action PutObject {{ template :: "{template}"; }}'''


def _write_game(directory, row, **changes):
  directory.mkdir(parents=True)
  data = {
    'pddl_domain': '(define (domain alfred))',
    'grammar': _grammar(row['task']),
    'pddl_problem': row['pddl_problem'],
    'solvable': True,
    'walkthrough': row['walkthrough'],
  }
  data.update(changes)
  path = directory / 'game.tw-pddl'
  path.write_text(json.dumps(data))
  return path


def test_rows_and_games_convert_back_and_forth(golden_rows):
  for key, row in golden_rows.items():
    game = official.game_from_row(row, 'here')
    assert official.game_from_row(official.game_to_row(game), key) == game


def test_jsonl_plain_and_compressed(tmp_path, golden_rows):
  text = ''.join(json.dumps(row) + '\n' for row in golden_rows.values())
  plain, packed = tmp_path / 'a.jsonl', tmp_path / 'a.jsonl.xz'
  plain.write_text(text + '\n')
  packed.write_bytes(lzma.compress(text.encode()))
  games = household.load_games(plain)
  assert [game.id for game in games] == list(golden_rows)
  assert household.load_games(packed) == games


def test_directory_takes_the_type_from_the_path(tmp_path, row):
  _write_game(tmp_path / 'train' / f'{row["type"]}-Mug-1' / 'trial_2', row)
  _write_game(tmp_path / 'train' / f'{row["type"]}-Mug-1' / 'trial_1', row)
  games = household.load_games(tmp_path)
  assert [game.id for game in games] == [
    f'train/{row["type"]}-Mug-1/trial_{i}' for i in (1, 2)
  ]
  assert games[0].task_type == 'heat'
  assert games[0].task == row['task']
  file = next((tmp_path / 'train').rglob('trial_1/game.tw-pddl'))
  assert household.load_games(file) == [
    dataclasses.replace(games[0], id='trial_1')
  ]


def test_traj_data_beside_the_game_decides_the_type(tmp_path, row):
  path = _write_game(tmp_path / 'pick_and_place_simple-x' / 'trial', row)
  traj = path.with_name('traj_data.json')
  traj.write_text(json.dumps({'task_type': row['type']}))
  assert household.load_games(tmp_path)[0].task_type == 'heat'
  traj.write_text(json.dumps({'task_type': 'pick_up'}))
  with pytest.raises(household.GameError, match=r"game.tw-pddl.*'pick_up'"):
    household.load_games(tmp_path)
  traj.write_text('{')
  with pytest.raises(household.GameError, match=r'traj_data.json: not JSON'):
    household.load_games(tmp_path)


def test_games_that_cannot_be_won_are_left_out(tmp_path, row):
  _write_game(tmp_path / row['type'] / 'a', row, solvable=False, walkthrough=0)
  with pytest.raises(household.GameError, match='holds no games'):
    household.load_games(tmp_path)
  _write_game(tmp_path / row['type'] / 'b', row)
  assert len(household.load_games(tmp_path)) == 1


@pytest.mark.parametrize(
  'changes, reason',
  [
    ({'type': 'pick_up'}, "unknown task type 'pick_up'"),
    ({'type': None}, "'type' is missing"),
    ({'id': ''}, "'id' is missing"),
    ({'task': 3}, "'task' is missing"),
    ({'walkthrough': 'go'}, '"walkthrough" is missing'),
    ({'pddl_problem': None}, "'pddl_problem' is missing"),
  ],
)
def test_bad_rows_name_file_row_and_reason(tmp_path, row, changes, reason):
  path = tmp_path / 'games.jsonl'
  path.write_text(
    json.dumps({**row, 'id': 'first'}) + '\n' + json.dumps({**row, **changes})
  )
  with pytest.raises(household.GameError, match=reason) as caught:
    household.load_games(path)
  assert str(caught.value).startswith(f'{path}, row 2: ')


@pytest.mark.parametrize(
  'old, new, reason',
  [
    ('(:goal', '(:aim', 'section :goal is missing'),
    ('(pickupable ', '(pickupable x', 'unknown entity'),
    ('(pickupable ', '(portable ', 'unknown predicate'),
    ('(ishot ?o)', '(ishot ?x)', 'variable .x is not bound'),
  ],
)
def test_bad_problems_name_file_row_and_reason(tmp_path, row, old, new, reason):
  row['pddl_problem'] = row['pddl_problem'].replace(old, new, 1)
  path = tmp_path / 'games.jsonl'
  path.write_text(json.dumps(row))
  with pytest.raises(household.GameError, match=reason) as caught:
    household.load_games(path)
  assert str(caught.value).startswith(f'{path}, row 1: ')


def test_cut_problem(tmp_path, row):
  row['pddl_problem'] = row['pddl_problem'][:500]
  path = tmp_path / 'games.jsonl'
  path.write_text(json.dumps(row))
  with pytest.raises(household.GameError, match=r'row 1: .* looks cut'):
    household.load_games(path)


def test_cut_rows_and_files(tmp_path, row):
  path = tmp_path / 'games.jsonl'
  path.write_text(json.dumps(row)[:-20])
  with pytest.raises(household.GameError, match='row 1: not JSON'):
    household.load_games(path)
  packed = tmp_path / 'games.jsonl.xz'
  whole = lzma.compress(json.dumps(row).encode())
  packed.write_bytes(whole[:-30])
  with pytest.raises(household.GameError, match='looks cut'):
    household.load_games(packed)
  packed.write_bytes(b'not xz at all')
  with pytest.raises(household.GameError, match='looks cut'):
    household.load_games(packed)
  game = _write_game(tmp_path / row['type'] / 'a', row)
  game.write_bytes(game.read_bytes()[:-20])
  with pytest.raises(household.GameError, match=r'game.tw-pddl: not JSON'):
    household.load_games(tmp_path / row['type'])


def test_file_without_type_task_or_object(tmp_path, row):
  path = _write_game(tmp_path / 'somewhere', row)
  with pytest.raises(household.GameError, match='no task type in the path'):
    household.load_games(path)
  named = _write_game(tmp_path / row['type'], row, grammar='none')
  with pytest.raises(household.GameError, match='tells no task'):
    household.load_games(named)
  named.write_text('[]')
  with pytest.raises(household.GameError, match='expected a JSON object'):
    household.load_games(named)


def test_grammars_before_move_are_refused(tmp_path, row):
  grammar = _grammar(row['task'], template='put {o} in/on {r}')
  path = _write_game(tmp_path / row['type'], row, grammar=grammar)
  with pytest.raises(household.GameError, match=r'alfworld 0\.4\.0 or later'):
    household.load_games(path)


def test_duplicate_ids(tmp_path, row):
  path = tmp_path / 'games.jsonl'
  path.write_text(json.dumps(row) + '\n' + json.dumps(row))
  with pytest.raises(household.GameError, match=r'row 2: id .* occurs twice'):
    household.load_games(path)


def test_wrong_paths(tmp_path):
  with pytest.raises(household.GameError, match='holds no games'):
    household.load_games(tmp_path)
  with pytest.raises(household.GameError, match='no such file'):
    household.load_games(tmp_path / 'missing.jsonl')
  (tmp_path / 'games.csv').write_text('')
  with pytest.raises(household.GameError, match='expected a directory'):
    household.load_games(tmp_path / 'games.csv')
  (tmp_path / 'games.jsonl').write_text('')
  with pytest.raises(household.GameError, match='holds no games'):
    household.load_games(tmp_path / 'games.jsonl')


def test_an_empty_goal_is_refused_with_file_and_row(tmp_path, row):
  start = row['pddl_problem'].index('(:goal')
  row['pddl_problem'] = row['pddl_problem'][:start] + '(:goal (and)))'
  path = tmp_path / 'games.jsonl'
  path.write_text(json.dumps(row))
  with pytest.raises(household.GameError, match=r'row 1.*the goal is empty'):
    household.load_games(path)


@pytest.mark.parametrize('deep', ['[' * 100_000, None])
def test_nesting_without_end_is_refused_with_file_and_row(tmp_path, row, deep):
  if deep is None:
    start = row['pddl_problem'].index('(:goal')
    nested = '(not ' * 5_000 + 'x' + ')' * 5_000
    row['pddl_problem'] = row['pddl_problem'][:start] + f'(:goal {nested}))'
    deep = json.dumps(row)
  path = tmp_path / 'games.jsonl'
  path.write_text(deep)
  with pytest.raises(household.GameError, match='row 1'):
    household.load_games(path)


def test_a_directory_in_place_of_a_game_is_named(tmp_path):
  path = tmp_path / 'pick_and_place_simple-x' / 'game.tw-pddl'
  path.mkdir(parents=True)
  with pytest.raises(
    household.GameError, match=r'game\.tw-pddl: cannot be read'
  ):
    household.load_games(tmp_path)
