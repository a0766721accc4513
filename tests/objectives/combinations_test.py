"""Whatever choices a recipe allows together make a sound objective.

Recipes are drawn at random from all that `Config` accepts and compared with
plain loops, in other rows, in another order, cut into microbatches, and with
garbage in every slot that does not count.
"""

import ast
import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import recipe_by_hand

from spopp_jax import objectives
from spopp_jax.objectives import composition, recipe

_GROUPS = np.array([0, 1, 0, 1, 0, 1], np.int32)
_BASELINES = [
  {'baseline': 'event_time', 'group_size': 1},
  {'baseline': 'receipt_order', 'group_size': 1},
  {'baseline': 'group_mean', 'group_size': 3},
  {'baseline': 'leave_one_out', 'group_size': 3},
]
_CHOICES = {
  'measure': ['action_token', 'trajectory', 'group', 'none'],
  'center': [True, False],
  'scale': [True, False],
  'drop_equal_groups': [True, False],
  'overlong_buffer': [2.0, 0.0],
  'overlong_limit': [4.0, 0.0],
  'ratio': ['token', 'sequence_mean', 'sequence_sum'],
  'ratio_to': ['proximal', 'behaviour', 'group_expectation'],
  'correction': ['none', 'token', 'sequence', 'icepop', 'tempered'],
  'rollout_cap': [1.0, 2.0],
  'window_low': [0.0, 0.7],
  'window_high': [1.5, 5.0],
  'target_ess_fraction': [0.6, 0.85, 1.0],
  'tempering_iterations': [3, 24],
  'tempering_scope': ['group', 'batch'],
  'tempering_log_ratio': ['sum', 'mean'],
  'tempering_scale': ['mean_one', 'sum_one'],
  'token_mask': ['none', 'window', 'geometric_mean', 'second_moment'],
  'second_moment_threshold': [0.04, 0.3],
  'second_moment_variant': ['paper', 'official_cap', 'areal'],
  'denominator': ['all', 'kept'],
  'clip_region': ['ratio', 'behaviour'],
  'dual_clip': [0.0, 1.5],
  'surrogate': ['clip', 'clip_weight', 'unclipped', 'likelihood'],
  'clip_low': [0.0, 0.2, 1.0],
  'clip_high': [0.0, 0.28],
  'aggregation': [
    'token_mean',
    'token_sum',
    'seq_mean_token_mean',
    'seq_mean_token_sum',
    'seq_mean_token_sum_norm',
  ],
  'aggregation_norm': [1.0, 7.0],
}


def _accepted(fields):
  try:
    recipe.Config(**fields)
  except ValueError:
    return False
  return True


@st.composite
def recipes(draw):
  """A recipe: field after field, any value that goes with those before."""
  fields = {**draw(st.sampled_from(_BASELINES)), 'measure': 'none'}
  fields['aggregation'] = 'token_mean'
  for name in draw(st.permutations(sorted(_CHOICES))):
    values = [v for v in _CHOICES[name] if _accepted({**fields, name: v})]
    if values:
      fields[name] = draw(st.sampled_from(values))
  return recipe.Config(**fields)


def test_every_choice_of_the_recipe_is_drawn():
  drawn = {*_CHOICES, *_BASELINES[0]}
  assert drawn == {field.name for field in dataclasses.fields(recipe.Config)}
  words = {**_CHOICES, 'baseline': [b['baseline'] for b in _BASELINES]}
  plain = {
    'baseline': 'event_time',
    'measure': 'none',
    'aggregation': 'token_sum',
  }
  for name, values in words.items():
    if isinstance(values[0], str):
      with pytest.raises(ValueError, match=r'must be one of \(') as error:
        recipe.Config(**{**plain, name: '?'})
      allowed = str(error.value).partition(' must be one of ')[2]
      assert set(ast.literal_eval(allowed)) == set(values)


def _rollouts(episodes, usable):
  """The usable episodes' action tokens."""
  pick = lambda values, i: np.float64(np.float32(values[i]))[
    episodes.action_mask[i]
  ]
  return [
    recipe_by_hand.Rollout(
      _GROUPS[i],
      float(episodes.rewards[i]),
      float(episodes.values[i]),
      pick(episodes.behaviour, i),
      pick(episodes.proximal, i),
      pick(episodes.current, i),
    )
    for i in np.flatnonzero(usable)
  ]


