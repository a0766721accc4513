import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spopp_jax.learner import checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[2]


class State(NamedTuple):
  # Not in alphabetical order: fields must come back under their own names.
  weights: dict[str, Any]
  opt_state: Any
  count: Any


def make_arrays(seed=0):
  rng = np.random.default_rng(seed)
  weights = {
    'layers.0.w': jnp.asarray(rng.normal(size=(3, 5)), jnp.float32),
    'norm': jnp.asarray(rng.normal(size=5), jnp.bfloat16),
  }
  state = State(weights, optax.adamw(1e-3).init(weights), jnp.int32(seed + 7))
  return {
    'state': state,
    'published': {k: np.asarray(v) for k, v in weights.items()},
    'evidence': {
      'success': rng.normal(size=11) / 3,
      'event': np.array([2**62 + 1, -1]),
      'seen': np.array([True, False]),
      'pending': np.zeros((0, 4)),
      'stored': {'a': np.float32(rng.normal(size=2)), 'scalar': np.array(0.1)},
    },
    'nothing': {},
  }


EXTRA = {
  'rng': np.random.default_rng(5).bit_generator.state,
  'tickets': [{'request_id': 'é', 'value': 1 / 3}],
  'none': None,
}


def abstract(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def assert_same(got, expected):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert type(a) is type(b)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def like(arrays):
  return {'state': abstract(arrays['state'])}


def test_every_bit_comes_back(tmp_path):
  arrays = make_arrays()
  assert arrays['evidence']['success'].dtype == np.float64
  checkpoint.CheckpointStore(tmp_path).save(3, arrays, EXTRA)
  step, got, extra = checkpoint.CheckpointStore(tmp_path).restore(like(arrays))
  assert step == 3
  assert_same(got, arrays)
  assert extra == EXTRA
  assert extra['rng']['state']['state'] > 2**64


def test_numpy_like_gives_numpy(tmp_path):
  arrays = {'evidence': {'success': np.arange(3) / 7}}
  store = checkpoint.CheckpointStore(tmp_path)
  store.save(0, arrays, {})
  assert_same(store.restore(arrays).arrays, arrays)


def test_save_restore_save_restore(tmp_path):
  arrays = make_arrays()
  first = checkpoint.CheckpointStore(tmp_path / 'first')
  first.save(1, arrays, EXTRA)
  restored = first.restore(like(arrays))
  second = checkpoint.CheckpointStore(tmp_path / 'second')
  second.save(1, restored.arrays, restored.extra)
  again = second.restore(like(arrays))
  assert_same(again.arrays, arrays)
  assert again.extra == EXTRA


def test_a_save_does_not_alias_later_changes(tmp_path):
  success = np.ones(3)
  store = checkpoint.CheckpointStore(tmp_path)
  store.save(1, {'evidence': {'success': success}}, {})
  success[:] = 0
  np.testing.assert_array_equal(
    store.restore({}).arrays['evidence']['success'], 1
  )


def test_newest_are_kept_and_any_kept_one_restores(tmp_path):
  store = checkpoint.CheckpointStore(tmp_path, keep=2)
  assert store.latest_step() is None
  for step in (2, 9, 10):
    store.save(step, {'a': {'x': np.array([step])}}, {'step': step})
  assert store.steps() == [9, 10]
  assert store.latest_step() == 10
  assert store.restore({}).extra == {'step': 10}
  assert store.restore({}, step=9).arrays['a']['x'] == 9
  assert sorted(path.name for path in tmp_path.iterdir()) == ['10', '9']


def test_a_step_is_not_saved_twice_or_out_of_order(tmp_path):
  store = checkpoint.CheckpointStore(tmp_path)
  store.save(5, {}, {})
  for step in (4, 5):
    with pytest.raises(checkpoint.CheckpointError, match=r'run\.name'):
      store.save(step, {}, {})


def test_after_clear_a_run_starts_anew(tmp_path):
  store = checkpoint.CheckpointStore(tmp_path)
  store.clear()
  store.save(5, {}, {})
  store.clear()
  assert store.latest_step() is None
  store.save(1, {}, {})
  assert store.steps() == [1]


def test_an_unfinished_save_does_not_count_and_is_replaced(tmp_path):
  store = checkpoint.CheckpointStore(tmp_path)
  store.save(1, {'a': {'x': np.ones(2)}}, {})
  shutil.copytree(tmp_path / '1', tmp_path / '2.partial')
  assert store.steps() == [1]
  store.save(2, {'a': {'x': np.zeros(2)}}, {})
  assert sorted(path.name for path in tmp_path.iterdir()) == ['1', '2']
  assert not store.restore({}).arrays['a']['x'].any()


@pytest.mark.parametrize('directory', ['none', 'empty'])
def test_no_checkpoint_says_what_to_do(tmp_path, directory):
  (tmp_path / 'empty').mkdir()
  store = checkpoint.CheckpointStore(tmp_path / directory)
  with pytest.raises(
    checkpoint.CheckpointError, match=f'{directory}.*start without'
  ):
    store.restore({})


def test_a_step_that_is_not_there_lists_those_that_are(tmp_path):
  store = checkpoint.CheckpointStore(tmp_path)
  store.save(4, {}, {})
  with pytest.raises(checkpoint.CheckpointError, match=r'step 3.*\[4\]'):
    store.restore({}, step=3)


def _cut(path):
  content = path.read_bytes()
  path.write_bytes(content[: len(content) // 2])


def _flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) * 2 // 3] ^= 1
  path.write_bytes(bytes(content))


@pytest.mark.parametrize('harm', [_cut, _flip, pathlib.Path.unlink])
def test_any_damaged_file_is_named(tmp_path, harm):
  arrays = make_arrays()
  whole = tmp_path / 'whole'
  store = checkpoint.CheckpointStore(whole)
  store.save(1, arrays, EXTRA)
  store.save(2, arrays, EXTRA)
  files = [path for path in (whole / '2').rglob('*') if path.is_file()]
  assert len(files) > 5
  for number, path in enumerate(files):
    directory = tmp_path / str(number)
    shutil.copytree(whole, directory)
    broken = directory / path.relative_to(whole)
    harm(broken)
    damaged = checkpoint.CheckpointStore(directory)
    with pytest.raises(checkpoint.CheckpointError) as caught:
      damaged.restore(like(arrays))
    assert str(broken) in str(caught.value)
    assert f'remove {directory / "2"} and step 1' in str(caught.value)
    shutil.rmtree(directory / '2')
    assert_same(damaged.restore(like(arrays)).arrays, arrays)


def test_the_only_checkpoint_damaged_says_start_anew(tmp_path):
  store = checkpoint.CheckpointStore(tmp_path)
  store.save(1, {}, {})
  _cut(tmp_path / '1' / 'contents.json')
  with pytest.raises(checkpoint.CheckpointError, match='start without'):
    store.restore({})


@pytest.mark.parametrize(
  'change, words',
  [
    (
      lambda s: s._replace(count=jnp.zeros(2, jnp.int32)),
      'state/count is int32[] there and int32[2] here',
    ),
    (
      lambda s: s._replace(count=jnp.float32(0)),
      'state/count is int32[] there and float32[] here',
    ),
    (
      lambda s: s._replace(weights={'norm': s.weights['norm']}),
      'state/weights/layers.0.w is float32[3, 5] there and absent here',
    ),
    (
      lambda s: s._replace(weights={**s.weights, 'new': jnp.zeros(1)}),
      'state/weights/new is absent there and float32[1] here',
    ),
  ],
)
def test_another_model_is_refused_by_leaf(tmp_path, change, words):
  arrays = make_arrays()
  store = checkpoint.CheckpointStore(tmp_path)
  store.save(1, arrays, {})
  with pytest.raises(checkpoint.CheckpointError, match=re.escape(words)):
    store.restore({'state': abstract(change(arrays['state']))})


def test_a_part_that_is_not_plain_needs_like(tmp_path):
  store = checkpoint.CheckpointStore(tmp_path)
  store.save(1, make_arrays(), {})
  with pytest.raises(ValueError, match="'state' must be named"):
    store.restore({})


def test_a_part_that_is_not_there_is_refused(tmp_path):
  store = checkpoint.CheckpointStore(tmp_path)
  store.save(1, {}, {})
  with pytest.raises(checkpoint.CheckpointError, match='more/x is absent'):
    store.restore({'more': {'x': np.zeros(1)}})


@pytest.mark.parametrize(
  'extra',
  [
    {'rng': (1, 2)},
    {'rng': {1: 2}},
    {'rng': np.arange(2)},
    {'rng': float('nan')},
  ],
)
def test_extra_that_json_would_change_is_refused(tmp_path, extra):
  store = checkpoint.CheckpointStore(tmp_path)
  with pytest.raises(ValueError, match=r"extra\['rng'\]"):
    store.save(1, {}, extra)
  assert store.latest_step() is None


@pytest.mark.parametrize(
  'part, words',
  [({'n': 3}, 'a/n must be an array'), ({'x/y': np.ones(1)}, 'must not')],
)
def test_what_is_no_array_is_refused(tmp_path, part, words):
  with pytest.raises(ValueError, match=words):
    checkpoint.CheckpointStore(tmp_path).save(1, {'a': part}, {})


def test_a_checkpoint_cannot_be_kept_zero_times(tmp_path):
  with pytest.raises(ValueError, match=r'keep \(0\)'):
    checkpoint.CheckpointStore(tmp_path, keep=0)


SAVER = """
import sys
import numpy as np
from spopp_jax.learner import checkpoint
store = checkpoint.CheckpointStore(sys.argv[1])
print('ready', flush=True)
for step in range(10_000):
  store.save(step, {'a': {'x': np.full(200_000, step / 3)}}, {'step': step})
  print(step, flush=True)
"""


def kill_while_saving(directory, delay_steps, delay_s):
  saver = subprocess.Popen(
    [sys.executable, '-c', SAVER, str(directory)],
    env={'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )
  try:
    for line in saver.stdout:
      if line.strip() == str(delay_steps):
        break
    with pytest.raises(subprocess.TimeoutExpired):
      saver.wait(delay_s)
  finally:
    saver.send_signal(signal.SIGKILL)
    rest = saver.communicate(timeout=30)[0].split()
  return int(rest[-1]) if rest else delay_steps


def check_survivor(directory, announced):
  store = checkpoint.CheckpointStore(directory)
  step, arrays, extra = store.restore({})
  # The newest may be committed and not yet announced.
  assert step in (announced, announced + 1)
  assert extra == {'step': step}
  np.testing.assert_array_equal(
    arrays['a']['x'], np.full(200_000, step / 3), strict=True
  )
  store.save(step + 1, {'a': {'x': np.zeros(1)}}, {})
  assert store.steps() == [step, step + 1]
  assert not list(directory.glob('*.partial'))


def test_sigkill_while_saving_leaves_the_previous_one(tmp_path):
  announced = kill_while_saving(tmp_path, 2, delay_s=0.003)
  check_survivor(tmp_path, announced)


@pytest.mark.slow
def test_sigkill_at_many_moments(tmp_path):
  moments = np.random.default_rng(0).uniform(0.0, 0.05, 20)
  unfinished = 0
  for number, delay_s in enumerate(moments):
    directory = tmp_path / str(number)
    announced = kill_while_saving(directory, 1, delay_s)
    unfinished += bool(list(directory.glob('*.partial')))
    check_survivor(directory, announced)
  assert unfinished > 3, 'the kills did not meet saves'


def test_contents_are_readable_json(tmp_path):
  checkpoint.CheckpointStore(tmp_path).save(1, {}, {'seed': 4})
  _, body = json.loads((tmp_path / '1' / 'contents.json').read_text())
  assert body['extra'] == {'seed': 4}
