import dataclasses

from spopp_jax.objectives import spopp


def test_defaults_are_the_published_recipe():
  assert dataclasses.asdict(spopp.Config()) == {
    'measure': 'action_token',
    'baseline': 'event_time',
    'dual_clip': 2.0,
    'clip_low': 0.2,
    'clip_high': 0.28,
    'rollout_cap': 2.0,
    'rollout_level': 'token',
    'center': True,
    'scale': True,
  }
  objective = spopp.make(spopp.Config())
  assert (objective.name, objective.group_size) == ('spopp', 1)
  assert objective.baseline == 'event_time'
