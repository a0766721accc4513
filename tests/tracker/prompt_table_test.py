import numpy as np
import pytest

from spopp_jax.tracker import prompt_table


def _table(task_ids=('put-1', 'put-2')):
  return prompt_table.PromptTable(task_ids, np.ones(2), np.array([1.0, 3.0]))


def test_values_by_name_in_any_order_with_repeats():
  values = _table().values(['put-2', 'put-1', 'put-2'])
  np.testing.assert_array_equal(values, [0.25, 0.5, 0.25])
  assert values.dtype == np.float64


def test_unknown_task_names_the_nearest():
  with pytest.raises(ValueError, match=r"'put-3' .* nearest .* 'put-"):
    _table().values(['put-3'])


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
  np.testing.assert_array_equal(table.values(['a']), [0.5])


def test_state_of_other_tasks_is_refused():
  state = _table().state_dict()
  assert all(isinstance(array, np.ndarray) for array in state.values())
  with pytest.raises(ValueError, match='other tasks'):
    _table(['put-2', 'put-1']).load_state_dict(state)


@pytest.mark.parametrize('reward', [-1.0, 1.5, np.nan, np.inf])
def test_reward_outside_the_unit_interval_names_task_and_reward(reward):
  with pytest.raises(ValueError, match=rf"reward {reward} of task 'put-1'"):
    prompt_table.check_reward('put-1', reward)
