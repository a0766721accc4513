"""The share that an objective's kernels have in a step of the learner."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import benchmark_report as report
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from spopp_jax import envs, objectives, types
from spopp_jax.learner import forward, packing, update
from spopp_jax.models import dense, parameters
from spopp_jax.objectives import base
from spopp_jax.runner import cold_start, config

HEADER = (
  'objective',
  'sizes',
  'objective ms',
  'learner step ms',
  'share',
  'target',
)
# The quickstart's own, one that bisects and one that sorts.
METHODS = ('spopp', 'tetpo', 'm2po')
TARGET = 0.01
CONFIG = str(pathlib.Path(__file__).parents[1] / 'configs' / 'quickstart.py')

# What an objective reads of a batch's [M, B, S] arrays.
_PER_TOKEN = ('trajectory_ids', 'action_mask', 'behaviour_logprobs')


def shares(scale: float, repeats: int) -> list[list[str]]:
  """Returns a table row for each method.

  The objective's part runs alone, on the batch of the step it is part of.

  Args:
    scale: factor on the trajectories of a step.
    repeats: rounds in which both run once.
  """
  settings = config.load_config(CONFIG)
  model, trajectories = episodes(settings, scale)
  params = parameters.initial(model, settings.seed)
  rows = []
  for name in METHODS:
    objective = objectives.make_objective(name, {})
    batch = _pack(settings, trajectories, objective.group_size)
    sizes = f'{len(trajectories)} trajectories, {list(batch.tokens.shape)}'
    report.say(f'{name} in a learner step, {sizes}')
    step = _step(_learner(settings, model, objective), params, batch)
    current = batch.behaviour_logprobs + 0.1 * batch.action_mask
    alone = report.ready(jax.jit(objective_step(objective)), batch, current)
    step(), alone()
    timings = report.timed({'step': step, 'alone': alone}, repeats, {})
    share = timings['alone'].ratio
    rows.append(
      [
        name,
        f'{sizes} tokens',
        f'{timings["alone"].milliseconds:.2f}',
        f'{timings["step"].milliseconds:.1f}',
        f'{share:.2%}',
        f'< {TARGET:.0%}: {report.passed(share < TARGET)}',
      ]
    )
  return rows


def episodes(
  settings: ml_collections.ConfigDict, scale: float
) -> tuple[dense.DecoderConfig, list[types.Trajectory]]:
  """Returns the model's sizes and a batch of games of the usual lengths.

  Args:
    settings: of the run.
    scale: factor on its batch size; whole groups of eight in every minibatch.
  """
  unit = 8 * settings.learner.minibatches
  number = unit * max(1, round(settings.dispatch.batch_size * scale / unit))
  settings = settings.copy_and_resolve_references()
  settings.cold_start.num_games = number
  settings.cold_start.max_turns = settings.environment.step_limit
  tasks = envs.load_tasks(settings.environment)
  games = cold_start.demonstrations(settings, tasks)
  tokenizer = cold_start.build_tokenizer(
    games, [tasks.make(task).reset() for task in tasks.task_ids]
  )
  rng = np.random.default_rng(settings.seed)
  trajectories = [
    _sampled(cold_start.as_trajectory(game, tokenizer), rng) for game in games
  ]
  model = cold_start.decoder_config(settings.model, tokenizer.vocab_size)
  return model, trajectories


def objective_step(objective: base.Objective) -> Callable[..., Any]:
  """Returns (batch [M, B, S], current) -> all that a step has of it.

  It calls the objective as `learner/update.py` does, whose log-probs are
  given instead of computed: the same calls on the same shapes.
  """

  def part(batch, current):
    advantages = objective.advantages(_whole(batch))

    def of_minibatch(_, inputs):
      rows, current = inputs
      minibatch = batch._replace(**rows)
      weights, metrics = objective.weights(minibatch, current, advantages)

      def numerator(current):
        total, *rest = objective.loss(current, minibatch, advantages, weights)
        return total, rest

      loss = jax.value_and_grad(numerator, has_aux=True)(current)
      return None, (weights, metrics, loss)

    rows = {name: getattr(batch, name) for name in _PER_TOKEN}
    _, (weights, *rest) = jax.lax.scan(of_minibatch, None, (rows, current))
    weights = base.Weights(
      importance=_merged(weights.importance),
      denominator_logprobs=_merged(weights.denominator_logprobs),
      counted=_merged(weights.counted),
      tokens=weights.tokens.sum(),
    )
    return rest, objective.diagnostics(
      _whole(batch), advantages, _merged(current), weights
    )

  return part


def _sampled(trajectory, rng):
  """A demonstration with an outcome and log-probs, as if it were sampled."""
  mask = trajectory.action_mask
  return dataclasses.replace(
    trajectory,
    reward=float(rng.random() < 0.5),
    behaviour_logprobs=np.where(mask, rng.normal(-2, 0.3, len(mask)), 0).astype(
      np.float32
    ),
  )


def _pack(
  settings: ml_collections.ConfigDict,
  trajectories: Sequence[types.Trajectory],
  group_size: int,
) -> types.PackedBatch:
  number = len(trajectories)
  batch = packing.pack(
    trajectories,
    [0.5] * number,
    groups=[i // group_size for i in range(number)],
    group_size=group_size,
    num_slots=number,
    minibatches=settings.learner.minibatches,
    row_length=settings.learner.row_length,
    row_buckets=settings.learner.row_buckets,
  )
  return jax.tree.map(jnp.asarray, batch)


def _learner(settings, model, objective):
  return update.Learner(
    model,
    objective,
    update.make_optimizer(**settings.optimizer),
    settings=forward.Settings(temperature=settings.sampler.temperature),
    microbatches=settings.learner.microbatches,
    minibatch_size=settings.dispatch.batch_size // settings.learner.minibatches,
    row_length=settings.learner.row_length,
    row_buckets=settings.learner.row_buckets,
  )


def _step(learner, params, batch):
  """Takes one update after another; each donates the state before it."""
  state = learner.init(params)

  def step():
    nonlocal state
    state, metrics = learner.update(state, batch)
    jax.block_until_ready((state, metrics))

  return step


def _whole(batch):
  """The collected batch in one piece, [M B, S]."""
  return batch._replace(
    **{name: _merged(getattr(batch, name)) for name in _PER_TOKEN}
  )


def _merged(per_token):
  return per_token.reshape(-1, per_token.shape[-1])
