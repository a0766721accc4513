"""The smallest runs there are: household games, a random policy, no network."""

import pathlib
import random

import jax
import numpy as np

from spopp_jax import envs
from spopp_jax.envs import base as envs_base
from spopp_jax.learner import checkpoint as checkpoint_lib
from spopp_jax.learner import state as learner_state
from spopp_jax.learner import update
from spopp_jax.models import parameters, policy_files
from spopp_jax.runner import cold_start, experiment, serving
from spopp_jax.runner import config as config_lib
from spopp_jax.sampler import in_process

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SETTINGS = (
  'run.steps=4',
  'run.checkpoint_every_steps=2',
  'run.progress=False',
  'environment.num_tasks=10',
  'environment.step_limit=3',
  'model.hidden_size=16',
  'model.num_layers=1',
  'model.num_heads=2',
  'model.num_key_value_heads=1',
  'model.head_dim=8',
  'model.intermediate_size=32',
  'cold_start.steps=3',
  'cold_start.batch_size=4',
  'cold_start.num_games=8',
  'offline.rollouts_per_task=1',
  'evaluation.rollouts_per_task=1',
  'sampler.slots=8',
  'sampler.context_length=128',
  'sampler.max_turn_tokens=6',
  'dispatch.batch_size=6',
  'dispatch.in_flight=8',
  'optimizer.learning_rate=0.01',
  'learner.minibatches=2',
  'learner.row_length=256',
  'learner.row_buckets=(4,)',
)


def load(directory, *overrides):
  """Returns the settings of a tiny run in `directory`/runs."""
  return config_lib.load_config(
    str(ROOT / 'configs' / 'common.py'),
    [*SETTINGS, f'run.directory={directory / "runs"}', *overrides],
  )


class _Lengths:
  """Wins with the first command whose length is a multiple of three."""

  def __init__(self, environment):
    self._environment = environment

  def reset(self):
    return self._environment.reset()

  def step(self, action):
    observation = self._environment.step(action).observation
    won = len(action) % 3 == 0
    return envs_base.StepResult(observation, done=won, success=won)


class LengthTasks:
  """Household scenes with a goal that a random policy meets sometimes."""

  def __init__(self, config):
    self._tasks = envs.load_tasks(config.environment)
    self.task_ids = self._tasks.task_ids

  def make(self, task_id):
    return _Lengths(self._tasks.make(task_id))


def random_policy(config):
  """Returns a policy that knows the words and has learnt nothing."""
  tasks = envs.load_tasks(config.environment)
  tokenizer = cold_start.build_tokenizer(
    cold_start.demonstrations(config, tasks),
    [tasks.make(task).reset() for task in tasks.task_ids],
  )
  sizes = cold_start.decoder_config(config.model, tokenizer.vocab_size)
  initial = parameters.initial(sizes, seed=1)
  return policy_files.Policy(
    sizes, jax.tree.map(np.asarray, initial), tokenizer
  )


def sampler(config, policy, tasks=None):
  """Returns a new sampler without a network."""
  return in_process.InProcessSampler(
    serving.make_driver(config, policy, tasks or LengthTasks(config))
  )


def run(config, wrap=lambda inner: inner):
  """Runs the whole experiment from its saved policy, without a network."""
  policy = policy_files.load(config.cold_start.policy)
  return experiment.run(config, wrap(sampler(config, policy)))


class Watched:
  """A sampler seen through: keeps and may change what it returns.

  Attributes:
    returned: every trajectory in order.
    requests: every request in order.
    versions: versions published, in order.
  """

  def __init__(self, inner, change=lambda trajectory: trajectory):
    self.returned = []
    self.requests = []
    self.versions = []
    self._inner = inner
    self._change = change

  @property
  def num_arrived(self):
    return self._inner.num_arrived

  def submit(self, requests):
    self.requests.extend(requests)
    self._inner.submit(requests)

  def next(self, timeout_s):
    self.returned.append(self._change(self._inner.next(timeout_s)))
    return self.returned[-1]

  def publish(self, params, version, *, interrupt=False):
    self.versions.append(version)
    return self._inner.publish(params, version, interrupt=interrupt)

  def close(self):
    self._inner.close()


class Shuffled(Watched):
  """Returns all that is outstanding in a random order."""

  def __init__(self, inner, seed):
    super().__init__(inner)
    self._rng = random.Random(seed)
    self._ready = []

  @property
  def num_arrived(self):
    return len(self._ready)

  def next(self, timeout_s):
    if not self._ready:
      missing = len(self.requests) - len(self.returned)
      self._ready = [self._inner.next(timeout_s) for _ in range(missing)]
      self._rng.shuffle(self._ready)
    self.returned.append(self._ready.pop())
    return self.returned[-1]


def watched(config, **changes):
  """Runs the whole experiment; returns its result and its sampler."""
  seen = []

  def wrap(inner):
    seen.append(Watched(inner, **changes))
    return seen[0]

  result = run(config, wrap)
  return result, seen[0]


def directory(config):
  """Returns where the first run of these settings writes."""
  return pathlib.Path(config.run.directory) / config.run.name


def checkpoint(config, step=None):
  """Returns the newest checkpoint of the run, or that of `step`."""
  policy = policy_files.load(config.cold_start.policy)
  optimizer = update.make_optimizer(**config.optimizer)
  store = checkpoint_lib.CheckpointStore(directory(config) / 'checkpoints')
  like = {'state': learner_state.initial(policy.params, optimizer)}
  return store.restore(like, step)


def leaves(tree, prefix=''):
  """Yields (path, array) of a checkpoint's arrays."""
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    yield prefix + jax.tree_util.keystr(path), np.asarray(leaf)
