import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spopp_jax import objectives
from spopp_jax.learner import forward, packing, update

VALUES = (0.2, 0.6, 0.45, 0.8, 0.3, 0.5)
OPTIMIZER = optax.sgd(1.0, momentum=0.9)


@pytest.fixture(scope='module')
def learner(tiny):
  return update.Learner(
    tiny.config,
    objectives.make_objective('spopp', {}),
    OPTIMIZER,
    minibatch_size=2,
    row_length=tiny.row_length,
    row_buckets=(1, 2),
  )


def pack(tiny, trajectories, *, minibatches=1, num_slots=6):
  return packing.pack(
    trajectories,
    VALUES[: len(trajectories)],
    num_slots=num_slots,
    minibatches=minibatches,
    row_length=tiny.row_length,
    row_buckets=(1, 2, 4) if minibatches == 1 else (2,),
  )


def advantages_eq_6(trajectories):
  lengths = np.array([t.num_actions for t in trajectories], float)
  raw = np.array([t.reward for t in trajectories]) - VALUES
  centred = raw - (lengths @ raw) / lengths.sum()
  deviation = np.sqrt((lengths @ centred**2) / (lengths.sum() - 1))
  return centred / (deviation + 1e-8)


@pytest.fixture(scope='module')
def reference(tiny):
  """Takes one step a minibatch, episode by episode, without packing."""

  @jax.jit
  @jax.value_and_grad
  def numerator(params, tokens, mask, proximal, behaviour, a):
    current = tiny.padded_logprobs(params, tokens, 1.0)
    weight = jnp.minimum(jnp.exp(proximal - behaviour), 2.0)
    ratio = jnp.exp(current - proximal)
    terms = jnp.maximum(-a * ratio, -a * jnp.clip(ratio, 0.8, 1.28))
    terms = jnp.where(a < 0, jnp.minimum(terms, -2.0 * a), terms)
    return jnp.where(mask, terms * weight, 0).sum()

  @jax.jit
  def apply(params, opt_state, sums, count):
    grads = jax.tree.map(lambda x: x / count, sums)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def run_reference(params, trajectories, minibatches):
    pad = lambda x: np.pad(x, (0, tiny.row_length - len(x)))
    columns = [
      (
        pad(t.tokens),
        pad(t.action_mask),
        pad(tiny.logprobs_alone(params, t.tokens)),
        pad(t.behaviour_logprobs),
        np.float32(a),
      )
      for t, a in zip(trajectories, advantages_eq_6(trajectories), strict=True)
    ]
    opt_state = OPTIMIZER.init(params)
    losses = []
    for m in range(minibatches):
      count = sum(t.num_actions for t in trajectories[m::minibatches])
      results = [numerator(params, *x) for x in columns[m::minibatches]]
      sums = {
        name: sum(np.asarray(grads[name]) for _, grads in results)
        for name in params
      }
      params, opt_state = apply(params, opt_state, sums, count)
      losses.append(float(sum(value for value, _ in results)) / count)
    return params, losses

  return run_reference


@pytest.mark.parametrize('minibatches', [1, 3])
def test_steps_equal_those_of_the_formula_without_packing(
  tiny, learner, reference, minibatches
):
  trajectories = tiny.make_trajectories()
  params = tiny.make_parameters()
  expected, losses = reference(params, trajectories, minibatches)
  batch = pack(tiny, trajectories, minibatches=minibatches)
  state, metrics = learner.update(learner.init(params), batch)
  moved = 0.0
  for name, value in params.items():
    np.testing.assert_allclose(
      state.params[name] - value,
      expected[name] - value,
      rtol=1e-4,
      atol=3e-6,
      err_msg=name,
    )
    moved = max(moved, np.abs(expected[name] - value).max())
  assert moved > 0.05
  assert state.updates == minibatches
  assert metrics['skipped_update'] == 0
  assert metrics['grad_norm'] > 0
  # The reported loss is the mean over all action tokens.
  counts = [
    sum(t.num_actions for t in trajectories[m::minibatches])
    for m in range(minibatches)
  ]
  np.testing.assert_allclose(
    metrics['loss'], np.average(losses, weights=counts), rtol=1e-4, atol=1e-5
  )


def test_the_minibatches_of_the_reference_differ_in_what_matters(
  tiny, reference
):
  # Else a wrong denominator or a late proximal policy would not show.
  trajectories = tiny.make_trajectories()
  counts = [sum(t.num_actions for t in trajectories[m::3]) for m in range(3)]
  assert len(set(counts)) == 3
  assert {t.reward for t in trajectories} == {0, 1}
  params = tiny.make_parameters()
  first, _ = reference(params, trajectories, 1)
  gaps = [
    np.asarray(tiny.logprobs_alone(first, t.tokens))
    - np.asarray(tiny.logprobs_alone(params, t.tokens))
    for t in trajectories
  ]
  assert max(np.abs(gap).max() for gap in gaps) > 0.3


