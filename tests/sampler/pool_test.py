"""A pool answers every request once, whoever joins, leaves or is lost."""

import collections
import re

import hypothesis
import hypothesis.strategies as st
import pool_world
import pytest
from pool_world import PARAMS, request

from spopp_jax import types
from spopp_jax.sampler import errors, publication

Status = types.Status


def make(*names, version=0, **settings):
  """Returns a world whose services have a snapshot."""
  world = pool_world.World(*names, **settings)
  world.settle()
  world.pool.publish(PARAMS, version)
  world.settle()
  return world


def submit(world, *numbers, version=0):
  world.pool.submit([request(n, version) for n in numbers])


def held(world):
  return {name: list(s.held) for name, s in world.services.items()}


def test_work_goes_to_whoever_has_the_most_room():
  world = make('a', 'b', slots=2)
  submit(world, 0, 1, 2)
  assert {name: len(ids) for name, ids in held(world).items()} == {
    'a': 2,
    'b': 1,
  }
  world.services['a'].answer('r0')
  world.services['a'].answer('r2')
  world.settle()
  submit(world, 3, 4, 5)
  assert {name: len(ids) for name, ids in held(world).items()} == {
    'a': 2,
    'b': 2,
  }


def test_no_service_holds_more_than_twice_its_slots():
  world = make('a', slots=2)
  submit(world, *range(9))
  for number in range(9):
    assert len(world.services['a'].held) == min(4, 9 - number)
    world.services['a'].answer(f'r{number}')
    assert world.pool.next(1.0).request_id == f'r{number}'
  with pytest.raises(errors.SamplerTimeout, match='nothing is outstanding'):
    world.pool.next(1.0)


def test_a_lost_service_has_its_requests_asked_of_another_under_their_ids():
  world = make('a', 'b', slots=2)
  submit(world, 0, 1, 2, 3)
  lost = list(world.services['a'].held)
  world.delays = True
  world.services['a'].end()
  world.pool.handle_event(1.0)
  assert set(world.services['b'].held) == {'r0', 'r1', 'r2', 'r3'}
  assert world.pool.redispatched == len(lost) == 2
  world.settle()
  # It is back, in a session of its own and with the snapshot.
  assert world.services['a'].sessions == 2
  assert world.services['a'].installed == [0, 0]
  submit(world, 4)
  assert list(world.services['a'].held) == ['r4']


def test_late_answers_are_passed_on_to_be_counted():
  world = make('a', 'b')
  submit(world, 0)
  (first,) = [s for s in world.services.values() if s.held]
  world.pass_time(12)  # silent: the other one is asked too
  assert [list(s.held) for s in world.services.values()] == [['r0'], ['r0']]
  for service in world.services.values():
    service.answer('r0')
  world.settle()
  assert [world.pool.next(1.0).request_id for _ in range(2)] == ['r0', 'r0']
  assert world.pool.redispatched == 1
  assert first.asked == ['r0']


def test_what_every_service_leaves_unanswered_is_given_back():
  world = make('a', 'b', attempts=9)
  submit(world, 0)
  world.pass_time(25)
  answer = world.pool.next(1.0)
  assert (answer.request_id, answer.status) == ('r0', Status.SAMPLER_ERROR)
  assert [s.asked for s in world.services.values()] == [['r0'], ['r0']]


def test_what_is_asked_again_of_a_session_is_the_same_request():
  # A service refuses an id that comes back with other content.
  world = make('a', slots=2)
  submit(world, 0)
  world.pool.publish(PARAMS, 1)
  world.services['a'].end(forgets=False)
  world.settle()
  assert world.services['a'].held['r0'].policy_version == 0
  world.services['a'].answer('r0')
  world.settle()
  assert world.services['a'].installed == [0, 1]


def test_the_only_service_is_asked_again_in_the_same_session():
  world = make('a', slots=2)
  submit(world, 0, 1)
  world.services['a'].end(forgets=False)
  world.settle()
  assert world.services['a'].sessions == 1
  assert world.services['a'].asked == ['r0', 'r1', 'r0', 'r1']
  assert world.pool.redispatched == 0
  # One that was restarted has neither snapshot nor requests.
  world.services['a'].end()
  world.settle()
  assert world.services['a'].installed == [0, 0]
  assert list(world.services['a'].held) == ['r0', 'r1']


def test_losses_spend_the_one_budget():
  world = make('a', 'b', attempts=2)
  submit(world, 0)
  for _ in range(2):
    (service,) = [s for s in world.services.values() if s.held]
    service.end()
    world.settle()
  answer = world.pool.next(1.0)
  assert (answer.request_id, answer.status) == ('r0', Status.SAMPLER_ERROR)
  assert 'no other can be asked' in answer.detail
  assert not world.budget.spend('r0')


