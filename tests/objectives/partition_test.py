"""Rows, microbatches and devices are chosen at random: the update stays."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax import objectives

ROWS, WIDTH, DEVICES = 4, 34, 3
# A statistic of the batch, of the group, of the minibatch, of varied groups.
_QUICK = ('spopp', 'tetpo', 'm2po', 'dapo')
_REST = sorted(set(objectives.objective_names()) - set(_QUICK))
_ONE_EXPONENT = {'correction': 'tempered', 'tempering_scope': 'batch'}


def _update(objective, batch, proximal, current):
  """Advantages, weights, the sums of the loss and their gradient."""
  advantages = objective.advantages(batch)
  weights, scalars = objective.weights(batch, proximal, advantages)
  sums = _sums(objective, advantages, current, batch, weights)
  diagnostics = objective.diagnostics(batch, advantages, proximal, weights)
  return advantages, weights, sums, scalars | diagnostics


def _sums(objective, advantages, current, batch, weights):
  def numerator(current):
    numerator, *rest = objective.loss(current, batch, advantages, weights)
    return numerator, rest

  return jax.value_and_grad(numerator, has_aux=True)(current)


def _microbatch(rows, batch, weights):
  """The batch with padding in place of the rows of other microbatches."""
  own = rows[:, None]
  return (
    batch._replace(
      action_mask=batch.action_mask & own,
      trajectory_ids=jnp.where(own, batch.trajectory_ids, 6),
    ),
    weights._replace(
      importance=jnp.where(own, weights.importance, 0),
      counted=weights.counted & own,
    ),
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _everything(objective, mapped, whole, microbatches, shards):
  """The update, its microbatches [4] and the update of each device [3]."""
  batch, _, current = whole
  advantages, weights, sums, scalars = _update(objective, *whole)

  def part(rows):
    own_batch, own_weights = _microbatch(rows, batch, weights)
    return _sums(objective, advantages, current, own_batch, own_weights)

  parts = jax.vmap(part)(microbatches)
  spread = jax.vmap(functools.partial(_update, mapped), axis_name='data')(
    *shards
  )
  return (advantages, sums, scalars), parts, spread


def _pack(episodes, order, rows):
  """The trajectories of `order`, each in the row that `rows` says."""
  layout = [[i for i in order if rows[i] == row] for row in range(ROWS)]
  batch, *logprobs = episodes.pack(layout, width=WIDTH)
  present = np.isin(np.arange(6), order)
  return batch._replace(usable=present & batch.usable), *logprobs


def _at_tokens(batch, per_token, total=None):
  """Adds what each token of an episode has to [6, 10] totals."""
  total = np.zeros((6, 10)) if total is None else total
  at = np.nonzero(batch.segment_ids)
  total[batch.trajectory_ids[at], batch.positions[at]] += per_token[at]
  return total


def _check(pair, make_episodes, order, rows, microbatches, devices):
  episodes = make_episodes()
  whole = _pack(episodes, order, rows)
  batch = whole[0]
  shards = [
    _pack(
      episodes,
      [i for i in order if devices[i // 2] == device],
      rows,
    )
    for device in range(DEVICES)
  ]
  stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *shards)
  cuts = np.arange(ROWS)[:, None] == np.array(microbatches)
  want, parts, spread = _everything(*pair, whole, cuts, stacked)
  close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=5e-6)

  advantages, (numerator, gradient), scalars = want
  added = jax.tree.map(lambda x: x.sum(axis=0), parts)
  jax.tree.map(close, added, (numerator, gradient))

  own_advantages, _, (own_sums, own_gradients), own_scalars = spread
  close(own_advantages.sum(axis=0), advantages)
  jax.tree.map(lambda x, y: close(x.sum(axis=0), y), own_sums, numerator)
  jax.tree.map(lambda x, y: close(x, np.full(DEVICES, y)), own_scalars, scalars)
  total = None
  for (shard, *_), own in zip(shards, own_gradients, strict=True):
    total = _at_tokens(shard, own, total)
  close(total, _at_tokens(batch, gradient))
  return advantages, numerator, scalars, _at_tokens(batch, gradient)


_DRAWN = {
  'order': st.permutations(range(6)),
  'rows': st.lists(st.integers(0, ROWS - 1), min_size=6, max_size=6),
  'microbatches': st.lists(
    st.integers(0, ROWS - 1), min_size=ROWS, max_size=ROWS
  ),
  'devices': st.lists(st.integers(0, DEVICES - 1), min_size=3, max_size=3),
}


def _any_partition(pair, make_episodes):
  """Draws partitions; all of them give the first one's update."""
  plain = (range(6), (0, 0, 1, 1, 2, 2), (0, 1, 2, 3), (0, 1, 2))
  first = _check(pair, make_episodes, *plain)
  assert np.abs(first[-1]).sum() > 0

  @hypothesis.given(**_DRAWN)
  @hypothesis.settings(deadline=None, max_examples=15, database=None)
  def check(**drawn):
    got = _check(pair, make_episodes, **drawn)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=5e-6),
      got,
      first,
    )

  check()


@pytest.fixture(scope='session')
def pair(objective_of):
  """An objective, and the same on a mapped axis."""
  return lambda name, **overrides: (
    objective_of(name, **overrides),
    objective_of(name, axis_name='data', **overrides),
  )


@pytest.mark.parametrize('name', _QUICK)
def test_any_partition(pair, make_episodes, name):
  _any_partition(pair(name), make_episodes)


def test_any_partition_of_a_tempered_batch(pair, make_episodes):
  _any_partition(pair('spopp', **_ONE_EXPONENT), make_episodes)


@pytest.mark.slow
@pytest.mark.parametrize('name', _REST)
def test_any_partition_of_the_others(pair, make_episodes, name):
  _any_partition(pair(name), make_episodes)
