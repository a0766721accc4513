"""Matched comparison of two methods over replicates (SPO++ appendix A.1)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class PairedDifference(NamedTuple):
  """How much better the first method is, replicate by replicate.

  Attributes:
    differences: [n] float64; first minus second, in rising order of the seed.
    mean: of the differences.
    sample_sd: their standard deviation with n - 1; NaN for one replicate.
    wins: replicates in which the first method is strictly better.
  """

  differences: np.ndarray
  mean: float
  sample_sd: float
  wins: int


def paired_difference(
  first: Mapping[int, npt.ArrayLike],
  second: Mapping[int, npt.ArrayLike],
  statistic: Callable[[np.ndarray], float],
) -> PairedDifference:
  """Compares two methods that ran from the same starts.

  The two curves of a seed are cut to the steps both completed before the
  statistic is taken. Example: curves {0: [1, 3]} and {0: [1, 1, 9]} with the
  step mean differ by 2 - 1.

  Args:
    first: seed -> [T] rewards of the first method.
    second: the same seeds -> [T'] rewards of the second.
    statistic: of a curve, such as `curves.area`.

  Returns:
    The differences and their mean and sample standard deviation.

  Raises:
    ValueError: no replicates, or a seed that only one method has.
  """
  if not first and not second:
    raise ValueError('there are no replicates to compare')
  alone = sorted(first.keys() ^ second.keys())
  if alone:
    raise ValueError(f'seeds {alone} were run by one method only')
  differences = []
  for seed in sorted(first):
    mine, other = np.asarray(first[seed]), np.asarray(second[seed])
    steps = min(len(mine), len(other))
    differences.append(statistic(mine[:steps]) - statistic(other[:steps]))
  result = np.array(differences, np.float64)
  return PairedDifference(
    differences=result,
    mean=float(result.mean()),
    sample_sd=float(result.std(ddof=1)) if result.size > 1 else float('nan'),
    wins=int((result > 0).sum()),
  )
