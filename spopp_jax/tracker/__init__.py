"""Persistent prompt evidence on the host (numpy, float64)."""

import difflib
import inspect
from collections.abc import Sequence

import numpy as np

from spopp_jax.tracker import base, event_time, no_evidence, receipt_order

_KINDS = {
  'event_time': event_time.EventTimeEvidence,
  'none': no_evidence.NoEvidence,
  'receipt_order': receipt_order.ReceiptOrderEvidence,
}


def make_evidence(
  baseline: str,
  task_ids: Sequence[str],
  success: np.ndarray,
  failure: np.ndarray,
  **config: object,
) -> base.Evidence:
  """Builds the evidence that an objective's baseline asks for.

  Args:
    baseline: 'event_time' (Eq. 3), 'receipt_order' (Eq. 2) or 'none'.
    task_ids: P unique keys.
    success: [P] float64; offline alpha_0.
    failure: [P] float64; offline beta_0.
    **config: keywords of the evidence's constructor; absent ones keep the
      published recipe.

  Returns:
    The evidence.

  Raises:
    ValueError: unknown baseline or keyword (the nearest valid one is named),
      or a value that the constructor refuses.
  """
  if baseline not in _KINDS:
    raise ValueError(_unknown('baseline', baseline, list(_KINDS)))
  kind = _KINDS[baseline]
  allowed = [
    name
    for name, parameter in inspect.signature(kind).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
  ]
  for name in config:
    if name not in allowed:
      raise ValueError(
        _unknown(f'setting of {baseline} evidence', name, allowed)
      )
  return kind(task_ids, success, failure, **config)


def _unknown(kind: str, given: str, allowed: Sequence[str]) -> str:
  nearest = difflib.get_close_matches(given, allowed, n=1)
  hint = f'did you mean {nearest[0]!r}? ' if nearest else ''
  return f'unknown {kind} {given!r}: {hint}allowed: {", ".join(allowed)}'
