"""Requests owed: every order of claim, finish, acknowledge and abandon."""

import itertools

import pytest
import scripted

from spopp_jax import types
from spopp_jax.sampler import errors, ledger, rollout


class Owner:
  def __init__(self):
    self.got = []

  def deliver(self, trajectory):
    self.got.append(trajectory.request_id)


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock():
  return Clock()


@pytest.fixture
def book(clock):
  return ledger.Ledger(max_pending=3, orphan_grace_s=10.0, clock=clock)


def result(number):
  driver = rollout.RolloutDriver(
    scripted.Engine(), scripted.Tasks(), scripted.Template()
  )
  return driver.answer(scripted.request(number), types.Status.STALE, 'x')


def test_a_known_request_is_not_new_and_is_answered_once(book):
  owner = Owner()
  assert book.claim(scripted.request(1), owner.deliver)
  assert not book.claim(scripted.request(1), owner.deliver)
  book.finish(result(1))
  assert owner.got == ['r1']


def test_result_goes_to_the_last_owner(book):
  first, second = Owner(), Owner()
  book.claim(scripted.request(1), first.deliver)
  book.claim(scripted.request(1), second.deliver)
  book.abandon(first.deliver)
  book.finish(result(1))
  assert (first.got, second.got) == ([], ['r1'])


# Whatever the order in which a stream breaks, a request finishes and another
# stream asks again: the new owner gets it once.
@pytest.mark.parametrize(
  'order', list(itertools.permutations(['abandon', 'finish', 'claim']))
)
def test_nothing_is_lost_in_any_order(book, order):
  first, second = Owner(), Owner()
  book.claim(scripted.request(1), first.deliver)
  actions = {
    'abandon': lambda: book.abandon(first.deliver),
    'finish': lambda: book.finish(result(1)),
    'claim': lambda: book.claim(scripted.request(1), second.deliver),
  }
  for name in order:
    actions[name]()
  assert second.got == ['r1']
  book.acknowledge(['r1'], second.deliver)
  assert book.claim(scripted.request(1), second.deliver)


def test_acknowledged_requests_make_room(book):
  owner = Owner()
  for number in range(3):
    book.claim(scripted.request(number), owner.deliver)
  with pytest.raises(errors.QueueFull, match='max_pending is 3'):
    book.claim(scripted.request(3), owner.deliver)
  # A known one still has a place; an unfinished one cannot be forgotten.
  assert not book.claim(scripted.request(0), owner.deliver)
  book.acknowledge(['r0'], owner.deliver)
  with pytest.raises(errors.QueueFull):
    book.claim(scripted.request(3), owner.deliver)
  book.finish(result(0))
  book.acknowledge(['r0', 'never-heard-of'], owner.deliver)
  assert book.claim(scripted.request(3), owner.deliver)


def test_one_id_cannot_mean_two_requests(book):
  owner = Owner()
  book.claim(scripted.request(1, 'win-1'), owner.deliver)
  with pytest.raises(errors.InvalidMessage, match='win-1'):
    book.claim(scripted.request(1, 'win-2'), owner.deliver)


def test_a_blank_ledger_has_the_limits_and_nothing_else(book, clock):
  owner = Owner()
  book.claim(scripted.request(1), owner.deliver)
  blank = book.blank()
  assert [blank.claim(scripted.request(n), owner.deliver) for n in range(3)]
  with pytest.raises(errors.QueueFull, match='max_pending is 3'):
    blank.claim(scripted.request(3), owner.deliver)
  blank.abandon(owner.deliver)
  clock.now = 10.1
  assert blank.expire() == ['r0', 'r1', 'r2']
  assert not book.claim(scripted.request(1), owner.deliver)


def test_a_stranger_cannot_acknowledge(book):
  owner, stranger = Owner(), Owner()
  book.claim(scripted.request(1), owner.deliver)
  book.finish(result(1))
  book.acknowledge(['r1'], stranger.deliver)
  assert not book.claim(scripted.request(1), owner.deliver)
  assert owner.got == ['r1', 'r1']


def test_orphans_live_for_their_grace(book, clock):
  owner, other = Owner(), Owner()
  book.claim(scripted.request(1), owner.deliver)
  book.claim(scripted.request(2), owner.deliver)
  book.claim(scripted.request(3), other.deliver)
  book.finish(result(2))
  clock.now = 5.0
  book.abandon(owner.deliver)
  clock.now = 15.0
  assert book.expire() == []
  clock.now = 15.1
  # r2 has finished, so only r1 is still to be cancelled.
  assert book.expire() == ['r1']
  assert book.claim(scripted.request(1), other.deliver)
  assert book.claim(scripted.request(2), other.deliver)
  assert not book.claim(scripted.request(3), other.deliver)


def test_only_the_standing_submission_is_owed(book, clock):
  owner = Owner()
  first, second = scripted.request(1), scripted.request(1)
  assert not book.owes(first)
  book.claim(first, owner.deliver)
  assert book.owes(first)
  book.abandon(owner.deliver)
  clock.now = 11.0
  book.expire()
  assert not book.owes(first)
  book.claim(second, owner.deliver)
  assert book.owes(second)
  assert not book.owes(first)


def test_claimed_orphans_do_not_expire(book, clock):
  first, second = Owner(), Owner()
  book.claim(scripted.request(1), first.deliver)
  book.abandon(first.deliver)
  book.claim(scripted.request(1), second.deliver)
  clock.now = 1000.0
  assert book.expire() == []


def test_late_results_of_forgotten_requests_go_nowhere(book):
  book.finish(result(1))
  owner = Owner()
  assert book.claim(scripted.request(1), owner.deliver)
  assert owner.got == []
