import os
import signal

import pytest

from spopp_jax.runner import preemption


@pytest.fixture
def signals():
  """Notes what the process's own handler gets; restores it at the end."""
  got = []
  before = signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
  yield got
  signal.signal(signal.SIGUSR1, before)


def test_the_first_signal_is_noted_and_a_second_one_acts_as_before(signals):
  stop = preemption.StopRequest()
  stop.listen(signal.SIGUSR1)
  stop.check()
  os.kill(os.getpid(), signal.SIGUSR1)
  with pytest.raises(preemption.Stopped, match='SIGUSR1') as stopped:
    stop.check()
  assert stopped.value.exit_code == 0
  assert signals == []
  os.kill(os.getpid(), signal.SIGUSR1)
  assert signals == [1]


def test_a_signal_can_be_passed_on(signals):
  stop = preemption.StopRequest()
  names = []
  stop.listen(signal.SIGUSR1, on_signal=names.append)
  os.kill(os.getpid(), signal.SIGUSR1)
  assert names == ['SIGUSR1']
  stop.check()
  os.kill(os.getpid(), signal.SIGUSR1)
  assert (names, signals) == (['SIGUSR1'], [1])


def test_a_reason_is_given_from_elsewhere():
  stop = preemption.StopRequest()
  stop.ask(preemption.Stopped('stopped by SIGTERM of host 1'))
  stop.ask(preemption.Stopped('host 2 is gone', exit_code=1))
  with pytest.raises(preemption.Stopped, match='host 2') as stopped:
    stop.check()
  assert stopped.value.exit_code == 1
