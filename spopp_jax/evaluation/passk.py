"""Success when several attempts at a task are allowed."""

import math


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
  """Unbiased chance that one of k attempts succeeds.

  1 - C(n - c, k) / C(n, k): k of the n samples are drawn without replacement.
  k = 1 is the success rate. Example: n = 4, c = 1, k = 2 gives 1 - 3/6.

  Args:
    num_samples: n >= 1, attempts made.
    num_correct: c in [0, n], those that succeeded.
    k: in [1, n], attempts allowed.

  Returns:
    A probability.

  Raises:
    ValueError: c or k is outside its range.
  """
  if not 0 <= num_correct <= num_samples:
    raise ValueError(
      f'num_correct ({num_correct}) must be in [0, {num_samples}]'
    )
  if not 1 <= k <= num_samples:
    raise ValueError(f'k ({k}) must be in [1, {num_samples}]')
  failing = math.comb(num_samples - num_correct, k)
  return 1 - failing / math.comb(num_samples, k)
