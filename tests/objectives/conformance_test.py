"""What every registered objective must hold; new ones are found by name."""

import functools
import importlib
import itertools
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spopp_jax import objectives

_TOLERANCE = {'rtol': 2e-5, 'atol': 2e-6}

each_objective = pytest.mark.parametrize('name', objectives.objective_names())


@functools.partial(jax.jit, static_argnums=0)
def _run(objective, batch, proximal, current):
  """Everything an update computes: sums, gradient, weights, diagnostics."""
  advantages = objective.advantages(batch)
  weights, scalars = objective.weights(batch, proximal, advantages)

  def numerator(current):
    numerator, *rest = objective.loss(current, batch, advantages, weights)
    return numerator, rest

  (total, (count, metrics)), gradient = jax.value_and_grad(
    numerator, has_aux=True
  )(current)
  diagnostics = objective.diagnostics(batch, advantages, proximal, weights)
  return {
    'advantages': advantages,
    'importance': weights.importance,
    'gradient': gradient,
    'sums': {'numerator': total, 'count': count, **metrics},
    'diagnostics': {**scalars, **diagnostics, 'tokens': weights.tokens},
  }


def _cut(tree, rows):
  """The same rows of all per-token arrays; the others are whole."""
  return jax.tree.map(lambda x: x[rows] if x.ndim >= 2 else x, tree)


def _by_trajectory(batch, per_token):
  """Values at counted tokens, in order of trajectory and position."""
  order = np.lexsort(
    (np.ravel(batch.positions), np.ravel(batch.trajectory_ids))
  )
  counted = np.ravel(batch.action_mask)[order]
  return np.ravel(per_token)[order][counted]


def _assert_same(got, got_batch, want, want_batch):
  for part in ('sums', 'diagnostics'):
    assert got[part].keys() == want[part].keys()
    for key in want[part]:
      np.testing.assert_allclose(
        got[part][key], want[part][key], err_msg=key, **_TOLERANCE
      )
  for part in ('importance', 'gradient'):
    np.testing.assert_allclose(
      _by_trajectory(got_batch, got[part]),
      _by_trajectory(want_batch, want[part]),
      err_msg=part,
      **_TOLERANCE,
    )


def test_every_method_of_the_package_is_registered():
  methods = [
    module.name
    for module in pkgutil.iter_modules(objectives.__path__)
    if hasattr(
      importlib.import_module(f'{objectives.__name__}.{module.name}'), 'make'
    )
  ]
  assert tuple(sorted(methods)) == objectives.objective_names()


@each_objective
def test_interface(make_jitted, name, episodes):
  objective = make_jitted(name)
  batch, proximal, current = episodes.pack()
  got = _run(objective, batch, proximal, current)
  assert objective.name == name
  assert objective.group_size >= 1
  assert objective.baseline in ('event_time', 'receipt_order', 'none')
  assert got['advantages'].shape == batch.rewards.shape
  assert got['importance'].shape == batch.tokens.shape
  assert 0 < got['diagnostics']['tokens'] <= batch.action_mask.sum()
  assert got['sums'].keys().isdisjoint(got['diagnostics'])
  for leaf in jax.tree.leaves(got):
    assert leaf.dtype == jnp.float32
    assert jnp.isfinite(leaf).all()
  for leaf in (*got['sums'].values(), *got['diagnostics'].values()):
    assert leaf.shape == ()
  assert jnp.abs(got['gradient']).sum() > 0


@each_objective
def test_rows_and_their_order_do_not_matter(make_jitted, name, episodes):
  objective = make_jitted(name)
  packed, *logprobs = episodes.pack()
  want = _run(objective, packed, *logprobs)
  for layout in (
    ((0,), (1,), (2,), (3,), (4,), (5,)),  # one a row
    ((5, 4), (3, 2), (1, 0)),  # other rows, other order
  ):
    batch, *logprobs = episodes.pack(layout)
    got = _run(objective, batch, *logprobs)
    _assert_same(got, batch, want, packed)
    np.testing.assert_allclose(
      got['advantages'], want['advantages'], **_TOLERANCE
    )