def test_a_service_that_dies_of_every_request_is_taken_out():
  world = make('a', 'b', attempts=99)
  dying = world.services['a']
  for number in range(4):
    submit(world, 2 * number, 2 * number + 1)
    dying.end()
    world.settle()
  submit(world, 90)
  assert not dying.held
  assert not dying.is_open
  for request_id in list(world.services['b'].held):
    world.services['b'].answer(request_id)
  world.settle()
  assert world.pool.next(1.0).status is Status.OK
  for _ in range(3):
    world.services['b'].end()
    world.settle()
  world.services['b'].end()
  with pytest.raises(errors.SamplerLost, match='no sampler is left'):
    world.settle()


def test_no_service_at_all_ends_in_an_error_that_names_the_requests():
  world = make('a')
  submit(world, 0, 1)
  world.absent['a'] = errors.SamplerLost('nobody at a')
  world.services['a'].end()
  with pytest.raises(errors.SamplerLost) as caught:
    world.pass_time(90)
  for words in ('30.0 s', 'nobody at a', 'r0 (sent to a', 'a not connected'):
    assert words in str(caught.value)


def test_silence_of_the_only_service_is_an_error_that_names_the_requests():
  world = make('a')
  submit(world, 0, 1, 2)
  with pytest.raises(errors.SamplerSilent) as caught:
    world.pass_time(30)
  for words in ('a has not answered r0, r1 within 10.0 s', 'r2 (not sent)'):
    assert words in str(caught.value)


def test_a_service_may_come_late_and_new_ones_may_join():
  absent = {'b': errors.SamplerLost('not yet')}
  world = pool_world.World('a', 'b', absent=absent)
  world.pool.publish(PARAMS, 0)
  world.pass_time(1)
  submit(world, *range(6))
  assert list(world.services) == ['a']
  del world.absent['b']
  world.names.append('c')
  world.pass_time(6)
  assert sorted(len(ids) for ids in held(world).values()) == [2, 2, 2]
  assert world.services['c'].installed == [0]


def test_what_a_lost_service_owes_goes_to_one_that_joins_later():
  world = make('a')
  submit(world, 0, 1)
  world.delays = True  # its return takes longer than all that follows
  world.services['a'].end(forgets=False)
  world.pool.handle_event(1.0)
  assert world.pool.redispatched == 0
  returning = world.works.popleft()
  world.names.append('b')
  world.pass_time(3)
  assert list(world.services['b'].held) == ['r0', 'r1']
  assert world.pool.redispatched == 2
  world.services['b'].answer('r0')
  returning()
  world.settle()
  # What the first one did meanwhile comes too, to be counted as a repeat.
  for service, request_id in (('a', 'r0'), ('a', 'r1'), ('b', 'r1')):
    world.services[service].answer(request_id)
  world.settle()
  answers = [world.pool.next(1.0).request_id for _ in range(4)]
  assert answers == ['r0', 'r0', 'r1', 'r1']
  submit(world, 2, 3)
  assert sorted(held(world).values()) == [['r2'], ['r3']]


def test_a_lost_service_that_is_taken_out_owes_nothing_any_more():
  world = make('a')
  submit(world, 0)
  world.absent['a'] = errors.SamplerLost('nobody at a')
  world.services['a'].end()
  world.pool.handle_event(1.0)
  world.names[:] = ['b']
  world.pass_time(3)
  assert world.pool.report().endswith('1 samplers: b version 0')
  assert list(world.services['b'].held) == ['r0']


def test_a_service_that_stays_away_is_spoken_of_ever_more_rarely(caplog):
  absent = {'b': errors.SamplerLost('not yet')}
  world = pool_world.World('a', 'b', absent=absent)
  world.pass_time(130)
  found = re.findall(r'b is not connected since (\d+) s', caplog.text)
  assert found == ['15', '30', '60', '120']


def test_a_stop_ends_the_wait_for_the_first_service():
  world = pool_world.World('a', delays=True)
  world.works.clear()  # its connecting has no end

  def check():
    if world.now > 3:
      raise InterruptedError

  with pytest.raises(InterruptedError):
    world.pool.start(500.0, check)
  assert world.now < 6


def test_the_first_service_may_take_longer_than_a_recovery():
  world = pool_world.World('a', delays=True, recovery_timeout_s=30.0)
  connecting = world.works.popleft()

  def check():
    if world.now > 90 and connecting not in world.works:
      world.works.append(connecting)

  world.pool.start(120.0, check)
  assert world.now > 90
  world.pool.close()


def test_who_leaves_finishes_what_it_owes_and_gets_no_more():
  world = make('a', 'b')
  submit(world, 0, 1)
  world.names.remove('a')
  world.pass_time(2)
  submit(world, *range(2, 9))
  leaving = world.services['a']
  assert leaving.is_open
  assert leaving.asked == ['r0']
  leaving.answer('r0')
  world.settle()
  assert not leaving.is_open
  assert world.pool.redispatched == 0
  # It may come back.
  world.names.append('a')
  world.pass_time(2)
  assert world.services['a'] is not leaving
  assert world.services['a'].held


