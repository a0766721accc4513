"""The evidence a run starts from: smoothed offline outcomes of each prompt."""

import numpy as np


def jeffreys(
  successes: np.ndarray, trials: np.ndarray, *, mass: float = 8.0
) -> tuple[np.ndarray, np.ndarray]:
  """Turns offline outcomes into evidence of a fixed total mass.

  With S successes in n trials (SPO; SPO++ appendix A.2):

    success = mass (S + 1/2) / (n + 1)
    failure = mass (n - S + 1/2) / (n + 1)

  Example: 3 of 8 with mass 8 gives (3.111, 4.889), a value of .389.

  Args:
    successes: [P] whole numbers; S, in [0, trials].
    trials: [P] whole numbers or one for all; n >= 0.
    mass: > 0; success + failure; 8 is what retention .875 sustains.

  Returns:
    success [P] and failure [P] float64, both positive; 1/2 each (mass 1, the
    bare Jeffreys prior) for a prompt without trials.

  Raises:
    ValueError: counts that are not whole, negative or inconsistent, or a mass
      that is not positive and finite.
  """
  successes, trials = np.broadcast_arrays(
    np.asarray(successes, np.float64), np.asarray(trials, np.float64)
  )
  possible = (successes >= 0) & (successes <= trials) & np.isfinite(trials)
  whole = (successes == np.floor(successes)) & (trials == np.floor(trials))
  wrong = np.flatnonzero(~(possible & whole))
  if wrong.size:
    i = wrong[0]
    raise ValueError(
      f'prompt {i}: {successes.flat[i]} successes in {trials.flat[i]} trials; '
      'both must be whole numbers with 0 <= successes <= trials'
    )
  if not (np.isfinite(mass) and mass > 0):
    raise ValueError(f'mass ({mass}) must be positive and finite')
  total = np.where(trials > 0, mass, 1.0)
  share = (successes + 0.5) / (trials + 1)
  return total * share, total * (trials - successes + 0.5) / (trials + 1)
