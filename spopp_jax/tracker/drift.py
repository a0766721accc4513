"""How far the policy moved on a stored response, and what is then retained."""

import numpy as np

ESTIMATORS = ('abs_logratio', 'k1', 'k3')
MASKS = ('action', 'response')


def drift(
  previous_logprobs: np.ndarray,
  present_logprobs: np.ndarray,
  mask: np.ndarray,
  *,
  estimator: str,
) -> float:
  """Returns D, a mean over the counted tokens of one stored response.

  With l = present - previous: abs_logratio is mean |l| (SPO's recipe), k1 is
  mean(-l) and k3 mean(exp(l) - 1 - l). Example: l = [.5, -.1] has abs_logratio
  .3 and k1 -.2.

  Args:
    previous_logprobs: [T] float, nats; right after the prompt's last visit.
    present_logprobs: [T] float, nats; right after the present update.
    mask: [T] bool; counted tokens.
    estimator: one of ESTIMATORS.

  Returns:
    D in nats; 0 if no token is counted.
  """
  if not mask.any():
    return 0.0
  log_ratio = present_logprobs[mask].astype(np.float64) - previous_logprobs[
    mask
  ].astype(np.float64)
  if estimator == 'abs_logratio':
    return float(np.abs(log_ratio).mean())
  if estimator == 'k1':
    return float(-log_ratio.mean())
  # exp(20) keeps far more than the retention bounds can tell apart.
  return float((np.expm1(np.minimum(log_ratio, 20)) - log_ratio).mean())


def drift_mask(action_mask: np.ndarray, *, kind: str) -> np.ndarray:
  """Returns the tokens that drift is averaged over.

  Args:
    action_mask: [T] bool.
    kind: 'action' for the sampled tokens; 'response' for every token from the
      first action on, observations included.

  Returns:
    [T] bool.
  """
  if kind == 'action':
    return action_mask
  return np.logical_or.accumulate(action_mask)


def retention(
  drift_nats: float, *, half_life: float, low: float, high: float
) -> float:
  """Returns 2^(-D / half_life) within [low, high] (SPO).

  Example: D = .01 with half_life .06 keeps .8909 in [.875, .96]; D = 0 keeps
  .96, not 1.
  """
  return float(np.clip(2.0 ** (-drift_nats / half_life), low, high))
