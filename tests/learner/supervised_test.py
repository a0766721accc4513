import dataclasses

import jax
import numpy as np
import optax
import pytest

from spopp_jax.learner import packing, supervised


@pytest.fixture(scope='module')
def learner(tiny):
  return supervised.SupervisedLearner(tiny.config, optax.adam(1e-2))


def pack(tiny, trajectories):
  return packing.pack(
    trajectories,
    [0.0] * len(trajectories),
    num_slots=6,
    minibatches=1,
    row_length=tiny.row_length,
    row_buckets=(4,),
  )


def first_loss(tiny, learner, batch):
  _, loss = learner.update(learner.init(tiny.make_parameters()), batch)
  return float(loss)


def test_the_loss_is_the_mean_cross_entropy_of_action_tokens(tiny, learner):
  trajectories = tiny.make_trajectories()
  params = tiny.make_parameters()
  logprobs = np.concatenate(
    [
      np.asarray(tiny.logprobs_alone(params, t.tokens))[t.action_mask]
      for t in trajectories
    ]
  )
  got = first_loss(tiny, learner, pack(tiny, trajectories))
  np.testing.assert_allclose(got, -logprobs.mean(), rtol=1e-5)
  assert len(logprobs) < sum(len(t.tokens) for t in trajectories) - 6


def test_it_learns_a_small_set_by_heart(tiny, learner):
  state = learner.init(tiny.make_parameters())
  batch = pack(tiny, tiny.make_trajectories())
  losses = []
  for _ in range(60):
    state, loss = learner.update(state, batch)
    losses.append(float(loss))
  assert losses[-1] < 0.3 * losses[0]
  assert state.updates == 60


def test_what_is_no_action_is_not_learned(tiny, learner):
  trajectories = tiny.make_trajectories()
  before = first_loss(tiny, learner, pack(tiny, trajectories))
  # A token after the last action is context of nothing that counts.
  last = trajectories[0]
  mask = last.action_mask.copy()
  mask[-2:] = [True, False]
  trajectories[0] = dataclasses.replace(last, action_mask=mask)
  same = first_loss(tiny, learner, pack(tiny, trajectories))
  tokens = last.tokens.copy()
  tokens[-1] = (tokens[-1] + 1) % 11
  trajectories[0] = dataclasses.replace(trajectories[0], tokens=tokens)
  assert first_loss(tiny, learner, pack(tiny, trajectories)) == same
  # Nor are rewards, behaviour log-probs and padding.
  batch = pack(tiny, trajectories)
  padding = batch.segment_ids == 0
  assert padding.any()
  dirty = batch._replace(
    tokens=np.where(padding, 7, batch.tokens).astype(np.int32),
    behaviour_logprobs=batch.behaviour_logprobs - 9,
    rewards=batch.rewards + 1,
  )
  assert first_loss(tiny, learner, dirty) == same
  assert before != same


def test_an_empty_batch_has_no_loss(tiny, learner):
  state = learner.init(tiny.make_parameters())
  state, loss = learner.update(state, pack(tiny, []))
  assert loss == 0
  for name, value in tiny.make_parameters().items():
    np.testing.assert_array_equal(state.params[name], value)


def test_one_compilation_a_shape(tiny, learner):
  state = learner.init(tiny.make_parameters())
  for seed in range(2):
    batch = pack(tiny, tiny.make_trajectories(seed=seed))
    state, _ = learner.update(state, batch)
  assert learner._update._cache_size() == 1
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
