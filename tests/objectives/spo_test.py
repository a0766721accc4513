import dataclasses

from spopp_jax.objectives import spo, spopp


def test_defaults_are_the_published_recipe():
  config = spo.Config()
  assert config.measure == 'trajectory'
  assert config.baseline == 'receipt_order'
  assert config.dual_clip == 10.0
  objective = spo.make(config)
  assert (objective.name, objective.group_size) == ('spo', 1)
  assert objective.baseline == 'receipt_order'


def test_spo_and_spopp_differ_in_three_fields():
  ours = dataclasses.asdict(spo.Config())
  theirs = dataclasses.asdict(spopp.Config())
  different = {name for name in ours if ours[name] != theirs[name]}
  assert different == {'measure', 'baseline', 'dual_clip'}
