"""The worker takes commands in their order, switches included."""

import contextlib
import dataclasses
import threading
import time

import pytest
import scripted

from spopp_jax import types
from spopp_jax.sampler import ledger, rollout, worker

OK, STALE = types.Status.OK, types.Status.STALE
WAIT_S = 20.0


class Desk:
  """A worker with its ledger; everything is sent before it starts."""

  def __init__(self, engine, orphan_grace_s=99.0):
    self.engine = scripted.load(engine)
    self.book = ledger.Ledger(max_pending=99, orphan_grace_s=orphan_grace_s)
    self.worker = worker.Worker(
      rollout.RolloutDriver(self.engine, scripted.Tasks(), scripted.Template()),
      self.book,
    )
    self.results = []
    self._expected = 0
    self._all_in = threading.Event()

  def ask(self, request):
    self._expected += 1
    self.book.claim(request, self._deliver)
    self.worker.send(request)

  def switch(self, value, version, timeout_s=WAIT_S):
    activation = worker.Activation(
      worker.Snapshot(version, 'sum', scripted.params(value)),
      self.book,
      time.monotonic() + timeout_s,
    )
    self.worker.send(activation)
    return activation

  def _deliver(self, trajectory):
    self.results.append(trajectory)
    if len(self.results) == self._expected:
      self._all_in.set()

  @contextlib.contextmanager
  def run(self):
    thread = threading.Thread(target=self.worker.run)
    thread.start()
    try:
      yield
      assert self._all_in.wait(WAIT_S)
    finally:
      self.worker.stop()
      thread.join(WAIT_S)

  def outcomes(self):
    return {r.request_id: (r.status, r.policy_version) for r in self.results}


def test_a_switch_divides_what_came_before_from_what_came_after():
  desk = Desk(scripted.Engine(num_slots=1))
  desk.ask(scripted.request(1, 'win-1', version=0))
  desk.ask(scripted.request(2, 'win-1', version=0))
  activation = desk.switch(1.0, 1)
  desk.ask(scripted.request(3, 'win-1', version=0))
  desk.ask(scripted.request(4, 'win-1', version=1))
  with desk.run():
    assert activation.done.wait(WAIT_S)
  assert activation.refusal == ''
  assert desk.worker.active == (1, 'sum')
  assert desk.outcomes() == {
    'r1': (OK, 0),
    'r2': (OK, 0),
    'r3': (STALE, 1),
    'r4': (OK, 1),
  }


def test_a_late_switch_changes_nothing_and_lets_others_pass():
  desk = Desk(scripted.Engine())
  desk.ask(scripted.request(1, 'win-3', version=0))
  activation = desk.switch(1.0, 1, timeout_s=-1.0)
  desk.ask(scripted.request(2, 'win-3', version=0))
  with desk.run():
    assert activation.done.wait(WAIT_S)
  assert activation.is_late
  assert 'version 0 did not drain in time' in activation.refusal
  assert desk.worker.active[0] == 0
  assert desk.outcomes() == {'r1': (OK, 0), 'r2': (OK, 0)}


def test_switches_never_go_back():
  desk = Desk(scripted.Engine())
  switches = [desk.switch(1.0, version) for version in (5, 3, 5, 6)]
  desk.ask(scripted.request(1, 'win-1', version=6))
  with desk.run():
    pass
  assert [bool(switch.refusal) for switch in switches] == [
    False,
    True,
    True,
    False,
  ]
  assert [version for version, _ in desk.engine.loaded] == [0, 5, 6]


def test_a_request_cancelled_before_its_turn_is_not_run():
  desk = Desk(scripted.Engine(num_slots=1), orphan_grace_s=-1.0)
  ghost = scripted.request(1, 'win-3')
  gone = print
  desk.book.claim(ghost, gone)
  desk.worker.send(ghost)
  desk.book.abandon(gone)
  assert desk.book.expire() == ['r1']
  # The same id, asked again while the cancelled one is still in the queue.
  desk.ask(scripted.request(1, 'win-3'))
  desk.ask(scripted.request(2, 'win-3'))
  with desk.run():
    pass
  assert desk.outcomes() == {'r1': (OK, 0), 'r2': (OK, 0)}
  assert len(desk.engine.histories) == 2


def test_a_new_ledger_overtakes_all_that_the_old_one_waits_for():
  desk = Desk(scripted.Engine(num_slots=1))
  old, answers = desk.book, []
  for number in (1, 2):
    ghost = scripted.request(number, 'win-3')
    old.claim(ghost, answers.append)
    desk.worker.send(ghost)
  waiting = desk.switch(1.0, 7)
  desk.book = old.blank()
  done = desk.worker.take_over(desk.book)
  desk.ask(scripted.request(1, 'win-1', version=0))
  second = desk.switch(2.0, 0)
  desk.ask(scripted.request(2, 'win-1', version=0))
  with desk.run():
    assert done.wait(WAIT_S)
  assert waiting.refusal == 'its session has ended'
  assert second.refusal == ''
  assert answers == []
  # Nothing is active until the new ledger's own switch.
  assert desk.outcomes() == {'r1': (STALE, -1), 'r2': (OK, 0)}
  assert desk.engine.loaded == [(0, [0.5, -0.5]), (0, [2.0, -2.0])]


def test_a_new_ledger_ends_what_is_running():
  desk = Desk(scripted.Engine(max_context=10**6, step_s=0.001))
  endless = dataclasses.replace(scripted.SAMPLING, max_turns=10_000)
  ghost = scripted.request(1, 'endless', sampling=endless)
  desk.book.claim(ghost, print)
  desk.worker.send(ghost)
  waiting = desk.switch(1.0, 1)
  thread = threading.Thread(target=desk.worker.run)
  thread.start()
  scripted.wait_until(lambda: desk.engine.num_open)
  assert desk.worker.take_over(desk.book.blank()).wait(WAIT_S)
  assert desk.engine.num_open == 0
  assert desk.worker.active == (-1, '')
  assert waiting.done.wait(WAIT_S)
  assert waiting.refusal == 'its session has ended'
  desk.worker.stop()
  thread.join(WAIT_S)


def test_engine_failures_reach_the_caller():
  desk = Desk(scripted.Engine(fail_after=0))
  desk.ask(scripted.request(1))
  with pytest.raises(RuntimeError, match='on fire'):
    desk.worker.run()
