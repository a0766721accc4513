"""Whole runs without a network: resumed, refused, and every setting read."""

import json
import os
import shutil

import jax
import ml_collections
import numpy as np
import pytest
import tiny_world

from spopp_jax import envs
from spopp_jax.learner import checkpoint
from spopp_jax.models import lora, policy_files, tensor_files
from spopp_jax.runner import (
  cold_start,
  experiment,
  logprob_check,
  meeting,
  metrics,
  sampling,
)
from spopp_jax.runner import config as config_lib
from spopp_jax.sampler import errors, retries

SPO = 'objective.name=spo'


def untimed(directory):
  """Returns the records without what the clock or the attempt decides."""
  return [
    {
      name: value
      for name, value in record.items()
      if name not in ('attempt', 'tokens_per_s') and not name.endswith('_s')
    }
    for record in metrics.read_metrics(directory)
  ]


def assert_same_checkpoints(one, other):
  assert one.step == other.step
  assert one.extra == other.extra
  assert jax.tree.structure(one.arrays) == jax.tree.structure(other.arrays)
  paths = jax.tree_util.tree_leaves_with_path(one.arrays)
  for (path, a), b in zip(paths, jax.tree.leaves(other.arrays), strict=True):
    np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
    assert a.dtype == b.dtype


def resumed(load, *overrides):
  """Runs 2 steps and, with new objects, 2 more."""
  tiny_world.run(load('run.steps=2', *overrides))
  config = load('run.resume=True', *overrides)
  return config, tiny_world.run(config)


def test_a_resumed_run_equals_an_undisturbed_one(load, finished):
  config, result = resumed(load)
  assert untimed(result.directory) == untimed(finished.result.directory)
  saved = tiny_world.checkpoint(config)
  assert_same_checkpoints(saved, tiny_world.checkpoint(finished.config))
  # Nothing above would notice a run that learns nothing.
  assert not np.array_equal(
    saved.arrays['state'].params['model.norm.weight'],
    tiny_world.checkpoint(finished.config, 2)
    .arrays['state']
    .params['model.norm.weight'],
  )
  np.testing.assert_array_equal(
    result.after.successes, finished.result.after.successes
  )


@pytest.mark.slow
def test_a_resumed_spo_run_equals_an_undisturbed_one(load):
  whole = load(SPO, 'run.name=whole')
  expected = tiny_world.run(whole)
  config, result = resumed(load, SPO)
  assert untimed(result.directory) == untimed(expected.directory)
  assert_same_checkpoints(
    tiny_world.checkpoint(config), tiny_world.checkpoint(whole)
  )


def test_requests_in_flight_are_saved_for_the_step_that_collects_them(finished):
  for step in (2, 4):
    saved = tiny_world.checkpoint(finished.config, step)
    tickets = saved.extra['flow']['in_flight']
    assert len({ticket['request_id'] for ticket in tickets}) == 8
    assert {ticket['step'] for ticket in tickets} == {step}
    assert {ticket['policy_version'] for ticket in tickets} == {step - 1}


@pytest.fixture
def copied(finished, tmp_path):
  """A copy of a finished run and the settings that resume it."""
  directory = shutil.copytree(
    finished.result.directory, tmp_path / 'runs' / 'unnamed'
  )
  config = tiny_world.load(
    tmp_path,
    f'cold_start.policy={finished.config.cold_start.policy}',
    'run.resume=True',
    'run.steps=5',
  )
  return directory, config


def test_a_finished_run_can_be_resumed_for_more_steps(copied):
  directory, config = copied
  result = tiny_world.run(config)
  assert result.training.step == 5
  records = metrics.read_metrics(directory)
  assert [record['step'] for record in records] == [0, 1, 2, 3, 4]
  ok = [record['status/ok'] for record in records]
  assert ok == [10 + 8 * step for step in range(1, 6)]


def refused(copied, kind):
  """Returns why the run cannot be resumed; it must stay as it was."""
  directory, config = copied
  before = (directory / 'metrics.jsonl').read_bytes()
  with pytest.raises(kind) as caught:
    tiny_world.run(config)
  assert isinstance(caught.value, experiment.EXPECTED_ERRORS)
  assert (directory / 'metrics.jsonl').read_bytes() == before
  return str(caught.value)


def test_resuming_without_a_checkpoint_says_what_to_do(copied):
  shutil.rmtree(copied[0] / 'checkpoints')
  message = refused(copied, checkpoint.CheckpointError)
  assert 'there is no checkpoint' in message
  assert 'without --config.run.resume=True' in message


def test_resuming_from_a_damaged_checkpoint_names_the_file(copied):
  path = max((copied[0] / 'checkpoints' / '4').rglob('ocdbt*/d/*'))
  path.write_bytes(path.read_bytes()[:-1])
  message = refused(copied, checkpoint.CheckpointError)
  assert str(path) in message
  assert 'step 2 is resumed' in message


@pytest.mark.parametrize(
  'name, kind',
  [
    ('offline.json', checkpoint.CheckpointError),
    ('policy/model.safetensors', policy_files.PolicyError),
    ('policy/tokenizer.json', policy_files.PolicyError),
    ('policy/config.json', policy_files.PolicyError),
    ('config.json', config_lib.ConfigError),
  ],
)
def test_resuming_without_one_of_its_files_names_it(copied, name, kind):
  (copied[0] / name).unlink()
  assert str(copied[0] / name) in refused(copied, kind)


def test_resuming_a_run_that_is_not_there_says_what_to_do(load):
  with pytest.raises(config_lib.ConfigError, match='no run to resume'):
    tiny_world.run(load('run.resume=True'))


