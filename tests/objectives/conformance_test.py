"""What every registered objective must hold; new ones are found by name."""

import functools
import importlib
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
    'weights': weights,
    'gradient': gradient,
    'sums': {'numerator': total, 'count': count, **metrics},
    'diagnostics': {**scalars, **diagnostics, 'tokens': weights.tokens},
  }


@functools.partial(jax.jit, static_argnums=0)
def _sums(objective, advantages, current, batch, weights):
  """Sums and gradient of one microbatch."""

  def numerator(current):
    numerator, *rest = objective.loss(current, batch, advantages, weights)
    return numerator, rest

  (total, (count, metrics)), gradient = jax.value_and_grad(
    numerator, has_aux=True
  )(current)
  return {'numerator': total, 'count': count, **metrics}, gradient


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
def test_interface(objective_of, name, episodes):
  objective = objective_of(name)
  batch, proximal, current = episodes.pack()
  got = _run(objective, batch, proximal, current)
  assert objective.name == name
  assert objective.group_size >= 1
  assert objective.baseline in ('event_time', 'receipt_order', 'none')
  assert got['advantages'].shape == batch.rewards.shape
  assert got['importance'].shape == batch.tokens.shape
  assert 0 < got['diagnostics']['tokens'] <= batch.action_mask.sum()
  assert got['sums'].keys().isdisjoint(got['diagnostics'])
  assert got.pop('weights').counted.dtype == jnp.bool_
  for leaf in jax.tree.leaves(got):
    assert leaf.dtype == jnp.float32
    assert jnp.isfinite(leaf).all()
  for leaf in (*got['sums'].values(), *got['diagnostics'].values()):
    assert leaf.shape == ()
  assert jnp.abs(got['gradient']).sum() > 0


@each_objective
def test_rows_and_their_order_do_not_matter(objective_of, name, episodes):
  objective = objective_of(name)
  packed, *logprobs = episodes.pack()
  want = _run(objective, packed, *logprobs)
  batch, *logprobs = episodes.pack(((5, 2), (3, 4), (0, 1)))
  got = _run(objective, batch, *logprobs)
  _assert_same(got, batch, want, packed)
  np.testing.assert_allclose(
    got['advantages'], want['advantages'], **_TOLERANCE
  )


@each_objective
def test_order_of_trajectories_does_not_matter(objective_of, name, episodes):
  objective = objective_of(name)
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
def test_one_a_row_padded_with_anything_is_the_same(
  objective_of, name, fill, episodes
):
  objective = objective_of(name)
  packed, *logprobs = episodes.pack()
  want = _run(objective, packed, *logprobs)
  layout = ((0,), (1,), (2,), (3,), (4,), (5,), ())
  batch, *logprobs = episodes.pack(layout, width=19, slots=9, fill=fill)
  got = _run(objective, batch, *logprobs)
  _assert_same(got, batch, want, packed)
  np.testing.assert_array_equal(got['gradient'][~batch.action_mask], 0)
  np.testing.assert_array_equal(got['importance'][~batch.action_mask], 0)
  np.testing.assert_array_equal(got['advantages'][6:], 0)


@each_objective
def test_observations_carry_no_gradient(objective_of, name, episodes):
  objective = objective_of(name)
  batch, *logprobs = episodes.pack()
  got = _run(objective, batch, *logprobs)
  np.testing.assert_array_equal(got['gradient'][~batch.action_mask], 0)


@each_objective
def test_microbatch_sums_add_up_to_the_whole(objective_of, name, episodes):
  objective = objective_of(name)
  # Every trajectory of a pair lies in another row: cuts split the groups.
  batch, proximal, current = episodes.pack(((0, 2), (1, 5), (3, 4)))
  whole = _run(objective, batch, proximal, current)
  advantages = whole['advantages']
  cuts = [
    _cut((current, batch, whole['weights']), slice(row, row + 1))
    for row in range(3)
  ]
  parts = [_sums(objective, advantages, *cut) for cut in cuts]
  total = jax.tree.map(lambda *sums: sum(sums), *(sums for sums, _ in parts))
  for got, want in zip(
    jax.tree.leaves(total), jax.tree.leaves(whole['sums']), strict=True
  ):
    np.testing.assert_allclose(got, want, **_TOLERANCE)
  np.testing.assert_allclose(
    np.concatenate([gradient for _, gradient in parts]),
    whole['gradient'],
    **_TOLERANCE,
  )


@each_objective
def test_nothing_usable_gives_zeros(objective_of, name, episodes):
  objective = objective_of(name)
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
def test_one_action_token_in_all_is_defined(objective_of, name, episodes):
  objective = objective_of(name)
  batch, *logprobs = episodes.pack()
  mask = np.zeros_like(batch.action_mask)
  mask[tuple(np.argwhere(batch.action_mask)[0])] = True
  got = _run(objective, batch._replace(action_mask=mask), *logprobs)
  for leaf in jax.tree.leaves(got):
    assert jnp.isfinite(leaf).all()
  np.testing.assert_array_equal(got['gradient'][~mask], 0)


@functools.partial(jax.jit, static_argnums=0)
def _slopes(objective, batch, proximal, current):
  """Gradients of the constants, of the loss in them, and of the loss."""
  advantages = objective.advantages(batch)
  weights, _ = objective.weights(batch, proximal, advantages)

  def constants(proximal, advantages):
    weights, metrics = objective.weights(batch, proximal, advantages)
    return weights.importance.sum() + sum(metrics.values())

  def in_constants(advantages, importance, denominator, behaviour):
    return objective.loss(
      current,
      batch._replace(behaviour_logprobs=behaviour),
      advantages,
      weights._replace(importance=importance, denominator_logprobs=denominator),
    )[0]

  def numerator(current, proximal):
    weights, _ = objective.weights(batch, proximal, advantages)
    return objective.loss(current, batch, advantages, weights)[0]

  behaviour = jnp.asarray(batch.behaviour_logprobs)
  return (
    jax.grad(constants, argnums=(0, 1))(proximal, advantages),
    jax.grad(in_constants, argnums=(0, 1, 2, 3))(
      advantages, *weights[:2], behaviour
    ),
    jax.grad(numerator)(proximal, proximal),
    jax.grad(lambda x: numerator(x, x))(proximal),
  )


@each_objective
def test_only_the_current_logprobs_carry_gradient(objective_of, name, episodes):
  objective = objective_of(name)
  of_constants, in_constants, apart, together = _slopes(
    objective, *episodes.pack()
  )
  for gradient in (*of_constants, *in_constants):
    np.testing.assert_array_equal(gradient, 0)
  # Proximal log-probs from the same forward pass leave the gradient alone.
  np.testing.assert_array_equal(together, apart)
  assert jnp.abs(apart).sum() > 0


@each_objective
@pytest.mark.parametrize('shift', [1e4, -1e4])
def test_far_off_policy_stays_finite(objective_of, name, shift, episodes):
  objective = objective_of(name)
  batch, proximal, current = episodes.pack()
  far = np.float32(shift)
  for logprobs in ((proximal + far, current), (proximal, current + far)):
    got = _run(objective, batch, *logprobs)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


@each_objective
def test_unknown_fields_are_refused(objective_of, name):
  with pytest.raises(ValueError, match='unknown field of objective'):
    objective_of(name, no_such_field=1)
