from typing import NamedTuple

import jax
import ml_collections
import pytest
import tiny_world

from spopp_jax.models import policy_files
from spopp_jax.runner import compilation, experiment


@pytest.fixture(scope='session')
def _compiled(tmp_path_factory):
  """Programs that one test compiled serve the others."""
  names = [
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
    'jax_numpy_rank_promotion',
    'jax_disable_most_optimizations',
  ]
  before = {name: jax.config.values[name] for name in names}
  compilation.configure(tmp_path_factory.mktemp('compiled'))
  # Tiny programs run as fast, and compile in half of the time.
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture(scope='session')
def _policy(tmp_path_factory):
  path = tmp_path_factory.mktemp('policy') / 'random'
  config = tiny_world.load(path)
  policy_files.save(path, tiny_world.random_policy(config))
  return path


@pytest.fixture
def load(tmp_path, _policy, _compiled):
  """Returns settings of a tiny run that starts from a random policy."""

  def loaded(*overrides):
    return tiny_world.load(tmp_path, f'cold_start.policy={_policy}', *overrides)

  return loaded


class Finished(NamedTuple):
  """A tiny run of 4 steps that nobody disturbed; it must not be changed."""

  config: ml_collections.ConfigDict
  result: experiment.Result
  sampler: tiny_world.Watched


@pytest.fixture(scope='session')
def finished(tmp_path_factory, _policy, _compiled):
  config = tiny_world.load(
    tmp_path_factory.mktemp('finished'), f'cold_start.policy={_policy}'
  )
  result, sampler = tiny_world.watched(config)
  return Finished(config, result, sampler)
