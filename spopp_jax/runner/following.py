"""What every host but the first does: it computes along."""

import jax
import ml_collections

from spopp_jax import types
from spopp_jax.learner import state as state_lib
from spopp_jax.learner import update
from spopp_jax.models import config_files
from spopp_jax.runner import hosts, training


def follow(config: ml_collections.ConfigDict, lead: hosts.Follower) -> int:
  """Makes the calls that host 0 announces, until it ends the run.

  Args:
    config: the settings of all hosts.
    lead: the connection to host 0.

  Returns:
    How many batches were learned from.

  Raises:
    HostLost: host 0 is gone, or its run failed.
  """
  learner: update.Learner | None = None
  state: state_lib.LearnerState | None = None
  updates = 0
  for kind, values, arrays in lead.commands():
    if kind == 'begin':
      learner = training.make_learner(
        config, config_files.from_sizes(values), announce=update.silent
      )
      continue
    if learner is None:
      raise hosts.HostLost(f'host 0 announced {kind!r} before it began')
    if kind == 'compile':
      learner.compile(types.PackedBatch(**arrays))
      continue
    if kind == 'init':
      state = learner.init(arrays)
      continue
    assert state is not None
    match kind:
      case 'place':
        leaves = [arrays[str(i)] for i in range(len(arrays))]
        state = learner.place(
          jax.tree.unflatten(jax.tree.structure(state), leaves)
        )
      case 'update':
        state, scalars = learner.update(state, types.PackedBatch(**arrays))
        jax.block_until_ready(scalars)
        updates += 1
      case 'score':
        learner.score_packed(state.params, types.PackedBatch(**arrays))
      case 'trained':
        learner.trained(state)
      case 'to_save':
        learner.to_save(state)
      case _:
        raise hosts.HostLost(f'host 0 announced {kind!r}, which is unknown')
  return updates
