import pytest

from spopp_jax import objectives


def test_names_are_sorted():
  names = objectives.objective_names()
  assert list(names) == sorted(names)
  assert {'spo', 'spopp'} <= set(names)


def test_overrides_reach_the_objective():
  objective = objectives.make_objective('spopp', {'baseline': 'receipt_order'})
  assert objective.baseline == 'receipt_order'


def test_unknown_name_is_refused_with_the_nearest():
  with pytest.raises(ValueError, match=r"'spop': did you mean 'spo"):
    objectives.make_objective('spop', {})


def test_unknown_field_is_refused_with_the_nearest_and_all_allowed():
  with pytest.raises(
    ValueError,
    match=r"'clip_hihg': did you mean 'clip_high'\? allowed: .*scale",
  ):
    objectives.make_objective('spo', {'clip_hihg': 0.3})
