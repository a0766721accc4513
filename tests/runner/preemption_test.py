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
  assert stop.requested == 'SIGUSR1'
  with pytest.raises(preemption.Stopped, match='SIGUSR1'):
    stop.check()
  assert signals == []
  os.kill(os.getpid(), signal.SIGUSR1)
  assert signals == [1]
