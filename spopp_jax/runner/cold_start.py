"""Supervised training on demonstrated episodes, so that RL has a start."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import ml_collections
import numpy as np
import optax
import tqdm

from spopp_jax import types
from spopp_jax.envs import household
from spopp_jax.envs.household import texts as game_texts
from spopp_jax.learner import packing, supervised
from spopp_jax.models import (
  dense,
  parameters,
  policy_files,
  word_tokenizer,
)
from spopp_jax.runner import config_rules

# Demonstrated scenes are drawn from their own stream: they share a generator
# with the tasks, not their seed.
_DEMONSTRATION_STREAM = 1_000_003


class Demonstration(NamedTuple):
  """An episode that ends in success.

  Attributes:
    first: the first observation.
    turns: (command, observation after it) in order.
  """

  first: str
  turns: list[tuple[str, str]]


def demonstrations(
  config: ml_collections.ConfigDict, tasks: household.HouseholdTasks
) -> list[Demonstration]:
  """Plays the expert in `cold_start.num_games` scenes.

  Generated scenes are others than the tasks, drawn alike. For official games
  the tasks themselves are demonstrated, in turn.

  Raises:
    ConfigError: a game cannot be won within cold_start.max_turns.
  """
  if config.environment.path:
    games = [tasks.game(task) for task in tasks.task_ids]
  else:
    games = household.generate_games(
      num_games=config.cold_start.num_games,
      seed=_DEMONSTRATION_STREAM + config.environment.seed,
      size=config.environment.size,
      task_types=config.environment.task_types,
    )
  rng = random.Random(config.seed)
  chosen = itertools.islice(itertools.cycle(games), config.cold_start.num_games)
  try:
    return [_play(game, rng, config.cold_start) for game in chosen]
  except ValueError as error:
    raise config_rules.ConfigError(f'cold_start.max_turns: {error}') from error


def _play(
  game: household.Game, rng: random.Random, settings: ml_collections.ConfigDict
) -> Demonstration:
  return Demonstration(
    household.HouseholdEnvironment(game).reset(),
    household.expert_episode(
      game, rng=rng, dither=settings.dither, max_turns=settings.max_turns
    ),
  )


def build_tokenizer(
  episodes: Iterable[Demonstration], first_observations: Iterable[str]
) -> word_tokenizer.WordTokenizer:
  """Returns a tokenizer that knows the demonstrations and the tasks.

  It also knows the answer to a command that cannot be carried out, which no
  demonstration contains.
  """
  texts = [text for e in episodes for turn in e.turns for text in turn]
  texts += [e.first for e in episodes]
  return word_tokenizer.WordTokenizer.build(
    [*texts, *first_observations, game_texts.NOTHING_HAPPENS]
  )


def as_trajectory(
  episode: Demonstration, tokenizer: word_tokenizer.WordTokenizer
) -> types.Trajectory:
  """Renders a demonstration as the rollout would have recorded it."""
  pieces = [(tokenizer.prompt(episode.first), False)]
  for command, observation in episode.turns:
    turn = tokenizer.action(command)
    pieces.append((turn, True))
    pieces.append((tokenizer.observation(observation, turn), False))
  pieces.pop()  # the rollout ends with the action that wins
  lengths = [len(tokens) for tokens, _ in pieces]
  mask = np.repeat([is_action for _, is_action in pieces], lengths)
  return types.Trajectory(
    request_id='demonstration',
    task_id='',
    status=types.Status.OK,
    reward=1.0,
    policy_version=0,
    weights_checksum='',
    tokens=np.concatenate([tokens for tokens, _ in pieces]),
    action_mask=mask,
    behaviour_logprobs=np.zeros(len(mask), np.float32),
    num_turns=len(episode.turns),
    sampling=types.SamplingParams(),
  )


def train_policy(
  config: ml_collections.ConfigDict, tasks: household.HouseholdTasks
) -> policy_files.Policy:
  """Trains a new policy on demonstrations, with a progress bar.

  Args:
    config: reads the blocks cold_start, model, environment, learner, seed.
    tasks: what the policy will be trained on; for the vocabulary and, if they
      are official games, for the demonstrations.

  Returns:
    The policy with float32 parameters on the host.

  Raises:
    ConfigError: demonstrations cannot be had or used with these settings.
  """
  episodes = demonstrations(config, tasks)
  tokenizer = build_tokenizer(
    episodes, [tasks.make(task).reset() for task in tasks.task_ids]
  )
  trajectories = [as_trajectory(e, tokenizer) for e in episodes]
  longest = max(len(t.tokens) for t in trajectories)
  if longest > config.learner.row_length:
    raise config_rules.ConfigError(
      f'a demonstration has {longest} tokens, learner.row_length is '
      f'{config.learner.row_length}: raise it or lower cold_start.max_turns '
      f'({config.cold_start.max_turns})'
    )
  model = decoder_config(config.model, tokenizer.vocab_size)
  c = config.cold_start
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
      optax.warmup_cosine_decay_schedule(
        0.0, c.learning_rate, min(max(1, c.steps // 20), c.steps - 1), c.steps
      ),
      b2=0.99,
      weight_decay=0.0,
    ),
  )
  learner = supervised.SupervisedLearner(model, optimizer)
  state = learner.init(parameters.initial(model, config.seed))
  batches = _batches(trajectories, config)
  bar = tqdm.trange(
    c.steps,
    desc='cold start',
    unit='step',
    disable=not config.run.progress,
  )
  for step in bar:
    state, loss = learner.update(state, next(batches))
    if step % 20 == 0:
      bar.set_postfix(nats=f'{float(loss):.3f}')
  return policy_files.Policy(
    model, {k: np.asarray(v) for k, v in state.params.items()}, tokenizer
  )


def decoder_config(
  sizes: ml_collections.ConfigDict, vocab_size: int
) -> dense.DecoderConfig:
  """Returns the decoder's configuration from the block `model`."""
  return dense.DecoderConfig(
    vocab_size=vocab_size,
    hidden_size=sizes.hidden_size,
    num_hidden_layers=sizes.num_layers,
    num_attention_heads=sizes.num_heads,
    num_key_value_heads=sizes.num_key_value_heads,
    head_dim=sizes.head_dim,
    intermediate_size=sizes.intermediate_size,
  )


def _batches(
  trajectories: Sequence[types.Trajectory], config: ml_collections.ConfigDict
) -> Iterator[types.PackedBatch]:
  """Yields packed batches for ever, one shuffled epoch after another."""
  rng = np.random.default_rng(config.seed)
  size = config.cold_start.batch_size
  order = np.zeros(0, int)
  while True:
    while len(order) < size:
      order = np.concatenate([order, rng.permutation(len(trajectories))])
    chosen, order = order[:size], order[size:]
    yield packing.pack(
      [trajectories[i] for i in chosen],
      [0.0] * size,
      num_slots=size,
      minibatches=1,
      row_length=config.learner.row_length,
      row_buckets=config.learner.row_buckets,
    )
