import pytest

from spopp_jax.envs import household
from spopp_jax.envs.household.domain import FLUENTS, PREDICATES
from spopp_jax.envs.household.state import State


@pytest.fixture
def state(golden_games):
  return State(golden_games['quirks-elsewhere'].world)


def test_taking_keeps_the_object_where_else_it_lies(state):
  state.go('countertop_bar_1')
  state.take('apple_bar_1', 'countertop_bar_1')
  assert state.held == ['apple_bar_1']
  assert 'apple_bar_1' not in state.contents('countertop_bar_1')
  assert state.contents('sink_bar_1_bar_sinkbasin') == ['apple_bar_1']


def test_hands_hold_one_object(state):
  state.go('countertop_bar_1')
  state.take('apple_bar_1', 'countertop_bar_1')
  assert not state.may_take('knife_bar_1', 'countertop_bar_1')
  state.move('apple_bar_1', 'countertop_bar_1')
  assert state.may_take('knife_bar_1', 'countertop_bar_1')


def test_doors_keep_things_in_and_out(state):
  state.go('drawer_bar_1')
  assert not state.may_take('butterknife_bar_1', 'drawer_bar_1')
  assert not state.may_close('drawer_bar_1')
  state.open('drawer_bar_1')
  assert not state.may_open('drawer_bar_1')
  state.take('butterknife_bar_1', 'drawer_bar_1')
  state.close('drawer_bar_1')
  assert not state.may_move('butterknife_bar_1', 'drawer_bar_1')
  assert state.may_move('butterknife_bar_1', 'drawer_bar_2')
  assert not state.may_move('butterknife_bar_1', 'desk_bar_1')


def test_heat_and_cool_undo_each_other(state):
  state.go('countertop_bar_1')
  state.take('bread_bar_1', 'countertop_bar_1')
  assert state.has('iscool', 'bread_bar_1')
  assert state.may_treat('heat', 'bread_bar_1', 'microwave_bar_1')
  assert not state.may_treat('cool', 'bread_bar_1', 'microwave_bar_1')
  assert not state.may_treat('clean', 'bread_bar_1', 'sink_bar_1_bar_sinkbasin')
  state.treat('heat', 'bread_bar_1')
  assert state.has('ishot', 'bread_bar_1')
  assert not state.has('iscool', 'bread_bar_1')
  state.treat('cool', 'bread_bar_1')
  assert not state.has('ishot', 'bread_bar_1')


def test_a_switch_flips_yet_counts_as_used(state):
  state.go('desk_bar_1')
  assert state.may_use('desklamp_bar_1')
  assert not state.may_use('book_bar_1')
  state.use('desklamp_bar_1')
  assert state.has('ison', 'desklamp_bar_1')
  state.use('desklamp_bar_1')
  assert not state.has('ison', 'desklamp_bar_1')
  assert state.has('istoggled', 'desklamp_bar_1')


def test_only_blades_slice(state):
  state.go('countertop_bar_1')
  state.take('spoon_bar_1', 'countertop_bar_1')
  assert not state.may_slice('apple_bar_1', 'spoon_bar_1')
  state.move('spoon_bar_1', 'countertop_bar_1')
  assert not state.may_slice('apple_bar_1', 'knife_bar_1')
  state.take('knife_bar_1', 'countertop_bar_1')
  assert state.may_slice('apple_bar_1', 'knife_bar_1')
  assert not state.may_slice('mug_bar_1', 'knife_bar_1')


def test_nothing_is_possible_with_an_unknown_name(state):
  state.go('countertop_bar_1')
  for allowed in (
    state.may_go(''),
    state.may_open(''),
    state.may_close(''),
    state.may_examine(''),
    state.may_use(''),
    state.may_take('', 'countertop_bar_1'),
    state.may_take('apple_bar_1', ''),
    state.may_move('', ''),
    state.may_slice('', ''),
    state.may_treat('heat', '', ''),
  ):
    assert not allowed


def test_fluents_are_exactly_what_actions_change(golden_games, golden_rows):
  key = 'quirks-elsewhere'
  environment = household.HouseholdEnvironment(golden_games[key])
  start = golden_games[key].world.facts
  changed = set()
  for command in golden_rows[key]['commands']:
    environment.step(command)
    changed |= {atom[0] for atom in start ^ environment.state.facts}
  assert changed == FLUENTS
  assert set(PREDICATES) >= FLUENTS
