"""Whether a reply is an answer to its request, of a snapshot that we know."""

from collections.abc import Mapping

from spopp_jax import types
from spopp_jax.sampler import base

_EPISODES = (
  types.Status.OK,
  types.Status.CONTEXT_LIMIT,
  types.Status.LENGTH,
)


def problem(
  trajectory: types.Trajectory,
  request: base.Request,
  snapshots: Mapping[int, str],
) -> str:
  """Says how a reply differs from its request and our snapshots.

  Args:
    trajectory: the reply.
    request: what was asked.
    snapshots: version -> checksum of what the service has acknowledged.

  Returns:
    The first difference in words; '' when there is none. Where the status says
    that there is no whole episode only the task must be right.
  """
  if trajectory.task_id != request.task_id:
    return f'task_id is {trajectory.task_id}, asked was {request.task_id}'
  if trajectory.status is types.Status.DUPLICATE:
    return 'status is DUPLICATE; allowed: all others, for only a receiver knows'
  if trajectory.status not in _EPISODES:
    return ''
  if trajectory.sampling != request.sampling:
    ours = request.sampling
    return f'sampling is {trajectory.sampling}; allowed: {ours}, as asked'
  if trajectory.num_turns > request.sampling.max_turns:
    return (
      f'num_turns is {trajectory.num_turns}; allowed: at most '
      f'{request.sampling.max_turns}, the max_turns asked'
    )
  if trajectory.spans and not request.crosses_versions:
    return (
      f'spans are {trajectory.spans}; allowed: none, it crosses no versions'
    )
  whole = types.VersionSpan(
    trajectory.policy_version,
    trajectory.weights_checksum,
    trajectory.num_actions,
  )
  for span in trajectory.spans or (whole,):
    version = span.policy_version
    asked = request.policy_version
    later = request.crosses_versions and version > asked
    if version != asked and not later:
      return f'policy_version is {version}; allowed: {asked}, as asked'
    if span.weights_checksum != snapshots.get(version):
      return (
        f'weights_checksum of version {version} is {span.weights_checksum}; '
        f'allowed: {snapshots.get(version)}, as activated'
      )
  return ''