def leaves(state):
  """Every leaf but the count of skipped updates, as bytes."""
  kept = state._replace(skipped_in_a_row=None)
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(kept)]


def spoil(trajectory):
  logprobs = trajectory.behaviour_logprobs.copy()
  logprobs[1] = np.nan
  return dataclasses.replace(trajectory, behaviour_logprobs=logprobs)


def test_a_batch_that_is_not_finite_changes_nothing_and_is_counted(
  tiny, learner
):
  good = tiny.make_trajectories()
  bad = [spoil(good[0]), *good[1:]]
  # One sound update first, so that the momentum is not zero.
  params = tiny.make_parameters()
  state, _ = learner.update(learner.init(params), pack(tiny, good))
  before = leaves(state)
  for skipped in (1, 2):
    state, metrics = learner.update(state, pack(tiny, bad))
    assert metrics['skipped_update'] == 1
    assert metrics['skipped_in_a_row'] == state.skipped_in_a_row == skipped
    assert leaves(state) == before
    assert state.updates == 1
  # A batch without a token is no update and no failure.
  state, metrics = learner.update(state, pack(tiny, []))
  assert leaves(state) == before
  assert metrics['skipped_update'] == 1
  assert state.skipped_in_a_row == 2
  assert all(np.isfinite(value) for value in metrics.values())
  state, metrics = learner.update(state, pack(tiny, good))
  assert state.skipped_in_a_row == 0
  assert metrics['skipped_update'] == 0
  assert leaves(state) != before


@pytest.mark.parametrize('where, in_a_row', [(0, 0), (1, 0), (2, 1)])
def test_one_minibatch_is_skipped_alone(tiny, learner, where, in_a_row):
  trajectories = tiny.make_trajectories()
  trajectories[where] = spoil(trajectories[where])
  state, metrics = learner.update(
    learner.init(tiny.make_parameters()),
    pack(tiny, trajectories, minibatches=3),
  )
  assert metrics['skipped_update'] == 1
  assert state.updates == 2
  assert state.skipped_in_a_row == in_a_row
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_broken_parameters_stay_as_they_are(tiny, learner):
  params = tiny.make_parameters()
  params['model.norm.weight'][3] = np.nan
  state = learner.init(params)
  before = leaves(state)
  state, metrics = learner.update(state, pack(tiny, tiny.make_trajectories()))
  assert leaves(state) == before
  assert metrics['skipped_in_a_row'] == 1


def test_minibatches_without_a_trajectory_are_not_counted_as_failures(
  tiny, learner
):
  one = tiny.make_trajectories()[:1]
  state, metrics = learner.update(
    learner.init(tiny.make_parameters()), pack(tiny, one, minibatches=3)
  )
  assert metrics['skipped_update'] == 2
  assert state.skipped_in_a_row == 0
  assert state.updates == 1


def test_an_infinite_loss_with_a_finite_gradient_is_skipped(tiny):
  spopp = objectives.make_objective('spopp', {})

  def loss(*args):
    numerator, count, metrics = spopp.loss(*args)
    return numerator + jnp.inf, count, metrics

  learner = update.Learner(
    tiny.config,
    spopp._replace(loss=loss),
    OPTIMIZER,
    minibatch_size=6,
    row_length=tiny.row_length,
    row_buckets=(4,),
  )
  state = learner.init(tiny.make_parameters())
  before = leaves(state)
  state, metrics = learner.update(state, pack(tiny, tiny.make_trajectories()))
  assert np.isfinite(metrics['grad_norm'])
  assert state.skipped_in_a_row == 1
  assert leaves(state) == before


def test_the_callers_parameters_survive_the_donation(tiny, learner):
  params = {k: jnp.asarray(v) for k, v in tiny.make_parameters().items()}
  state = learner.init(params)
  learner.update(state, pack(tiny, tiny.make_trajectories()))
  for name, value in tiny.make_parameters().items():
    np.testing.assert_array_equal(params[name], value)


def test_one_compilation_a_bucket(tiny, learner):
  state = learner.init(tiny.make_parameters())
  sizes = []
  for seed in range(3):
    batch = pack(tiny, tiny.make_trajectories(seed=seed))
    state, _ = learner.update(state, batch)
    sizes.append(learner._update._cache_size())
  assert sizes == sizes[:1] * 3
  batch = pack(tiny, tiny.make_trajectories()[:3])
  assert batch.tokens.shape[1] == 2
  learner.update(state, batch)
  assert learner._update._cache_size() == sizes[0] + 1


