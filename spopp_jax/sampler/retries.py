"""How often a rollout is tried: one count, whoever sees it fail."""

import collections


class RetryBudget:
  """Tries of each rollout, over failed episodes and lost samplers alike.

  A rollout keeps its count under all the request ids of its tries.
  """

  def __init__(self, attempts: int):
    """Gives every rollout the same number of tries.

    Args:
      attempts: tries of a rollout, the first included.

    Raises:
      ValueError: `attempts` is below 1.
    """
    if attempts < 1:
      raise ValueError(f'attempts ({attempts}) must be at least 1')
    self.attempts = attempts
    self._failed: collections.Counter[str] = collections.Counter()

  def spend(self, request_id: str) -> bool:
    """Counts a failed try; says whether another one is left."""
    self._failed[stem(request_id)] += 1
    return self._failed[stem(request_id)] < self.attempts

  def forget(self, request_id: str) -> None:
    """Drops the count of a rollout that has ended."""
    self._failed.pop(stem(request_id), None)


def stem(request_id: str) -> str:
  """Returns the id of the rollout's first try: 'r7' of 'r7/2'."""
  return request_id.partition('/')[0]


def next_try(request_id: str) -> str:
  """Returns the id of the try after this one: 'r7/2' of 'r7'.

  A finished id is never run again by a service, so each try has its own.
  """
  first, _, attempt = request_id.partition('/')
  return f'{first}/{int(attempt or 1) + 1}'
