import dataclasses

import pytest

from spopp_jax import objectives
from spopp_jax.objectives import recipe

SINGLE = {
  'group_size': 1,
  'correction': 'token',
  'rollout_cap': 2.0,
  'clip_low': 0.2,
  'clip_high': 0.28,
  'surrogate': 'clip',
  'ratio_to': 'proximal',
  'aggregation': 'token_mean',
}
GROUPED = {
  'group_size': 8,
  'baseline': 'group_mean',
  'correction': 'none',
  'surrogate': 'clip',
  'ratio': 'token',
  'ratio_to': 'behaviour',
  'clip_low': 0.2,
  'clip_high': 0.2,
  'dual_clip': 0.0,
}
PUBLISHED = {
  'spo': {
    **SINGLE,
    'baseline': 'receipt_order',
    'measure': 'trajectory',
    'dual_clip': 10.0,
  },
  'spopp': {
    **SINGLE,
    'baseline': 'event_time',
    'measure': 'action_token',
    'dual_clip': 2.0,
  },
  'grpo': {
    **GROUPED,
    'measure': 'group',
    'aggregation': 'seq_mean_token_mean',
  },
  'dr_grpo': {
    **GROUPED,
    'measure': 'none',
    'aggregation': 'seq_mean_token_sum_norm',
    'aggregation_norm': 3000.0,
  },
  'rloo': {
    **GROUPED,
    'baseline': 'leave_one_out',
    'measure': 'none',
    'surrogate': 'unclipped',
    'aggregation': 'seq_mean_token_sum',
  },
  'dapo': {
    **GROUPED,
    'measure': 'group',
    'clip_high': 0.28,
    'drop_equal_groups': True,
    'overlong_limit': 20480.0,
    'overlong_buffer': 4096.0,
    'aggregation': 'token_mean',
  },
  'gspo': {
    **GROUPED,
    'measure': 'group',
    'ratio': 'sequence_mean',
    'clip_low': 3e-4,
    'clip_high': 4e-4,
    'aggregation': 'seq_mean_token_mean',
  },
  'cispo': {
    **GROUPED,
    'measure': 'group',
    'surrogate': 'likelihood',
    'clip_low': 1.0,
    'aggregation': 'token_mean',
  },
  'reinforce_pp_baseline': {
    **GROUPED,
    'measure': 'action_token',
    'aggregation': 'token_mean',
  },
  'm2po': {
    **GROUPED,
    'measure': 'group',
    'token_mask': 'second_moment',
    'second_moment_threshold': 0.04,
    'second_moment_variant': 'paper',
    'denominator': 'all',
    'surrogate': 'unclipped',
    'aggregation': 'token_mean',
  },
  'gepo': {
    **GROUPED,
    'measure': 'none',
    'ratio': 'sequence_mean',
    'ratio_to': 'group_expectation',
    'aggregation': 'seq_mean_token_mean',
  },
  'tetpo': {
    **GROUPED,
    'measure': 'group',
    'correction': 'tempered',
    'target_ess_fraction': 0.85,
    'tempering_iterations': 24,
    'tempering_scope': 'group',
    'tempering_log_ratio': 'sum',
    'tempering_scale': 'mean_one',
    'ratio_to': 'proximal',
    'clip_region': 'behaviour',
    'aggregation': 'seq_mean_token_mean',
  },
}


@pytest.mark.parametrize('name', objectives.objective_names())
def test_defaults_are_the_published_recipe(name):
  config = objectives.config_of(name, {})
  off = {
    field.name: field.default
    for field in dataclasses.fields(recipe.Config)
    if field.default is not dataclasses.MISSING
  }
  want = {**off, **PUBLISHED[name]}
  assert dataclasses.asdict(config) == want
  objective = objectives.make_objective(name, {})
  assert (objective.name, objective.group_size) == (name, want['group_size'])
  single = {'spo': 'receipt_order', 'spopp': 'event_time'}
  assert objective.baseline == single.get(name, 'none')


@pytest.mark.parametrize(
  ('name', 'overrides', 'words'),
  [
    ('spopp', {'dual_clip': 1.0}, r'dual_clip \(1.0\) must exceed 1'),
    ('spopp', {'dual_clip': float('inf')}, r'dual_clip \(inf\)'),
    ('spopp', {'dual_clip': '2'}, r"dual_clip \('2'\) must be a number"),
    ('spopp', {'clip_low': 1.1}, r'clip_low \(1.1\) must lie in \[0, 1\]'),
    ('spopp', {'clip_high': -0.1}, r'clip_high \(-0.1\) must be at least 0'),
    ('spopp', {'clip_high': True}, r'clip_high \(True\) must be a number'),
    ('spopp', {'rollout_cap': 0.5}, r'rollout_cap \(0.5\) must be at least 1'),
    ('spopp', {'rollout_cap': float('nan')}, r'rollout_cap \(nan\)'),
    ('spopp', {'measure': 'token'}, r"measure \('token'\) must be one of"),
    ('spopp', {'correction': 'row'}, r"correction \('row'\) must be one of"),
    ('spopp', {'baseline': 'mean'}, r"baseline \('mean'\) must be one of"),
    ('spopp', {'center': 1}, r'center \(1\) must be a bool'),
    ('grpo', {'group_size': 2.5}, r'group_size \(2.5\) must be an integer'),
    ('tetpo', {'target_ess_fraction': 0.0}, r'must lie in \(0, 1\]'),
    ('tetpo', {'target_ess_fraction': 1.1}, r'must lie in \(0, 1\]'),
    ('m2po', {'second_moment_threshold': 0.0}, 'must exceed 0'),
    # Combinations.
    ('grpo', {'group_size': 1}, r'group_size \(1\) must be at least 2'),
    ('spopp', {'group_size': 4}, r'group_size \(4\) must be 1'),
    ('spopp', {'measure': 'group'}, "baseline 'event_time' does not have"),
    ('grpo', {'center': False}, "measure 'group' leaves nothing"),
    ('spopp', {'drop_equal_groups': True}, 'would drop everything'),
    ('dapo', {'overlong_buffer': 0.0}, r'overlong_buffer \(0.0\) must lie in'),
    ('spopp', {'window_low': 5.0}, r'window_low \(5.0\) must lie below'),
    ('spopp', {'correction': 'tempered'}, "needs tempering_scope 'batch'"),
    ('spopp', {'ratio_to': 'behaviour'}, 'it would count twice'),
    ('grpo', {'correction': 'token'}, 'it would count twice'),
    ('gepo', {'correction': 'tempered'}, 'it would count twice'),
    ('grpo', {'surrogate': 'clip_weight'}, "must not be 'none'"),
    ('gepo', {'ratio': 'token'}, 'is a ratio of trajectories'),
    ('cispo', {'ratio': 'sequence_mean'}, "ratio must be 'token'"),
    ('gspo', {'clip_region': 'behaviour'}, "needs surrogate 'clip'"),
    ('m2po', {'dual_clip': 2.0}, "no meaning for surrogate 'unclipped'"),
    ('grpo', {'denominator': 'kept'}, 'needs a token_mask'),
    (
      'grpo',
      {'aggregation': 'seq_mean_token_sum_norm'},
      'aggregation_norm must exceed 0',
    ),
  ],
)
def test_what_does_not_go_together_is_refused(name, overrides, words):
  with pytest.raises(ValueError, match=words):
    objectives.make_objective(name, overrides)
