import numpy as np
import pytest

from spopp_jax.tracker import prompt_table


def _table(task_ids=('put-1', 'put-2'), **kwargs):
  return prompt_table.PromptTable(
    task_ids, np.ones(2), np.array([1.0, 3.0]), **kwargs
  )


def test_values_by_name_in_any_order_with_repeats():
  table = _table()
  values = table.read(table.rows(['put-2', 'put-1', 'put-2']))
  np.testing.assert_array_equal(values, [0.25, 0.5, 0.25])
  assert values.dtype == np.float64


def test_unknown_task_names_the_nearest():
  with pytest.raises(ValueError, match=r"'put-3' .* nearest .* 'put-"):
    _table().rows(['put-3'])


def test_repeated_task_is_refused():
  with pytest.raises(ValueError, match=r"'a' stands twice"):
    _table(['a', 'a'])


@pytest.mark.parametrize(
  'success, failure, words',
  [
    ([1, -1], [1, 1], r"success of task 'b' is -1"),
    ([1, 1], [np.nan, 1], r"failure of task 'a' is nan"),
    ([1, 0], [1, 0], r"'b' has no evidence"),
    ([1], [1, 1], r'success has shape \(1,\)'),
  ],
)
def test_unsound_evidence_is_refused(success, failure, words):
  with pytest.raises(ValueError, match=words):
    prompt_table.PromptTable(['a', 'b'], np.array(success), np.array(failure))


def test_the_table_owns_its_arrays():
  success = np.ones(2)
  table = prompt_table.PromptTable(['a', 'b'], success, np.ones(2))
  success[0] = 99
  table.state_dict()['success'][0] = 99
  np.testing.assert_array_equal(table.read([0]), [0.5])


def test_state_of_other_tasks_is_refused():
  state = _table().state_dict()
  assert all(isinstance(array, np.ndarray) for array in state.values())
  with pytest.raises(ValueError, match='other tasks'):
    _table(['put-2', 'put-1']).load_state_dict(state)


@pytest.mark.parametrize('reward', [-1.0, 1.5, np.nan, np.inf])
def test_reward_outside_the_unit_interval_names_task_and_reward(reward):
  with pytest.raises(ValueError, match=rf"reward {reward} of task 'put-2'"):
    _table().checked_rewards(np.array([0, 1]), [1.0, reward])


def test_rewards_in_the_unit_interval_pass():
  rewards = _table().checked_rewards(np.array([0, 1, 1]), [0, 1, 0.25])
  np.testing.assert_array_equal(rewards, [0, 1, 0.25])
  assert rewards.dtype == np.float64


@pytest.mark.parametrize('row', [-1, 2])
def test_rows_that_do_not_exist_are_refused(row):
  with pytest.raises(ValueError, match=rf'row {row} does not exist.*\[0, 2\)'):
    _table().read([0, row])
  with pytest.raises(ValueError, match='dtype float64'):
    _table().read([0.0])
  assert _table().read([]).shape == (0,)


def test_files_hold_what_memory_would(tmp_path):
  table = _table(directory=tmp_path / 'evidence')
  assert isinstance(table.success, np.memmap)
  table.success[0] = 3
  table.success.flush()
  for name, want in (('success', [3, 1]), ('failure', [1, 3])):
    found = np.load(tmp_path / 'evidence' / f'{name}.npy')
    np.testing.assert_array_equal(found, want)
  state = table.state_dict()
  table.success[0] = 5
  assert type(state['success']) is np.ndarray
  np.testing.assert_array_equal(state['success'], [3, 1])
  table.load_state_dict(state)
  np.testing.assert_array_equal(table.read([0, 1]), [0.75, 0.25])
  assert isinstance(table.success, np.memmap)


def test_an_unsound_state_changes_nothing():
  table = _table()
  state = {**table.state_dict(), 'failure': np.array([1.0, -1.0])}
  state['success'][:] = 7
  with pytest.raises(ValueError, match=r"failure of task 'put-2' is -1"):
    table.load_state_dict(state)
  np.testing.assert_array_equal(table.read([0, 1]), [0.5, 0.25])


def _five():
  return prompt_table.PromptTable(list('abcde'), np.ones(5), np.ones(5))


def test_a_first_reader_sees_every_row_and_then_what_changed():
  table = _five()
  rows, version = table.changed_since(-1)
  np.testing.assert_array_equal(rows, range(5))
  rows, version = table.changed_since(version)
  assert rows.shape == (0,)
  table.mark_changed(np.array([3, 1]))
  table.mark_changed(np.array([1]))
  rows, later = table.changed_since(version)
  np.testing.assert_array_equal(rows, [1, 3])
  table.mark_changed(np.array([4]))
  # Readers do not take changes away from each other.
  np.testing.assert_array_equal(table.changed_since(later)[0], [4])
  np.testing.assert_array_equal(table.changed_since(version)[0], [1, 3, 4])
  np.testing.assert_array_equal(table.changed_since(-1)[0], range(5))


def test_more_changes_than_rows_are_all_the_rows():
  table = _five()
  _, version = table.changed_since(-1)
  versions = []
  for row in (0, 1, 2, 0, 1, 2):
    table.mark_changed(np.array([row]))
    versions.append(table.changed_since(version)[1])
  np.testing.assert_array_equal(table.changed_since(version)[0], range(5))
  np.testing.assert_array_equal(table.changed_since(versions[0])[0], [0, 1, 2])
  np.testing.assert_array_equal(table.changed_since(versions[3])[0], [1, 2])


def test_a_loaded_state_changes_every_row():
  table = _five()
  table.mark_changed(np.array([2]))
  _, version = table.changed_since(-1)
  table.load_state_dict(table.state_dict())
  rows, version = table.changed_since(version)
  np.testing.assert_array_equal(rows, range(5))
  table.mark_changed(np.array([2]))
  np.testing.assert_array_equal(table.changed_since(version)[0], [2])
