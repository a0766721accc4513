import pytest

from spopp_jax.envs.household import catalog, domain

_ROOMS = (*catalog.SMALL_ROOMS, *catalog.FULL_ROOMS)


@pytest.mark.parametrize('room', _ROOMS)
def test_everything_in_a_room_finds_a_place_there(room):
  for thing in room.objects:
    assert set(catalog.FITS[thing]) & set(room.receptacles), thing
  for fewest, most in room.receptacles.values():
    assert 0 <= fewest <= most


def test_appliances_are_those_of_the_domain():
  for name, rule in domain.TREATMENTS.items():
    places = {kind.removesuffix('type') for kind in rule.appliances}
    assert any(places & set(room.receptacles) for room in _ROOMS), name


def test_properties_are_of_known_kinds():
  for kinds in (
    catalog.VESSELS,
    catalog.SLICEABLE,
    catalog.HEATABLE,
    catalog.COOLABLE,
    catalog.CLEANABLE,
    catalog.LAMPS,
  ):
    assert kinds <= set(catalog.FITS)
