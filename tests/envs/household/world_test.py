from spopp_jax.envs.household.world import World

_GOAL = ('and',)


def _world(*facts):
  entities = (
    ('agent1', 'agent'),
    ('loc_bar_0', 'location'),
    ('loc_bar_1', 'location'),
    ('mug_bar_a', 'object'),
    ('mug_bar_b', 'object'),
    ('mug_bar_c', 'object'),
    ('sink_bar_a', 'object'),
    ('sink_bar_a_bar_sinkbasin', 'receptacle'),
    ('shelf_bar_a', 'receptacle'),
    ('mugtype', 'otype'),
    ('shelftype', 'rtype'),
  )
  facts = (('atlocation', 'agent1', 'loc_bar_0'), *facts)
  return World(entities, facts, _GOAL)


def test_the_first_id_of_a_kind_counts_highest():
  world = _world(
    ('pickupable', 'mug_bar_b'),
    ('pickupable', 'mug_bar_a'),
    ('moveable', 'sink_bar_a'),
    ('receptacleatlocation', 'sink_bar_a_bar_sinkbasin', 'loc_bar_1'),
  )
  assert world.names['mug_bar_a'] == 'mug 2'
  assert world.names['mug_bar_b'] == 'mug 1'
  assert world.ids['sink 1'] == 'sink_bar_a'
  assert world.ids['sinkbasin 1'] == 'sink_bar_a_bar_sinkbasin'


def test_what_no_fact_mentions_is_not_counted():
  world = _world(('pickupable', 'mug_bar_c'))
  assert world.objects == ('mug_bar_c',)
  assert world.names['mug_bar_c'] == 'mug 1'


def test_places_and_kinds():
  world = _world(
    ('receptacleatlocation', 'shelf_bar_a', 'loc_bar_1'),
    ('receptacleatlocation', 'sink_bar_a_bar_sinkbasin', 'loc_bar_1'),
    ('receptacletype', 'shelf_bar_a', 'shelftype'),
    ('objecttype', 'mug_bar_a', 'mugtype'),
    ('cancontain', 'shelftype', 'mugtype'),
  )
  assert world.at == {'loc_bar_1': ('shelf_bar_a', 'sink_bar_a_bar_sinkbasin')}
  assert world.fits == {'shelftype': {'mugtype'}}
  assert (world.agent, world.start) == ('agent1', 'loc_bar_0')