@each_objective
def test_order_of_trajectories_does_not_matter(make_jitted, name, episodes):
  objective = make_jitted(name)
  batch, *logprobs = episodes.pack()
  want = _run(objective, batch, *logprobs)
  order = np.array([3, 0, 5, 2, 1, 4])
  renamed = np.append(np.argsort(order), len(order)).astype(np.int32)
  mixed = batch._replace(
    trajectory_ids=renamed[batch.trajectory_ids],
    **{
      field: getattr(batch, field)[order]
      for field in ('rewards', 'values', 'usable', 'group_ids')
    },
  )
  got = _run(objective, mixed, *logprobs)
  np.testing.assert_allclose(
    got['advantages'], want['advantages'][order], **_TOLERANCE
  )
  np.testing.assert_allclose(got['gradient'], want['gradient'], **_TOLERANCE)
  for key, value in want['sums'].items():
    np.testing.assert_allclose(got['sums'][key], value, **_TOLERANCE)


@each_objective
@pytest.mark.parametrize('fill', [0.0, np.nan, np.inf, -np.inf, 1e30])
def test_padding_and_what_it_holds_change_nothing(
  make_jitted, name, fill, episodes
):
  objective = make_jitted(name)
  packed, *logprobs = episodes.pack()
  want = _run(objective, packed, *logprobs)
  layout = ((0, 1), (2, 3), (4, 5), ())
  batch, *logprobs = episodes.pack(layout, width=19, slots=9, fill=fill)
  got = _run(objective, batch, *logprobs)
  _assert_same(got, batch, want, packed)
  np.testing.assert_array_equal(got['gradient'][~batch.action_mask], 0)
  np.testing.assert_array_equal(got['importance'][~batch.action_mask], 0)
  np.testing.assert_array_equal(got['advantages'][6:], 0)


@each_objective
def test_observations_carry_no_gradient(make_jitted, name, episodes):
  objective = make_jitted(name)
  batch, *logprobs = episodes.pack()
  got = _run(objective, batch, *logprobs)
  np.testing.assert_array_equal(got['gradient'][~batch.action_mask], 0)


@each_objective
@pytest.mark.parametrize('cuts', [(1,), (2,), (1, 2)])
def test_microbatch_sums_add_up_to_the_whole(make_jitted, name, cuts, episodes):
  objective = make_jitted(name)
  # Every trajectory of a pair lies in another row: cuts split the groups.
  batch, proximal, current = episodes.pack(((0, 2), (1, 5), (3, 4)), width=16)
  advantages = objective.advantages(batch)
  weights, _ = objective.weights(batch, proximal, advantages)

  def sums(current, batch, weights):
    numerator, count, metrics = objective.loss(
      current, batch, advantages, weights
    )
    return numerator, {'count': count, **metrics}

  gradient_of = jax.value_and_grad(sums, has_aux=True)
  whole, whole_gradient = gradient_of(current, batch, weights)
  parts, gradients = [], []
  edges = (0, *cuts, 3)
  for start, stop in itertools.pairwise(edges):
    part, gradient = gradient_of(
      *_cut((current, batch, weights), slice(start, stop))
    )
    parts.append(part)
    gradients.append(gradient)
  total = jax.tree.map(lambda *sums: sum(sums), *parts)
  for got, want in zip(
    jax.tree.leaves(total), jax.tree.leaves(whole), strict=True
  ):
    np.testing.assert_allclose(got, want, **_TOLERANCE)
  np.testing.assert_allclose(
    np.concatenate(gradients), whole_gradient, **_TOLERANCE
  )


@each_objective
def test_nothing_usable_gives_zeros(make_jitted, name, episodes):
  objective = make_jitted(name)
  batch, *logprobs = episodes.pack()
  for empty in (
    batch._replace(usable=np.zeros_like(batch.usable)),
    batch._replace(action_mask=np.zeros_like(batch.action_mask)),
  ):
    got = _run(objective, empty, *logprobs)
    for part in ('advantages', 'importance', 'gradient'):
      np.testing.assert_array_equal(got[part], 0)
    assert set(map(float, got['sums'].values())) == {0.0}
    assert all(jnp.isfinite(x) for x in got['diagnostics'].values())