def _runner(objective):
  """Everything an update computes, whole and in microbatches of one row."""

  @jax.jit
  def run(batch, proximal, current):
    advantages = objective.advantages(batch)
    weights, scalars = objective.weights(batch, proximal, advantages)

    def numerator(current, batch, weights):
      total, *rest = objective.loss(current, batch, advantages, weights)
      return total, rest

    differentiated = jax.value_and_grad(numerator, has_aux=True)
    rows = lambda tree: jax.tree.map(
      lambda x: x[:, None] if x.ndim >= 2 else x, tree
    )
    axes = lambda tree: jax.tree.map(lambda x: 0 if x.ndim >= 2 else None, tree)
    cut = (current, batch, weights)
    parts, part_gradients = jax.vmap(differentiated, in_axes=axes(cut))(
      *rows(cut)
    )
    whole, gradient = differentiated(*cut)
    diagnostics = objective.diagnostics(batch, advantages, proximal, weights)
    return {
      'advantages': advantages,
      'importance': weights.importance,
      'gradient': gradient,
      'part gradients': part_gradients[:, 0],
      'sums': whole,
      'part sums': jax.tree.map(lambda x: x.sum(), parts),
      'scalars': {**scalars, **diagnostics, 'tokens': weights.tokens},
    }

  return run


def _places(batch):
  """Row and column of every action token, in order of the trajectories."""
  rows, columns = np.nonzero(batch.action_mask)
  order = np.lexsort(
    (batch.positions[rows, columns], batch.trajectory_ids[rows, columns])
  )
  return rows[order], columns[order]


def _pack(episodes, usable, *args, **kwargs):
  batch, *logprobs = episodes.pack(*args, **kwargs)
  return batch._replace(usable=usable, group_ids=_GROUPS), *logprobs


def _assert_close(got, want, what, config):
  want = np.asarray(want, float)
  scale = max(1, np.abs(want).max(initial=0))
  np.testing.assert_allclose(
    np.asarray(got) / scale, want / scale, atol=2e-5, err_msg=f'{what} {config}'
  )


def check(config, episodes, usable):
  """One recipe on one batch."""
  run = _runner(composition.compose('drawn', config))
  batch, *logprobs = _pack(episodes, usable)
  got = run(batch, *logprobs)
  for leaf in jax.tree.leaves(got):
    assert np.isfinite(leaf).all(), config
  _assert_close(got['part sums'][0], got['sums'][0], 'microbatches', config)
  for part, whole in zip(
    jax.tree.leaves(got['part sums'][1]),
    jax.tree.leaves(got['sums'][1]),
    strict=True,
  ):
    _assert_close(part, whole, 'sums of microbatches', config)
  _assert_close(got['part gradients'], got['gradient'], 'their slopes', config)
  _against_loops(config, episodes, usable, batch, got)
  for layout, fill in (
    (((5, 4), (3, 2), (1, 0)), 0.0),
    (((0, 1), (2, 3), (4, 5)), np.nan),
    (((0, 5), (2, 4), (3, 1)), np.inf),
    (((0, 1), (2, 3), (4, 5)), -1e30),
  ):
    moved, *logprobs = _pack(episodes, usable, layout, fill=fill)
    moved.rewards[~usable] = fill
    moved.values[~usable] = fill
    other = run(moved, *logprobs)
    _assert_close(other['advantages'], got['advantages'], 'advantages', config)
    for part in ('sums', 'scalars'):
      _assert_close(
        jax.tree.leaves(other[part]), jax.tree.leaves(got[part]), part, config
      )
    for part in ('importance', 'gradient'):
      at_tokens = other[part][_places(moved)]
      _assert_close(at_tokens, got[part][_places(batch)], part, config)
      assert np.all(other[part][~moved.action_mask] == 0), config


def _against_loops(config, episodes, usable, batch, got):
  rollouts = _rollouts(episodes, usable)
  want = recipe_by_hand.solve(config, rollouts)
  chosen = np.zeros(6, bool)
  chosen[usable] = recipe_by_hand.members(config, rollouts)
  np.testing.assert_array_equal(got['advantages'][~chosen], 0)
  rows, columns = _places(batch)
  members = chosen[batch.trajectory_ids[rows, columns]]
  at_tokens = lambda part: got[part][rows, columns]
  for part, lists in (
    ('importance', want.weights),
    ('gradient', want.slopes),
  ):
    np.testing.assert_array_equal(at_tokens(part)[~members], 0)
    together = np.concatenate([*lists, []])
    _assert_close(at_tokens(part)[members], together, part, config)
  _assert_close(
    got['advantages'][chosen], want.advantages, 'advantages', config
  )
  numerator, (count, _) = got['sums']
  _assert_close(numerator, want.numerator, 'numerator', config)
  np.testing.assert_allclose(count, want.count, rtol=1e-6)
  tokens = sum(counted.sum() for counted in want.counted)
  assert got['scalars']['tokens'] == tokens, config


