import numpy as np
import pytest

from spopp_jax.tracker import task_index


class _Colliding(str):
  """A name that shares its hash with all the others of its length."""

  __slots__ = ()

  def __hash__(self):
    return len(self)


def test_rows_of_many_tasks_in_any_order_with_repeats():
  task_ids = [f'task-{i}' for i in range(1000)]
  wanted = np.random.default_rng(0).integers(1000, size=5000)
  rows = task_index.TaskIndex(task_ids).rows([task_ids[i] for i in wanted])
  np.testing.assert_array_equal(rows, wanted)
  assert rows.dtype == np.int64


def test_tasks_that_share_a_hash_are_told_apart():
  task_ids = [_Colliding(name) for name in ('bb', 'a', 'aa', 'b', 'ab', 'c')]
  index = task_index.TaskIndex(task_ids)
  np.testing.assert_array_equal(index.rows(task_ids[::-1]), range(6)[::-1])
  for unknown in ('ba', 'd', 'ccc', ''):
    with pytest.raises(ValueError, match=f"task id '{unknown}' is not among"):
      index.rows([task_ids[0], _Colliding(unknown)])


def test_a_repeat_among_tasks_that_share_a_hash_is_refused():
  task_ids = [_Colliding(name) for name in ('bb', 'aa', 'a', 'ab', 'aa')]
  with pytest.raises(ValueError, match=r"'aa' stands twice"):
    task_index.TaskIndex(task_ids)


def test_unknown_tasks_are_named_wherever_their_hash_lies():
  index = task_index.TaskIndex(['put-1', 'put-2'])
  for i in range(100):
    with pytest.raises(ValueError, match=rf"'x{i}' is not among the 2 tasks"):
      index.rows(['put-2', f'x{i}'])
  with pytest.raises(ValueError, match=r"nearest known one is 'put-"):
    index.rows(['put-3'])


def test_no_name_is_sought_among_very_many():
  index = task_index.TaskIndex([f'put-{i}' for i in range(10_001)])
  with pytest.raises(ValueError, match=r'10001 tasks with evidence$'):
    index.rows(['put-x'])


def test_no_task_is_refused_and_none_asked_for_is_nothing():
  with pytest.raises(ValueError, match='0 task ids'):
    task_index.TaskIndex([])
  assert task_index.TaskIndex(['a']).rows([]).shape == (0,)


def test_the_fingerprint_depends_on_names_and_order_alone():
  many = [f'task-{i}' for i in range(70_000)]
  prints = [
    task_index.TaskIndex(ids).fingerprint.tobytes()
    for ids in (many, tuple(many), many[::-1], many[:-1], [*many[:-1], 'x'])
  ]
  assert prints[0] == prints[1]
  assert len(set(prints)) == 4
