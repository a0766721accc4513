import pytest
import tiny_world

from spopp_jax import envs
from spopp_jax.models import (
  policy_files,
)
from spopp_jax.runner import sampling
from spopp_jax.sampler import errors, retries


def test_decoding_follows_the_settings(tmp_path):
  config = tiny_world.load(
    tmp_path, 'sampler.temperature=0.7', 'environment.step_limit=5'
  )
  params = sampling.sampling_params(config)
  assert (params.temperature, params.max_turn_tokens) == (0.7, 6)
  assert params.max_turns == 5
  assert not params.truncated
  config = tiny_world.load(tmp_path, 'sampler.top_p=0.9', 'sampler.top_k=20')
  params = sampling.sampling_params(config)
  assert (params.top_p, params.top_k) == (0.9, 20)


def test_no_service_at_the_address_is_an_error_in_time(load, tmp_path):
  config = load(
    "sampler.addresses=('127.0.0.1:1',)", 'sampler.connect_timeout_s=0.3'
  )
  policy = policy_files.load(config.cold_start.policy)
  tasks = envs.load_tasks(config.environment)
  with pytest.raises(errors.SamplerLost) as caught:
    sampling.connect(config, policy, tmp_path, tasks, retries.RetryBudget(1))
  for words in ('127.0.0.1:1', '0.3 s', 'start a sampler there'):
    assert words in str(caught.value)