def test_a_refused_handshake_at_the_start_is_final():
  absent = {'b': errors.HandshakeRefused('another model')}
  world = pool_world.World('a', 'b', absent=absent)
  world.absent.clear()
  world.pass_time(9)
  assert list(world.services) == ['a']
  alone = pool_world.World('b', absent=absent)
  with pytest.raises(errors.HandshakeRefused, match='another model'):
    alone.pool.start(5.0)


def test_no_service_at_the_start_is_an_error_in_time():
  absent = {'a': errors.SamplerLost('nobody at a')}
  world = pool_world.World('a', absent=absent)
  with pytest.raises(errors.SamplerLost, match='nobody at a'):
    world.pool.start(5.0)


def test_a_version_is_installed_once_the_old_work_has_ended():
  world = make('a', 'b')
  submit(world, 0)
  (busy,) = [s for s in world.services.values() if s.held]
  (idle,) = [s for s in world.services.values() if not s.held]
  world.pool.publish(PARAMS, 1)
  world.settle()
  submit(world, 1, 2, version=1)
  assert (busy.installed, idle.installed) == ([0], [0, 1])
  assert list(idle.held) == ['r1', 'r2']
  busy.answer('r0')
  world.settle()
  assert busy.installed == [0, 1]
  assert world.pool.next(1.0).policy_version == 0


def test_a_loss_during_an_installation_is_one_loss():
  world = make('a')
  service = world.services['a']
  submit(world, 0)
  service.answer('r0')
  world.settle()
  world.delays = True
  world.pool.publish(PARAMS, 1)
  service.end(forgets=False)
  world.settle()
  world.pass_time(5)
  assert service.reconnects == 1
  assert service.installed == [0, 1]


def test_an_interrupting_version_is_installed_at_once():
  world = make('a')
  submit(world, 0)
  world.pool.publish(PARAMS, 1, interrupt=True)
  world.settle()
  assert world.services['a'].installed == [0, 1]
  assert list(world.services['a'].held) == ['r0']


def test_what_was_not_sent_is_generated_with_the_newest_version():
  world = make('a', slots=1)
  submit(world, 0, 1, 2)
  service = world.services['a']
  world.pool.publish(PARAMS, 1)
  for number in (0, 1):
    service.answer(f'r{number}')
  world.settle()
  assert service.held['r2'].policy_version == 1


def test_versions_are_kept_on_the_disk_as_long_as_a_member_needs_them(tmp_path):
  store = publication.Store(tmp_path)
  world = make('a', 'b', store=store)
  submit(world, 0, 1)
  world.pool.publish(PARAMS, 1)
  world.settle()
  assert store.versions() == [0, 1]
  for number, service in enumerate(world.services.values()):
    service.answer(f'r{number}')
  world.settle()
  assert store.versions() == [1]
  world.names.remove('a')
  world.pass_time(2)
  world.pool.publish(PARAMS, 2)
  world.settle()
  assert store.versions() == [2]


def test_a_refused_snapshot_ends_with_its_reason():
  world = make('a')
  error = errors.PublicationError('the engine refused version 1')
  world.services['a'].install_error = error
  world.pool.publish(PARAMS, 1)
  with pytest.raises(errors.PublicationError, match='refused version 1'):
    world.settle()


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
  st.lists(
    st.tuples(
      st.sampled_from(
        ['answer', 'answer', 'submit', 'end', 'cut', 'publish', 'wait', 'leave']
      ),
      st.integers(0, 5),
    ),
    max_size=60,
  )
)
def test_every_request_is_answered_whatever_happens(script):
  names = ['a', 'b', 'c']
  world = make(*names, slots=2, attempts=1000, delays=True)
  asked, version = 0, 0
  answers = collections.Counter()
  losses = collections.Counter()  # one too many in a row takes a service out
  for action, number in script:
    services = list(world.services.values())
    service = services[number % len(services)]
    if action == 'answer' and service.held and not service.lost:
      held_ids = list(service.held)
      service.answer(held_ids[number % len(held_ids)])
      losses[service.name] = 0
    elif action == 'submit':
      submit(world, *range(asked, asked + number), version=version)
      asked += number
    elif action in ('end', 'cut') and losses[service.name] < 3:
      losses[service.name] += not service.lost
      service.end(forgets=action == 'end')
    elif action == 'publish':
      version += 1
      world.pool.publish(PARAMS, version)
    elif action == 'wait':
      world.pass_time(number)
    elif action == 'leave' and number < 2:
      name = names[number]
      (world.names.remove if name in world.names else world.names.append)(name)
    if number % 2:
      world.settle()
  while len(answers) < asked:
    for service in world.services.values():
      for request_id in list(service.held):
        if not service.lost:
          service.answer(request_id)
    world.pass_time(1)
    while world.pool.redispatched >= 0:
      try:
        answers[world.pool.next(0.0).request_id] += 1
      except errors.SamplerTimeout:
        break
  assert set(answers) == {f'r{n}' for n in range(asked)}
