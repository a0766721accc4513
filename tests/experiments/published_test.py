"""The published settings of the papers' experiments, value by value."""

import pytest
import tiny_world

from spopp_jax import objectives
from spopp_jax.models import presets
from spopp_jax.runner import config as config_lib
from spopp_jax.runner import config_rules

ALFWORLD = {
  'run.steps': 50,
  'environment.num_tasks': 128,
  'environment.step_limit': 50,
  'offline.rollouts_per_task': 8,
  'dispatch.batch_size': 128,
  'dispatch.per_prompt': 1,
  'dispatch.staleness': 'drain',
  'objective.name': 'spopp',
}
MATHS = {
  **ALFWORLD,
  'run.steps': 200,
  'environment.num_tasks': 1500,
  'environment.step_limit': 8,
  'sampler.context_length': 2048 + 8192,
}
TETPO = {
  'environment.step_limit': 1,
  'dispatch.batch_size': 8 * 64,
  'dispatch.staleness': 'scheduled',
  'dispatch.max_lag': 32,
  'sampler.context_length': 768 + 7424,
  'objective.name': 'tetpo',
}
ALL = {
  'sampler.temperature': 1.0,
  'sampler.top_p': 1.0,
  'sampler.top_k': 0,
  'sampler.min_p': 0.0,
  'optimizer.learning_rate': 1e-6,
  'optimizer.weight_decay': 0.1,
  'learner.minibatches': 1,
}
EXPERIMENTS = {
  'alfworld_qwen35_0p8b': {**ALFWORLD, 'model.preset': 'Qwen3.5-0.8B'},
  'alfworld_qwen35_2b': {**ALFWORLD, 'model.preset': 'Qwen3.5-2B'},
  'math_tir_qwen35_0p8b': {**MATHS, 'model.preset': 'Qwen3.5-0.8B'},
  'tetpo_qwen3_1p7b': {**TETPO, 'model.preset': 'Qwen3-1.7B'},
  'tetpo_llama32_3b': {**TETPO, 'model.preset': 'Llama-3.2-3B'},
}


@pytest.mark.parametrize('devices, number', [('gpu8', 8), ('tpu16', 16)])
@pytest.mark.parametrize('name', EXPERIMENTS)
def test_settings_are_the_published_ones(name, devices, number):
  path = tiny_world.ROOT / 'configs' / f'{name}.py'
  config = config_lib.load_config(f'{path}:{devices}', ['run.dry_run=True'])
  values = config_lib.leaf_values(config)
  expected = ALL | EXPERIMENTS[name] | {'run.name': name}
  assert {key: values[key] for key in expected} == expected
  mesh = config.mesh
  assert mesh.data * mesh.fsdp * mesh.tensor == number
  assert config.model.preset in presets.MODELS
  # Every bucket of rows can be cut as the mesh and the microbatches cut it.
  multiple = config.learner.microbatches * mesh.data * mesh.fsdp
  assert config.learner.row_buckets[-1] % multiple == 0


def test_the_methods_of_the_published_settings():
  path = tiny_world.ROOT / 'configs'
  load = lambda name: config_lib.load_config(
    str(path / f'{name}.py'), ['run.dry_run=True']
  )
  recipe = config_rules.given(load('alfworld_qwen35_0p8b').objective)
  objective = objectives.make_objective(recipe.pop('name'), recipe)
  assert (objective.group_size, objective.baseline) == (1, 'event_time')
  recipe = config_rules.given(load('tetpo_llama32_3b').objective)
  assert objectives.make_objective(recipe.pop('name'), recipe).group_size == 8