def test_sampler_of_other_weights_is_noticed_before_training(load):
  class Other(tiny_world.Watched):
    def publish(self, params, version, **how):
      other = {name: value * 3 for name, value in params.items()}
      return super().publish(other, version, **how)

  with pytest.raises(logprob_check.LogprobMismatch):
    tiny_world.run(load(), Other)


def test_sampler_is_closed_whatever_happens(load):
  closed = []

  class Broken(tiny_world.Watched):
    def next(self, timeout_s):
      raise errors.SamplerTimeout('nothing finished')

    def close(self):
      closed.append(True)

  with pytest.raises(experiment.EXPECTED_ERRORS, match='nothing finished'):
    tiny_world.run(load(), Broken)
  assert closed == [True]


def test_a_step_that_does_not_fit_ends_the_run_before_it_trains(
  load, monkeypatch
):
  known = {'SC_PAGE_SIZE': 1, 'SC_PHYS_PAGES': 1000}
  real = os.sysconf
  monkeypatch.setattr(os, 'sysconf', lambda name: known.get(name) or real(name))
  with pytest.raises(experiment.EXPECTED_ERRORS) as caught:
    tiny_world.run(load())
  assert 'GiB a device, has 9.31e-07 GiB' in str(caught.value)
  assert 'learner.remat=full' in str(caught.value)


def test_a_mesh_that_the_devices_do_not_make_is_refused(load):
  with pytest.raises(experiment.EXPECTED_ERRORS, match=r'mesh.fsdp \(3\)'):
    tiny_world.run(load('mesh.fsdp=3'))


def test_a_target_of_adapters_that_there_is_not_is_refused(load):
  with pytest.raises(experiment.EXPECTED_ERRORS, match=r'lora.*in_proj_qkv'):
    tiny_world.run(load('lora.rank=2', "lora.targets=('in_proj_qkv',)"))


def test_adapters_are_published_merged_saved_and_resumed(load):
  settings = ('lora.rank=2', "lora.targets=('q_proj', 'up_proj')")
  tiny_world.run(load('run.steps=2', *settings))
  config = load('run.resume=True', *settings)
  result = tiny_world.run(config)
  start, end = result.policy.params, result.training.published
  changed = {k.split('.')[-2] for k in start if (end[k] != start[k]).any()}
  assert changed == {'q_proj', 'up_proj'}
  saved = tensor_files.decode(
    (result.directory / 'adapter/adapter_model.safetensors').read_bytes()
  )
  adapters = {k.removeprefix('base_model.model.'): v for k, v in saved.items()}
  merged = lora.merge(
    result.training.learner.settings.adapters, start, adapters
  )
  for name, value in merged.items():
    np.testing.assert_array_equal(end[name], value)
  undisturbed = tiny_world.run(load('run.name=undisturbed', *settings))
  for name, value in undisturbed.training.published.items():
    np.testing.assert_array_equal(end[name], value)


class Read:
  """A configuration that notes the leaves read through it."""

  def __init__(self, config, noted, prefix=''):
    self._config, self._noted, self._prefix = config, noted, prefix

  def __getitem__(self, key):
    value = self._config[key]
    name = self._prefix + key
    if isinstance(value, ml_collections.ConfigDict):
      return Read(value, self._noted, name + '.')
    self._noted.add(name)
    return value

  def __getattr__(self, key):
    return self[key]

  def keys(self):
    return self._config.keys()

  def items(self):
    return [(key, self[key]) for key in self._config]

  def to_dict(self):
    # The record of a run copies settings; that is not reading them.
    return self._config.to_dict()


def test_every_setting_is_read_by_something(load, tmp_path):
  plain = load('run.steps=1', 'cold_start.steps=1', 'run.name=read')
  noted = set()
  config = Read(plain, noted)
  # 1. A run: with its own policy, then from a saved one.
  tasks = envs.load_tasks(config.environment)
  policy = cold_start.train_policy(config, tasks)
  policy_files.save(tmp_path / 'policy', policy)
  plain.cold_start.policy = str(tmp_path / 'policy')
  experiment.run(config, tiny_world.sampler(config, policy))
  # 2. A service at an address.
  plain.sampler.addresses = ('127.0.0.1:1',)
  plain.sampler.connect_timeout_s = 0.1
  with pytest.raises(errors.SamplerLost):
    sampling.connect(config, policy, tmp_path, tasks, retries.RetryBudget(1))
  # 3. A host that finds no other.
  plain.hosts.count, plain.hosts.index, plain.hosts.start_timeout_s = 2, 1, 0.1
  with pytest.raises(meeting.HostsMissing):
    meeting.start(config)
  assert set(config_lib.leaf_values(plain)) - noted == set()


def test_reading_is_what_the_test_above_notes(load):
  noted = set()
  config = Read(load(), noted)
  assert config.to_dict()['seed'] == 0
  assert noted == set()
  assert config.seed == 0
  assert config.run.steps == 4
  assert dict(**config.evaluation) == {'rollouts_per_task': 1}
  assert noted == {'seed', 'run.steps', 'evaluation.rollouts_per_task'}


def test_offline_outcomes_and_settings_are_on_disk(finished):
  directory = finished.result.directory
  rows = json.loads((directory / 'offline.json').read_text())
  before = finished.result.before
  assert list(rows) == list(before.task_ids)
  assert [row[0] for row in rows.values()] == list(before.successes)
  policy = policy_files.load(directory / 'policy')
  for name, value in finished.result.policy.params.items():
    np.testing.assert_array_equal(policy.params[name], value)
