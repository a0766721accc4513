"""What own scenes are furnished with: kinds, what fits where, rooms.

Kinds bear the names that the official scenes use.
"""

from typing import NamedTuple

OPENABLE = frozenset(('cabinet', 'drawer', 'fridge', 'microwave', 'safe'))
VESSELS = frozenset(('bowl', 'cup', 'mug', 'pan', 'plate', 'pot'))
SLICEABLE = frozenset(('apple', 'bread', 'lettuce', 'potato', 'tomato'))
HEATABLE = frozenset(
  ('apple', 'bread', 'cup', 'egg', 'mug', 'plate', 'potato', 'tomato')
)
COOLABLE = HEATABLE | {'bowl', 'lettuce', 'pan', 'pot'}
_CUTLERY = ('butterknife', 'fork', 'knife', 'ladle', 'spatula', 'spoon')
CLEANABLE = COOLABLE.difference(('bread',)) | {
  *_CUTLERY,
  'cloth',
  'dishsponge',
  'soapbar',
}
LAMPS = frozenset(('desklamp',))

_FOOD_PLACES = (
  'countertop',
  'diningtable',
  'fridge',
  'garbagecan',
  'microwave',
  'sinkbasin',
  'sidetable',
)
_DISH_PLACES = (
  'cabinet',
  'coffeemachine',
  'countertop',
  'desk',
  'diningtable',
  'microwave',
  'fridge',
  'shelf',
  'sidetable',
  'sinkbasin',
)
_SMALL_PLACES = (
  'armchair',
  'bed',
  'coffeetable',
  'desk',
  'diningtable',
  'drawer',
  'dresser',
  'safe',
  'shelf',
  'sidetable',
  'sofa',
  'tvstand',
)
_BATH_PLACES = (
  'bathtubbasin',
  'cabinet',
  'countertop',
  'drawer',
  'garbagecan',
  'shelf',
  'sinkbasin',
  'toilet',
)

# Object kind -> receptacle kinds that can contain it.
FITS: dict[str, tuple[str, ...]] = {
  'alarmclock': ('desk', 'dresser', 'shelf', 'sidetable'),
  'apple': _FOOD_PLACES,
  'book': _SMALL_PLACES,
  'bowl': (*_DISH_PLACES, 'coffeetable'),
  'bread': _FOOD_PLACES,
  'butterknife': ('countertop', 'diningtable', 'drawer', 'sinkbasin'),
  'cd': _SMALL_PLACES,
  'cellphone': _SMALL_PLACES,
  'cloth': _BATH_PLACES,
  'creditcard': _SMALL_PLACES,
  'cup': _DISH_PLACES,
  'desklamp': ('desk', 'dresser', 'shelf', 'sidetable'),
  'dishsponge': ('cabinet', 'countertop', 'drawer', 'sinkbasin'),
  'egg': _FOOD_PLACES,
  'fork': ('countertop', 'diningtable', 'drawer', 'sinkbasin'),
  'keychain': _SMALL_PLACES,
  'knife': ('countertop', 'diningtable', 'drawer', 'sinkbasin'),
  'ladle': ('cabinet', 'countertop', 'diningtable', 'drawer', 'sinkbasin'),
  'lettuce': _FOOD_PLACES,
  'mug': _DISH_PLACES,
  'pan': ('cabinet', 'countertop', 'diningtable', 'stoveburner', 'sinkbasin'),
  'pen': _SMALL_PLACES,
  'pencil': _SMALL_PLACES,
  'peppershaker': ('cabinet', 'countertop', 'diningtable', 'drawer', 'shelf'),
  'pillow': ('armchair', 'bed', 'sofa'),
  'plate': _DISH_PLACES,
  'pot': ('cabinet', 'countertop', 'diningtable', 'stoveburner', 'sinkbasin'),
  'potato': _FOOD_PLACES,
  'remotecontrol': _SMALL_PLACES,
  'saltshaker': ('cabinet', 'countertop', 'diningtable', 'drawer', 'shelf'),
  'soapbar': _BATH_PLACES,
  'soapbottle': _BATH_PLACES,
  'spatula': ('countertop', 'diningtable', 'drawer', 'sinkbasin'),
  'spoon': ('countertop', 'diningtable', 'drawer', 'sinkbasin'),
  'spraybottle': _BATH_PLACES,
  'statue': ('coffeetable', 'desk', 'dresser', 'shelf', 'sidetable'),
  'toiletpaper': ('cabinet', 'countertop', 'drawer', 'shelf', 'toilet'),
  'tomato': _FOOD_PLACES,
  'vase': ('coffeetable', 'desk', 'diningtable', 'shelf', 'sidetable'),
  'watch': _SMALL_PLACES,
}


