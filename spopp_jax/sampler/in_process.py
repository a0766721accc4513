"""The sampler without a network: a driver in the caller's own thread."""

import collections
import time
from collections.abc import Mapping, Sequence

import numpy as np

from spopp_jax import types
from spopp_jax.sampler import base, errors, rollout, weights


class InProcessSampler:
  """Implements `sampler.base.Sampler` on a driver; deterministic.

  Nothing runs between calls: `next` drives the engine until something
  finishes. It begins as a new session does at a service: whatever the driver
  had, it forgets, so that the first version to be published may be any.
  """

  def __init__(
    self, driver: rollout.RolloutDriver, *, drain_deadline_s: float = 600.0
  ):
    driver.forget()
    self._driver = driver
    self._drain_deadline_s = drain_deadline_s
    self._outstanding: set[str] = set()
    self._finished: collections.deque[types.Trajectory] = collections.deque()

  @property
  def num_arrived(self) -> int:
    """Answers that `next` returns without waiting."""
    return len(self._finished)

  def submit(self, requests: Sequence[base.Request]) -> None:
    """Queues requests; an unanswered request_id is not run twice."""
    for request in requests:
      if request.request_id not in self._outstanding:
        self._outstanding.add(request.request_id)
        self._driver.submit(request)

  def next(self, timeout_s: float) -> types.Trajectory:
    """Drives the engine until a request finishes and returns it.

    Raises:
      SamplerTimeout: nothing was submitted, or nothing finished in time.
    """
    deadline = time.monotonic() + timeout_s
    while not self._finished:
      if not self._outstanding:
        raise errors.NothingOutstanding('nothing is outstanding; submit first')
      if time.monotonic() > deadline:
        raise errors.SamplerTimeout(
          f'nothing finished within {timeout_s} s; outstanding: '
          f'{sorted(self._outstanding)}'
        )
      self._finished.extend(self._driver.step())
    trajectory = self._finished.popleft()
    self._outstanding.discard(trajectory.request_id)
    return trajectory

  def publish(
    self,
    params: Mapping[str, np.ndarray],
    version: int,
    *,
    interrupt: bool = False,
  ) -> str:
    """Finishes what is open, then loads the snapshot.

    Args:
      params: name -> array.
      version: must exceed the active one; the active version with the same
        parameters changes nothing.
      interrupt: load it at once, under the open episodes.

    Returns:
      sha256 of the snapshot's bytes, 64 hex digits.

    Raises:
      PublicationError: the version does not increase, the open episodes do
        not end in time, or the engine refuses the parameters.
    """
    data = weights.to_bytes(params)
    checksum = weights.checksum(data)
    engine = self._driver.engine
    active = (engine.policy_version, engine.weights_checksum)
    if active == (version, checksum):
      return checksum
    if version <= engine.policy_version:
      raise errors.PublicationError(
        f'version {version} must exceed the active {engine.policy_version}'
      )
    deadline = time.monotonic() + self._drain_deadline_s
    while not (interrupt or self._driver.is_idle):
      if time.monotonic() > deadline:
        raise errors.PublicationError(
          f'{self._driver.num_open} episodes of version '
          f'{engine.policy_version} did not end within '
          f'{self._drain_deadline_s} s; publish again'
        )
      self._finished.extend(self._driver.step())
    try:
      self._driver.load(
        weights.from_bytes(data), version=version, checksum=checksum
      )
    except ValueError as error:
      raise errors.PublicationError(
        f'the engine refused version {version}: {error}'
      ) from error
    return checksum

  def close(self) -> None:
    """Forgets every outstanding request."""
    for request_id in self._outstanding:
      self._driver.cancel(request_id)
    self._outstanding.clear()
    self._finished.clear()
