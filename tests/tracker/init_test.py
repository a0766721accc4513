import numpy as np
import pytest

from spopp_jax import tracker
from spopp_jax.tracker import event_time, no_evidence, receipt_order


def _make(baseline, **config):
  return tracker.make_evidence(
    baseline, ['a'], np.ones(1), np.ones(1), **config
  )


def test_the_baseline_chooses_the_evidence():
  assert isinstance(_make('event_time'), event_time.EventTimeEvidence)
  assert isinstance(
    _make('receipt_order', retention_max=0.9),
    receipt_order.ReceiptOrderEvidence,
  )
  assert isinstance(_make('none'), no_evidence.NoEvidence)


def test_unknown_names_are_refused_with_the_nearest():
  with pytest.raises(ValueError, match="did you mean 'event_time'"):
    _make('event_tim')
  with pytest.raises(ValueError, match="did you mean 'retention'"):
    _make('event_time', retentoin=0.9)
  with pytest.raises(ValueError, match='allowed: retention, event'):
    _make('event_time', drift_mask='action')
