r"""Writes the scenes whose official transcripts are golden.

  python tests/envs/household/write_scenes.py \
    tests/golden/household/scenes.jsonl

Six task types in three sizes, and two scenes made by hand that show what drawn
ones seldom do: receptacles side by side, an object on two receptacles, an
object inside another, a start beside a receptacle, every state of an object.
"""

import json
import sys

from spopp_jax.envs import household
from spopp_jax.envs.household import official

_PROBLEM = """
(define (problem quirks)
(:domain alfred)
(:objects
  agent1 - agent
  sinktype knifetype butterknifetype mugtype appletype spoontype - otype
  desklamptype booktype breadtype pantype - otype
  sinkbasintype microwavetype fridgetype countertoptype desktype - rtype
  drawertype shelftype - rtype
  loc_bar_0 loc_bar_1 loc_bar_2 loc_bar_3 - location
  countertop_bar_1 sink_bar_1_bar_sinkbasin fridge_bar_1 - receptacle
  microwave_bar_1 desk_bar_1 drawer_bar_1 drawer_bar_2 - receptacle
  mug_bar_1 mug_bar_2 apple_bar_1 spoon_bar_1 knife_bar_1 - object
  butterknife_bar_1 desklamp_bar_1 desklamp_bar_2 book_bar_1 - object
  bread_bar_1 pan_bar_1 faucet_bar_1 - object
)
(:init
  (= (total-cost) 0)
  (atLocation agent1 {start})
  (receptacleAtLocation countertop_bar_1 loc_bar_1)
  (receptacleAtLocation sink_bar_1_bar_sinkbasin loc_bar_1)
  (receptacleAtLocation microwave_bar_1 loc_bar_1)
  (receptacleAtLocation fridge_bar_1 loc_bar_2)
  (receptacleAtLocation desk_bar_1 loc_bar_3)
  (receptacleAtLocation drawer_bar_1 loc_bar_3)
  (receptacleAtLocation drawer_bar_2 loc_bar_3)
  (receptacleType countertop_bar_1 CounterTopType)
  (receptacleType sink_bar_1_bar_sinkbasin SinkBasinType)
  (receptacleType microwave_bar_1 MicrowaveType)
  (receptacleType fridge_bar_1 FridgeType)
  (receptacleType desk_bar_1 DeskType)
  (receptacleType drawer_bar_1 DrawerType)
  (receptacleType drawer_bar_2 DrawerType)
  (openable fridge_bar_1) (openable microwave_bar_1)
  (openable drawer_bar_1) (openable drawer_bar_2) (opened drawer_bar_2)
  (objectType mug_bar_1 MugType) (objectType mug_bar_2 MugType)
  (objectType apple_bar_1 AppleType) (objectType spoon_bar_1 SpoonType)
  (objectType knife_bar_1 KnifeType)
  (objectType butterknife_bar_1 ButterKnifeType)
  (objectType desklamp_bar_1 DeskLampType)
  (objectType desklamp_bar_2 DeskLampType)
  (objectType book_bar_1 BookType) (objectType bread_bar_1 BreadType)
  (objectType pan_bar_1 PanType)
  (canContain CounterTopType MugType) (canContain CounterTopType AppleType)
  (canContain CounterTopType SpoonType) (canContain CounterTopType KnifeType)
  (canContain CounterTopType BreadType) (canContain CounterTopType PanType)
  (canContain SinkBasinType MugType) (canContain SinkBasinType AppleType)
  (canContain SinkBasinType SpoonType) (canContain SinkBasinType KnifeType)
  (canContain FridgeType MugType) (canContain FridgeType AppleType)
  (canContain MicrowaveType MugType) (canContain DeskType DeskLampType)
  (canContain DeskType MugType) (canContain DeskType BookType)
  (canContain DrawerType BookType) (canContain DrawerType ButterKnifeType)
  (inReceptacle mug_bar_1 countertop_bar_1)
  (inReceptacle mug_bar_2 fridge_bar_1)
  (inReceptacle apple_bar_1 countertop_bar_1)
  (inReceptacle apple_bar_1 sink_bar_1_bar_sinkbasin)
  (inReceptacle spoon_bar_1 countertop_bar_1)
  (inReceptacleObject spoon_bar_1 mug_bar_1)
  (inReceptacle knife_bar_1 countertop_bar_1)
  (inReceptacle bread_bar_1 countertop_bar_1)
  (inReceptacle pan_bar_1 desk_bar_1)
  (inReceptacle butterknife_bar_1 drawer_bar_1)
  (inReceptacle book_bar_1 drawer_bar_2)
  (inReceptacle desklamp_bar_1 desk_bar_1)
  (inReceptacle desklamp_bar_2 drawer_bar_1)
  (objectAtLocation mug_bar_1 loc_bar_1)
  (objectAtLocation mug_bar_2 loc_bar_2)
  (objectAtLocation apple_bar_1 loc_bar_1)
  (objectAtLocation spoon_bar_1 loc_bar_2)
  (objectAtLocation knife_bar_1 loc_bar_1)
  (objectAtLocation bread_bar_1 loc_bar_1)
  (objectAtLocation pan_bar_1 loc_bar_3)
  (objectAtLocation butterknife_bar_1 loc_bar_3)
  (objectAtLocation book_bar_1 loc_bar_1)
  (objectAtLocation desklamp_bar_1 loc_bar_3)
  (objectAtLocation desklamp_bar_2 loc_bar_3)
  (objectAtLocation faucet_bar_1 loc_bar_1)
  (pickupable mug_bar_1) (pickupable mug_bar_2) (pickupable apple_bar_1)
  (pickupable spoon_bar_1) (pickupable knife_bar_1) (pickupable bread_bar_1)
  (pickupable butterknife_bar_1) (pickupable book_bar_1)
  (pickupable desklamp_bar_1)
  (isReceptacleObject mug_bar_1) (isReceptacleObject mug_bar_2)
  (toggleable desklamp_bar_1) (toggleable desklamp_bar_2)
  (sliceable apple_bar_1) (sliceable bread_bar_1)
  (heatable apple_bar_1) (heatable mug_bar_1) (heatable bread_bar_1)
  (coolable apple_bar_1) (coolable mug_bar_1) (coolable bread_bar_1)
  (cleanable apple_bar_1) (cleanable mug_bar_1) (cleanable knife_bar_1)
  (isCool bread_bar_1)
)
(:goal (and (exists (?r - receptacle) (exists (?o - object)
  (and (cleanable ?o) (objectType ?o AppleType)
    (receptacleType ?r FridgeType) (isClean ?o) (inReceptacle ?o ?r))))))
)
"""

