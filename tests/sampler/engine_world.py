"""A tiny random decoder's engine and episodes to play on it."""

import dataclasses
import functools

import jax
import numpy as np

from spopp_jax import types
from spopp_jax.models import dense, parameters
from spopp_jax.sampler import kept_sets

CONFIG = dense.DecoderConfig(
  vocab_size=7,
  hidden_size=16,
  num_hidden_layers=1,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=8,
  intermediate_size=16,
)
END = 5
CONTEXT = 32
TURN = 4
SAMPLING = types.SamplingParams(max_turn_tokens=TURN)


def make_parameters(seed=0):
  rng = np.random.default_rng(seed)
  _, shapes = parameters.graph(CONFIG)
  return {
    name: rng.normal(name.endswith('norm.weight'), 0.4, shape).astype('f4')
    for name, shape in sorted((k, v.shape) for k, v in shapes.items())
  }


@dataclasses.dataclass
class Episode:
  """What a slot is given; what came of it."""

  seed: int
  texts: list[np.ndarray]  # prompt and observations, one before each turn
  sampling: types.SamplingParams = SAMPLING
  turns: list = dataclasses.field(default_factory=list)

  def trajectory(self):
    """The episode as the learner packs it."""
    pieces, masks, logprobs = [], [], []
    for text, turn in zip(self.texts, self.turns, strict=True):
      pieces += [text, turn.tokens]
      masks += [np.zeros(len(text), bool), np.ones(len(turn.tokens), bool)]
      logprobs += [np.zeros(len(text), np.float32), turn.logprobs]
    return types.Trajectory(
      request_id=str(self.seed),
      task_id='',
      status=types.Status.OK,
      reward=0.0,
      policy_version=3,
      weights_checksum='',
      tokens=np.concatenate(pieces),
      action_mask=np.concatenate(masks),
      behaviour_logprobs=np.concatenate(logprobs),
      num_turns=len(self.turns),
      sampling=self.sampling,
      kept=kept_sets.concatenate([turn.kept for turn in self.turns])
      if self.sampling.truncated
      else None,
    )

  @property
  def tokens(self):
    return [turn.tokens.tolist() for turn in self.turns]


@functools.cache
def _logits(config):
  """Compiles the logits [T, V] after each of [T] tokens, without a cache."""
  graphdef = parameters.graph(config)[0]

  def logits(params, tokens):
    decoder = parameters.bind(graphdef, params)
    rows = tokens[None]
    positions = np.arange(len(tokens))[None]
    return decoder.logits(
      decoder.hidden(rows, positions, np.ones_like(positions))
    )[0]

  return jax.jit(logits)


def action_logits(config, params, trajectory, length):
  """Returns the logits [L, V] that each action token was drawn from."""
  tokens = np.zeros(length, np.int32)
  tokens[: len(trajectory.tokens)] = trajectory.tokens
  logits = np.asarray(_logits(config)(params, tokens))
  return logits[np.flatnonzero(trajectory.action_mask) - 1]


def renormalised(logits, token, kept, temperature):
  """Returns log[pi(token) / pi(kept)] of logits [V], in float64."""
  scaled = logits.astype(np.float64) / temperature
  scaled -= scaled.max()
  return scaled[token] - np.log(np.exp(scaled[kept]).sum())


def make_episode(seed, lengths, sampling=SAMPLING):
  rng = np.random.default_rng(seed)
  texts = [rng.integers(0, 7, n).astype(np.int32) for n in lengths]
  return Episode(seed, texts, sampling)


def play(engine, episodes, *, close=True):
  """Plays episodes by slot to their ends."""
  for slot, episode in episodes.items():
    engine.open(slot, seed=episode.seed, sampling=episode.sampling)
    engine.append(slot, episode.texts[0])
  for _ in range(100):
    for turn in engine.step():
      episode = episodes[turn.slot]
      episode.turns.append(turn)
      if len(episode.turns) < len(episode.texts):
        engine.append(turn.slot, episode.texts[len(episode.turns)])
      elif close:
        engine.close(turn.slot)
    if all(len(e.turns) == len(e.texts) for e in episodes.values()):
      return
  raise AssertionError('the engine does not end its turns')
