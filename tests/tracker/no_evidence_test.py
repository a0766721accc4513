import numpy as np
import pytest

from spopp_jax.tracker import base, no_evidence


def test_nothing_is_kept_and_nothing_is_scored():
  evidence = no_evidence.NoEvidence(['a', 'b'], np.ones(2), np.ones(2))
  evidence.receive([base.Outcome('r', 'a', 0, 1.0)])
  evidence.consume([], lambda trajectories: pytest.fail('scored'))
  np.testing.assert_array_equal(evidence.values(['b', 'a', 'a'], 3), [0, 0, 0])
  for counts in evidence.counts(['a'], 3):
    np.testing.assert_array_equal(counts, [0])
  assert evidence.state_dict() == {}
  evidence.load_state_dict({})


def test_every_row_is_news_once():
  evidence = no_evidence.NoEvidence(['a', 'b'], np.ones(2), np.ones(2))
  assert evidence.task_ids == ('a', 'b')
  rows, version = evidence.changed_since(-1)
  np.testing.assert_array_equal(rows, [0, 1])
  np.testing.assert_array_equal(evidence.read(rows), [0, 0])
  evidence.receive([base.Outcome('r', 'a', 0, 1.0)])
  assert evidence.changed_since(version)[0].shape == (0,)
