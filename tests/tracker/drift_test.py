import numpy as np
import pytest

from spopp_jax.tracker import drift


@pytest.mark.parametrize(
  'estimator, mask, key',
  [
    ('abs_logratio', 'action_mask', 'abs_action'),
    ('abs_logratio', 'attn_mask', 'abs_attn_recipe'),
    ('k1', 'action_mask', 'k1_action'),
    ('k3', 'action_mask', 'k3_action'),
  ],
)
def test_t03_estimators(vectors, estimator, mask, key):
  vector = vectors['T03_drift_D']
  inputs = vector['inputs']
  got = drift.drift(
    np.array(inputs['logp_prev']),
    np.array(inputs['logp_now']),
    np.array(inputs[mask], bool),
    estimator=estimator,
  )
  np.testing.assert_allclose(got, vector['expected'][key], rtol=1e-12)


def test_t02_retention(vectors):
  vector = vectors['T02_retention']
  got = [
    drift.retention(d, half_life=0.06, low=0.875, high=0.96)
    for d in vector['inputs']['D']
  ]
  np.testing.assert_allclose(got, vector['expected']['rho'], rtol=1e-12)


def test_negative_drift_keeps_no_more_than_the_bound():
  assert drift.retention(-1.0, half_life=0.06, low=0.875, high=0.96) == 0.96


def test_no_counted_token_is_no_drift():
  nothing = np.zeros(3, bool)
  for estimator in drift.ESTIMATORS:
    got = drift.drift(np.ones(3), np.zeros(3), nothing, estimator=estimator)
    assert got == 0


def test_masks_of_a_response():
  actions = np.array([0, 0, 1, 0, 1, 0], bool)
  got = drift.drift_mask(actions, kind='response')
  np.testing.assert_array_equal(got, [0, 0, 1, 1, 1, 1])
  assert drift.drift_mask(actions, kind='action') is actions