@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_scores_equal_a_forward_pass_an_episode(tiny, temperature):
  learner = update.Learner(
    tiny.config,
    objectives.make_objective('spopp', {}),
    OPTIMIZER,
    settings=forward.Settings(temperature=temperature),
    minibatch_size=4,  # six episodes take two groups
    row_length=tiny.row_length,
    row_buckets=(3,),
  )
  params = tiny.make_parameters()
  trajectories = tiny.make_trajectories()
  scores = learner.score(params, trajectories)
  assert len(scores) == 6
  for trajectory, score in zip(trajectories, scores, strict=True):
    expected = tiny.logprobs_alone(params, trajectory.tokens, temperature)
    np.testing.assert_allclose(score, expected, atol=1e-5)
    assert score[0] == 0
    assert (score[1:] < 0).all()
  assert learner.score(params, []) == []


def make_optimizer(**changes):
  return update.make_optimizer(
    **{
      'learning_rate': 0.01,
      'b2': 0.99,
      'weight_decay': 0.0,
      'max_grad_norm': 1e9,
      'warmup_steps': 0,
      **changes,
    }
  )


def run(optimizer, gradients, params=0.0):
  """The value of one parameter after each update."""
  params = jnp.float32(params)
  state = optimizer.init(params)
  values = []
  for gradient in gradients:
    updates, state = optimizer.update(jnp.float32(gradient), state, params)
    params = optax.apply_updates(params, updates)
    values.append(float(params))
  return np.array(values)


@pytest.mark.parametrize(
  'warmup_steps, shares',
  [
    (0, [1, 1, 1, 1, 1, 1, 1]),
    (1, [1, 1, 1, 1, 1, 1, 1]),
    (2, [1 / 2, 1, 1, 1, 1, 1, 1]),
    (5, [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1, 1, 1]),
  ],
)
def test_the_rate_rises_linearly(warmup_steps, shares):
  # Under a constant gradient an Adam step is the rate itself.
  values = run(make_optimizer(warmup_steps=warmup_steps), [3.0] * 7)
  steps = -np.diff(values, prepend=0)
  np.testing.assert_allclose(steps, 0.01 * np.array(shares), rtol=1e-4)


def test_clip_moments_and_decay_by_hand():
  optimizer = make_optimizer(max_grad_norm=2.0, weight_decay=0.5, b2=0.9)
  values = run(optimizer, [-8.0, 1.0], params=1.0)
  first, second = -2.0, 1.0  # only the first exceeds the norm
  theta, m, v = 1.0, 0.0, 0.0
  expected = []
  for count, g in enumerate((first, second), start=1):
    m, v = 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * g * g
    step = (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.9**count)) + 1e-8)
    theta -= 0.01 * (step + 0.5 * theta)
    expected.append(theta)
  np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_the_norm_is_that_of_all_parameters_together():
  optimizer = make_optimizer(max_grad_norm=1.0)
  params = {'a': jnp.zeros(2), 'b': jnp.zeros(1)}
  state = optimizer.init(params)
  big = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([4.0])}
  _, state = optimizer.update(big, state, params)
  moments = optax.tree.get(state, 'mu')
  np.testing.assert_allclose(moments['a'], [0.06, 0.0], rtol=1e-5)
  np.testing.assert_allclose(moments['b'], [0.08], rtol=1e-5)


def _group_update(tiny, name, *, microbatches=1, minibatches=1, rows=4):
  """One update; group methods see three scattered pairs."""
  grouped = name != 'spopp'
  objective = objectives.make_objective(
    name, {'group_size': 2} if grouped else {}
  )
  learner = update.Learner(
    tiny.config,
    objective,
    OPTIMIZER,
    microbatches=microbatches,
    minibatch_size=6,
    row_length=tiny.row_length,
    row_buckets=(rows,),
  )
  batch = packing.pack(
    tiny.make_trajectories(seed=3),
    VALUES,
    groups=[7, 5, 9, 5, 7, 9] if grouped else None,
    group_size=objective.group_size,
    num_slots=6,
    minibatches=minibatches,
    row_length=tiny.row_length,
    row_buckets=(rows,),
    row_multiple=microbatches,
  )
  assert batch.tokens.shape[1] == rows
  params = tiny.make_parameters()
  state, metrics = learner.update(learner.init(params), batch)
  return {k: state.params[k] - params[k] for k in params}, metrics


@pytest.mark.parametrize(
  'name, minibatches', [('spopp', 1), ('tetpo', 2), ('gepo', 1)]
)
def test_microbatches_change_nothing(tiny, name, minibatches):
  want, want_metrics = _group_update(tiny, name, minibatches=minibatches)
  got, metrics = _group_update(
    tiny, name, minibatches=minibatches, microbatches=4
  )
  assert metrics.keys() == want_metrics.keys()
  for key, value in want_metrics.items():
    np.testing.assert_allclose(
      metrics[key], value, rtol=2e-5, atol=2e-6, err_msg=key
    )
  for key, value in want.items():
    np.testing.assert_allclose(
      got[key], value, rtol=1e-4, atol=2e-6, err_msg=key
    )
  assert max(np.abs(value).max() for value in want.values()) > 1e-3
