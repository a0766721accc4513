from typing import NamedTuple

import jax
import ml_collections
import pytest
import tiny_world

from spopp_jax.models import policy_files
from spopp_jax.runner import compilation, experiment


@pytest.fixture(scope='session')
def _compiled(compiled_programs, jax_settings):
  compilation.configure(compiled_programs)
  # Tiny programs run as fast, and compile in half of the time.
  jax.config.update('jax_disable_most_optimizations', True)


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
