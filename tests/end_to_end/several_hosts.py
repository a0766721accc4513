"""One host of a tiny deterministic run.

  python several_hosts.py DIRECTORY POLICY SETTING...

Host 0 writes the parameters to DIRECTORY/COUNT.npz at the end, COUNT being
the number of hosts; every host prints how many batches it learned from.
"""

import pathlib
import signal
import sys

import jax
import numpy as np
import tiny_world

from spopp_jax.models import policy_files
from spopp_jax.runner import (
  compilation,
  experiment,
  following,
  hosts,
  meeting,
  preemption,
)


def lead(config, link, stop):
  policy = policy_files.load(config.cold_start.policy)
  sampler = tiny_world.sampler(config, policy)
  return experiment.run(config, sampler, stop, link)


def main(directory, policy, *settings):
  folder = pathlib.Path(directory)
  compilation.configure(folder / 'compiled')
  config = tiny_world.load(folder, f'cold_start.policy={policy}', *settings)
  stop = preemption.StopRequest()
  link = meeting.start(config)
  try:
    if isinstance(link, hosts.Follower):
      stop.listen(signal.SIGTERM, on_signal=link.ask_to_stop)
      print(following.follow(config, link))
      return
    stop.listen(signal.SIGTERM)
    if link is None:
      result = lead(config, None, stop)
    else:
      with link.leading(stop):
        result = lead(config, link, stop)
  except preemption.Stopped as stopped:
    if stopped.exit_code:
      hosts.exit_alone(str(stopped))
    print(stopped, flush=True)
    return
  except hosts.HostLost as error:
    hosts.exit_alone(str(error))
  except jax.errors.JaxRuntimeError as error:
    hosts.exit_alone(hosts.failed_computation(error))
  except experiment.EXPECTED_ERRORS as error:
    sys.exit(str(error))
  params = result.training.published
  np.savez(folder / f'{config.hosts.count}.npz', **params)
  print(result.training.updates_done)


if __name__ == '__main__':
  main(*sys.argv[1:])
