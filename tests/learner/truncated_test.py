"""Scores of trajectories whose decoding was truncated."""

import dataclasses

import numpy as np
import optax
import pytest

from spopp_jax import objectives, types
from spopp_jax.learner import forward, update

TEMPERATURE = 0.7


def truncate(trajectory, seed):
  """Lets every action be one of up to four words, its own among them."""
  rng = np.random.default_rng(seed)
  ids = [
    token + rng.permutation(10)[: rng.integers(0, 4)] + 1
    for token in trajectory.tokens[trajectory.action_mask]
  ]
  actions = trajectory.tokens[trajectory.action_mask]
  sets = [
    rng.permutation([token, *(others % 11)])
    for token, others in zip(actions, ids, strict=True)
  ]
  kept = types.KeptIds(
    ids=np.concatenate(sets).astype(np.int32),
    offsets=np.cumsum([0, *(len(x) for x in sets)]),
  )
  sampling = types.SamplingParams(temperature=TEMPERATURE, top_p=0.8)
  return dataclasses.replace(trajectory, kept=kept, sampling=sampling)


def expected(tiny, params, trajectory):
  """Log-probs at the temperature, renormalised at actions that were cut."""
  logprobs = np.array(
    tiny.logprobs_alone(params, trajectory.tokens, TEMPERATURE)
  )
  if trajectory.kept is None:
    return logprobs
  actions = np.flatnonzero(trajectory.action_mask)
  bounds = trajectory.kept.offsets
  for k, t in enumerate(actions):
    ids = trajectory.kept.ids[bounds[k] : bounds[k + 1]]
    mass = 0.0
    for word in ids:
      tokens = trajectory.tokens[: t + 1].copy()
      tokens[t] = word
      mass += np.exp(tiny.logprobs_alone(params, tokens, TEMPERATURE)[t])
    logprobs[t] -= np.log(mass)
  return logprobs


@pytest.mark.parametrize('chunk_tokens', [1, 7, 1000])
def test_kept_ids_renormalise_actions_and_nothing_else(tiny, chunk_tokens):
  learner = update.Learner(
    tiny.config,
    objectives.make_objective('spopp', {}),
    optax.sgd(1.0),
    settings=forward.Settings(
      temperature=TEMPERATURE, chunk_tokens=chunk_tokens
    ),
    minibatch_size=6,
    row_length=tiny.row_length,
    row_buckets=(4,),
  )
  params = tiny.make_parameters()
  trajectories = [
    truncate(t, seed) if seed != 2 else t
    for seed, t in enumerate(tiny.make_trajectories())
  ]
  scores = learner.score(params, trajectories)
  for trajectory, score in zip(trajectories, scores, strict=True):
    want = expected(tiny, params, trajectory)
    np.testing.assert_allclose(score, want, atol=1e-5)
  cut = trajectories[0]
  whole = tiny.logprobs_alone(params, cut.tokens, TEMPERATURE)
  gaps = np.abs(scores[0] - whole)
  assert gaps[cut.action_mask].max() > 0.1
  assert gaps[~cut.action_mask].max() < 1e-5