_BATCHES = {
  'rewards': st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=6, max_size=6),
  'unusable': st.sampled_from([None, 0, 5]),
  'seed': st.integers(0, 99),
  'scale': st.sampled_from([0.1, 0.3, 0.8]),
}
# Every example compiles a program: shrinking would take minutes.
_settings = functools.partial(
  hypothesis.settings,
  deadline=None,
  phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
  suppress_health_check=[
    hypothesis.HealthCheck.too_slow,
    hypothesis.HealthCheck.function_scoped_fixture,
    hypothesis.HealthCheck.differing_executors,
  ],
)


def _draw(make_episodes, config, rewards, unusable, seed, scale):
  episodes = make_episodes(seed, scale)
  episodes.rewards = np.array(rewards, np.float32)
  usable = np.arange(6) != (6 if unusable is None else unusable)
  check(config, episodes, usable)


@hypothesis.given(config=recipes(), **_BATCHES)
@_settings(max_examples=8)
def test_any_recipe(make_episodes, config, **drawn):
  _draw(make_episodes, config, **drawn)


@pytest.mark.slow
@pytest.mark.timeout(900)
@hypothesis.given(config=recipes(), **_BATCHES)
@_settings(max_examples=60)
def test_many_recipes(make_episodes, config, **drawn):
  _draw(make_episodes, config, **drawn)


_NAMED = {
  'TETPO over a single-stream batch': (
    'spopp',
    {'correction': 'tempered', 'tempering_scope': 'batch'},
  ),
  'TETPO with a second-moment mask': (
    'tetpo',
    {'group_size': 3, 'token_mask': 'second_moment'},
  ),
  'TETPO with a ratio window, kept tokens': (
    'tetpo',
    {
      'group_size': 3,
      'token_mask': 'window',
      'window_low': 0.8,
      'window_high': 1.3,
      'denominator': 'kept',
    },
  ),
  'TETPO of means, sum one, the weight clipped': (
    'tetpo',
    {
      'group_size': 3,
      'target_ess_fraction': 0.95,
      'tempering_log_ratio': 'mean',
      'tempering_scale': 'sum_one',
      'surrogate': 'clip_weight',
      'clip_region': 'ratio',
      'clip_high': 3.0,
      'clip_low': 1.0,
    },
  ),
  'SPO++ with sequence weights': ('spopp', {'correction': 'sequence'}),
  'GEPO of sums': (
    'gepo',
    {'group_size': 3, 'ratio': 'sequence_sum', 'surrogate': 'unclipped'},
  ),
  'RLOO whitened but not centred, IcePop clipped': (
    'rloo',
    {
      'group_size': 3,
      'measure': 'action_token',
      'center': False,
      'correction': 'icepop',
      'window_high': 1.3,
      'ratio_to': 'proximal',
      'surrogate': 'clip_weight',
      'dual_clip': 1.5,
      'aggregation': 'token_sum',
    },
  ),
  'DAPO with geometric means and sequence ratios': (
    'dapo',
    {
      'group_size': 3,
      'overlong_limit': 4.0,
      'overlong_buffer': 3.0,
      'token_mask': 'geometric_mean',
      'window_low': 0.8,
      'window_high': 1.3,
      'denominator': 'kept',
      'ratio': 'sequence_sum',
      'clip_high': 2.0,
      'aggregation': 'seq_mean_token_sum_norm',
      'aggregation_norm': 7.0,
    },
  ),
}


@pytest.mark.parametrize('title', _NAMED)
def test_named_compositions(make_episodes, title):
  name, overrides = _NAMED[title]
  config = objectives.config_of(name, overrides)
  episodes, usable = make_episodes(8, 0.4), np.ones(6, bool)
  check(config, episodes, usable)
  answer = recipe_by_hand.solve(config, _rollouts(episodes, usable))
  weights = np.concatenate(answer.weights)
  assert np.count_nonzero(np.concatenate(answer.slopes)) > 0
  if config.token_mask != 'none' or config.correction == 'icepop':
    assert 0 < np.count_nonzero(weights) < len(weights)
  if config.correction != 'none' and config.surrogate != 'clip_weight':
    assert len(set(weights)) > 2