_WALKTHROUGH = [
  'go to countertop 1',
  'take apple 1 from countertop 1',
  'clean apple 1 with sinkbasin 1',
  'go to fridge 1',
  'open fridge 1',
  'move apple 1 to fridge 1',
]

_TOUR = """\
look
go to countertop 1
look
examine countertop 1
examine apple 1
go to sinkbasin 1
go to microwave 1
take apple 1 from countertop 1
look
examine sinkbasin 1
move apple 1 to sinkbasin 1
look
take apple 1 from sinkbasin 1
look
move apple 1 to countertop 1
look
examine sinkbasin 1
take knife 1 from countertop 1
slice apple 1 with knife 1
slice bread 1 with knife 1
slice mug 2 with knife 1
clean knife 1 with sinkbasin 1
examine knife 1
move knife 1 to countertop 1
take apple 1 from countertop 1
examine apple 1
heat apple 1 with microwave 1
examine apple 1
clean apple 1 with sinkbasin 1
examine apple 1
move apple 1 to microwave 1
move apple 1 to sinkbasin 1
take bread 1 from countertop 1
examine bread 1
heat bread 1 with microwave 1
examine bread 1
go to fridge 1
look
examine bread 1
cool bread 1 with fridge 1
examine bread 1
move bread 1 to fridge 1
go to countertop 1
move bread 1 to countertop 1
take mug 2 from countertop 1
examine mug 2
heat mug 2 with microwave 1
clean mug 2 with sinkbasin 1
examine mug 2
inventory
open microwave 1
move mug 2 to microwave 1
look
examine microwave 1
take spoon 1 from countertop 1
examine spoon 1
move spoon 1 to countertop 1
go to desk 1
look
examine drawer 1
examine drawer 2
use desklamp 2
use desklamp 1
use desklamp 2
take desklamp 2 from desk 1
examine desklamp 2
use desklamp 2
move desklamp 2 to desk 1
take desklamp 1 from drawer 2
open drawer 2
take desklamp 1 from drawer 2
take pan 1 from desk 1
take book 1 from drawer 1
look
move book 1 to desk 1
look
take book 1 from desk 1
move book 1 to drawer 2
look
examine drawer 2
close drawer 1
take butterknife 1 from drawer 2
examine butterknife 1
go to countertop 1
look
slice bread 1 with butterknife 1
move butterknife 1 to countertop 1
go to drawer 1
move butterknife 1 to drawer 2
go to drawer 2
go to sinkbasin 1
take apple 1 from sinkbasin 1
look
go to fridge 1
open fridge 1
cool apple 1 with fridge 1
examine apple 1
move apple 1 to fridge 1
look
take apple 1 from fridge 1
help
"""


def _by_hand():
  for name, start in (('elsewhere', 'loc_bar_0'), ('beside', 'loc_bar_1')):
    yield {
      'id': f'quirks-{name}',
      'type': 'pick_clean_then_place_in_recep',
      'task': 'put a clean apple in fridge.',
      'walkthrough': _WALKTHROUGH,
      'pddl_problem': _PROBLEM.format(start=start),
      'commands': _TOUR.splitlines(),
    }


def main():
  with open(sys.argv[1], 'w', encoding='utf-8') as file:
    for size in ('small', 'medium', 'large'):
      for game in household.generate_games(num_games=6, seed=7, size=size):
        file.write(json.dumps(official.game_to_row(game)) + '\n')
    for row in _by_hand():
      file.write(json.dumps(row) + '\n')


if __name__ == '__main__':
  main()
