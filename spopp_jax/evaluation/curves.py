"""Numbers that sum up a reward curve (SPO++ appendix A.1)."""

import numpy as np
import numpy.typing as npt


def area(rewards: npt.ArrayLike) -> float:
  """Normalized trapezoidal area under a reward curve, SPO++ Eq. 7.

  The mean of the means of adjacent points; a single point is its own area.
  Example: [0, 1, 1] has area (0.5 + 1) / 2.

  Args:
    rewards: [T] finite; reward of every step, T >= 1.

  Returns:
    The area, in the unit of the rewards.

  Raises:
    ValueError: `rewards` is empty, not a vector or not finite.
  """
  rewards = _checked(rewards)
  if rewards.size == 1:
    return float(rewards[0])
  return float(np.mean((rewards[:-1] + rewards[1:]) / 2))


def step_mean(rewards: npt.ArrayLike) -> float:
  """Mean reward of all steps: the normalized rectangle-rule area.

  Args:
    rewards: [T] finite, T >= 1.

  Returns:
    The mean, in the unit of the rewards.

  Raises:
    ValueError: as in `area`.
  """
  return float(np.mean(_checked(rewards)))


def final_five(rewards: npt.ArrayLike) -> float:
  """Mean reward of the last five steps.

  Args:
    rewards: [T] finite, T >= 5.

  Returns:
    The mean, in the unit of the rewards.

  Raises:
    ValueError: as in `area`, or fewer than five steps.
  """
  rewards = _checked(rewards, least=5)
  return float(np.mean(rewards[-5:]))


def learning_composite(rewards: npt.ArrayLike) -> float:
  """C10, SPO++ Eq. 8: area and final five of the first ten steps, halved.

  Args:
    rewards: [T] finite, T >= 10; later steps do not count.

  Returns:
    C10, in the unit of the rewards.

  Raises:
    ValueError: as in `area`, or fewer than ten steps.
  """
  first_ten = _checked(rewards, least=10)[:10]
  return (area(first_ten) + final_five(first_ten)) / 2


def trailing_mean(rewards: npt.ArrayLike, window: int = 5) -> np.ndarray:
  """Mean of each step and the up to `window` - 1 steps before it.

  Example: [1, 2, 6] with window 2 gives [1, 1.5, 4].

  Args:
    rewards: [T] finite, T >= 1.
    window: steps averaged, at least 1.

  Returns:
    [T] float64; the first steps average what there is.

  Raises:
    ValueError: as in `area`, or `window` below 1.
  """
  if window < 1:
    raise ValueError(f'window ({window}) must be at least 1')
  rewards = _checked(rewards)
  return np.array(
    [
      rewards[max(0, end - window) : end].mean()
      for end in range(1, rewards.size + 1)
    ]
  )


def _checked(rewards: npt.ArrayLike, *, least: int = 1) -> np.ndarray:
  rewards = np.asarray(rewards, np.float64)
  if rewards.ndim != 1:
    raise ValueError(f'rewards must be [T], got shape {rewards.shape}')
  if rewards.size < least:
    raise ValueError(f'rewards has {rewards.size} steps, needs {least}')
  if not np.isfinite(rewards).all():
    step = int(np.flatnonzero(~np.isfinite(rewards))[0])
    raise ValueError(f'rewards[{step}] ({rewards[step]}) must be finite')
  return rewards