@each_objective
def test_only_the_current_logprobs_carry_gradient(make_jitted, name, episodes):
  objective = make_jitted(name)
  batch, proximal, current = episodes.pack()
  advantages = objective.advantages(batch)

  def constants(proximal, advantages):
    weights, metrics = objective.weights(batch, proximal, advantages)
    return weights.importance.sum() + sum(metrics.values())

  for gradient in jax.grad(constants, argnums=(0, 1))(proximal, advantages):
    np.testing.assert_array_equal(gradient, 0)

  weights, _ = objective.weights(batch, proximal, advantages)

  def numerator(advantages, importance, denominator, behaviour):
    return objective.loss(
      current,
      batch._replace(behaviour_logprobs=behaviour),
      advantages,
      weights._replace(importance=importance, denominator_logprobs=denominator),
    )[0]

  inputs = (advantages, *weights[:2], jnp.asarray(batch.behaviour_logprobs))
  for gradient in jax.grad(numerator, argnums=(0, 1, 2, 3))(*inputs):
    np.testing.assert_array_equal(gradient, 0)


@each_objective
def test_proximal_from_the_same_forward_pass_keeps_the_gradient(
  make_jitted, name, episodes
):
  objective = make_jitted(name)
  batch, proximal, _ = episodes.pack()
  advantages = objective.advantages(batch)

  def numerator(current, proximal):
    weights, _ = objective.weights(batch, proximal, advantages)
    return objective.loss(current, batch, advantages, weights)[0]

  want = jax.grad(numerator)(proximal, proximal)
  got = jax.grad(lambda x: numerator(x, x))(proximal)
  np.testing.assert_array_equal(got, want)
  assert jnp.abs(want).sum() > 0


@each_objective
@pytest.mark.parametrize('shift', [1e4, -1e4])
def test_far_off_policy_stays_finite(make_jitted, name, shift, episodes):
  objective = make_jitted(name)
  batch, proximal, current = episodes.pack()
  far = np.float32(shift)
  for logprobs in ((proximal + far, current), (proximal, current + far)):
    got = _run(objective, batch, *logprobs)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


@each_objective
def test_a_mapped_axis_gives_the_same_as_the_whole(
  make_jitted, make, name, episodes
):
  objective = make_jitted(name)
  batch, proximal, current = episodes.pack()
  want = _run(objective, batch, proximal, current)

  # Each of three devices holds one row with its two trajectories.
  local_ids = batch.trajectory_ids - 2 * np.arange(3, dtype=np.int32)[:, None]
  local_ids = np.where(batch.segment_ids > 0, local_ids, 2)
  batch = batch._replace(group_ids=np.zeros(6, np.int32))  # one a device
  shard = lambda x: x.reshape(3, x.shape[0] // 3, *x.shape[1:])
  shards = jax.tree.map(shard, batch._replace(trajectory_ids=local_ids))
  mapped = make(name, axis_name='data')
  got = jax.vmap(functools.partial(_run, mapped), axis_name='data')(
    shards, shard(proximal), shard(current)
  )
  np.testing.assert_allclose(
    got['advantages'].reshape(-1), want['advantages'], **_TOLERANCE
  )
  np.testing.assert_allclose(
    got['gradient'].reshape(proximal.shape), want['gradient'], **_TOLERANCE
  )
  for key, value in want['sums'].items():  # local sums, added by the caller
    np.testing.assert_allclose(got['sums'][key].sum(), value, **_TOLERANCE)
  for key, value in want['diagnostics'].items():  # already global
    np.testing.assert_allclose(
      got['diagnostics'][key], jnp.full(3, value), err_msg=key, **_TOLERANCE
    )


@each_objective
def test_unknown_fields_are_refused(make_jitted, name):
  with pytest.raises(ValueError, match='unknown field of objective'):
    make_jitted(name, no_such_field=1)
