"""Top-k, top-p and min-p in plain numpy, one row at a time."""

import numpy as np


def by_hand(logits, temperature, top_k, top_p, min_p=0.0):
  """Returns one row's kept ids, the likeliest first, and their log-probs."""
  scaled = np.asarray(logits, np.float64) / temperature
  order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
  if top_k:
    order = order[:top_k]
  masses = np.exp(scaled - scaled.max())
  whole = sum(masses[i] for i in order)
  kept, mass = [], 0.0
  for i in order:
    if kept and top_p < 1 and mass >= top_p - 1e-6:
      break
    if masses[i] < (min_p - 1e-6) * masses.max():
      break
    kept.append(i)
    mass += masses[i] / whole
  total = np.log(sum(masses[i] for i in kept))
  return kept, [scaled[i] - scaled.max() - total for i in kept]