class Room(NamedTuple):
  """A kind of room.

  Attributes:
    receptacles: kind -> (fewest, most) of it.
    objects: kinds that lie about.
    task_types: what may be asked in it; empty is everything possible.
  """

  receptacles: dict[str, tuple[int, int]]
  objects: tuple[str, ...]
  task_types: tuple[str, ...] = ()


_KITCHEN = Room(
  receptacles={
    'countertop': (1, 3),
    'sinkbasin': (1, 1),
    'fridge': (1, 1),
    'microwave': (1, 1),
    'coffeemachine': (1, 1),
    'garbagecan': (1, 1),
    'diningtable': (0, 1),
    'shelf': (0, 3),
    'stoveburner': (2, 4),
    'drawer': (1, 6),
    'cabinet': (2, 9),
  },
  objects=(
    'apple',
    'bowl',
    'bread',
    'butterknife',
    'cup',
    'dishsponge',
    'egg',
    'fork',
    'knife',
    'ladle',
    'lettuce',
    'mug',
    'pan',
    'peppershaker',
    'plate',
    'pot',
    'potato',
    'saltshaker',
    'soapbottle',
    'spatula',
    'spoon',
    'tomato',
  ),
)
_BEDROOM = Room(
  receptacles={
    'bed': (1, 1),
    'desk': (1, 2),
    'garbagecan': (1, 1),
    'sidetable': (1, 2),
    'dresser': (0, 1),
    'armchair': (0, 1),
    'safe': (0, 1),
    'shelf': (1, 6),
    'drawer': (2, 8),
  },
  objects=(
    'alarmclock',
    'book',
    'bowl',
    'cd',
    'cellphone',
    'creditcard',
    'desklamp',
    'keychain',
    'mug',
    'pen',
    'pencil',
    'pillow',
    'statue',
  ),
)
_LIVING_ROOM = Room(
  receptacles={
    'sofa': (1, 1),
    'armchair': (1, 2),
    'coffeetable': (1, 2),
    'tvstand': (0, 1),
    'sidetable': (1, 3),
    'dresser': (0, 1),
    'garbagecan': (1, 1),
    'shelf': (0, 4),
    'drawer': (1, 6),
  },
  objects=(
    'book',
    'cellphone',
    'creditcard',
    'desklamp',
    'keychain',
    'pillow',
    'remotecontrol',
    'statue',
    'vase',
    'watch',
  ),
)
_BATHROOM = Room(
  receptacles={
    'toilet': (1, 1),
    'sinkbasin': (1, 2),
    'countertop': (1, 1),
    'bathtubbasin': (0, 1),
    'garbagecan': (1, 1),
    'shelf': (0, 3),
    'drawer': (0, 4),
    'cabinet': (1, 5),
  },
  objects=('cloth', 'soapbar', 'soapbottle', 'spraybottle', 'toiletpaper'),
)

# Few kinds, so that a tiny policy meets each of them often.
_SMALL_STUDY = Room(
  receptacles={
    'desk': (0, 1),
    'drawer': (0, 1),
    'dresser': (0, 1),
    'shelf': (0, 2),
    'sidetable': (0, 1),
  },
  objects=('book', 'cellphone', 'desklamp', 'mug', 'pen'),
  task_types=('put', 'examine_in_light', 'put_two'),
)
_SMALL_KITCHEN = Room(
  receptacles={
    'cabinet': (0, 1),
    'countertop': (1, 1),
    'diningtable': (0, 1),
    'fridge': (0, 1),
    'microwave': (0, 1),
    'shelf': (0, 1),
    'sinkbasin': (0, 1),
  },
  objects=('apple', 'cup', 'mug', 'plate'),
  task_types=('clean', 'heat', 'cool'),
)

SMALL_ROOMS = (_SMALL_STUDY, _SMALL_KITCHEN)
FULL_ROOMS = (_KITCHEN, _BEDROOM, _LIVING_ROOM, _BATHROOM)
