import numpy as np
import pytest

from spopp_jax.tracker import offline_evidence


def test_t01_jeffreys_with_mass_eight(vectors):
  vector = vectors['T01_spo_init']
  inputs, expected = vector['inputs'], vector['expected']
  success, failure = offline_evidence.jeffreys(
    np.array(inputs['S']), inputs['n0'], mass=1 / (1 - inputs['rho_min'])
  )
  for i, trials in enumerate(inputs['S']):
    want = expected[f'S{trials}']
    np.testing.assert_allclose(success[i], want['alpha'], rtol=1e-12)
    np.testing.assert_allclose(failure[i], want['beta'], rtol=1e-12)
  np.testing.assert_allclose(success + failure, 8, rtol=1e-12)


def test_t01_no_trials_leave_the_bare_prior(vectors):
  want = vectors['T01_spo_init']['expected']['n0_0']
  success, failure = offline_evidence.jeffreys([0, 2], [0, 4])
  assert (success[0], failure[0]) == (want['alpha'], want['beta'])
  np.testing.assert_allclose([success[1], failure[1]], [4, 4])


@pytest.mark.parametrize(
  'successes, trials', [(9, 8), (-1, 8), (1.5, 8), (np.nan, 8), (1, [8, 2.5])]
)
def test_impossible_counts_are_refused(successes, trials):
  with pytest.raises(ValueError, match=r'prompt 1: .* successes in'):
    offline_evidence.jeffreys([0, successes], trials)


@pytest.mark.parametrize('mass', [0, -1, np.nan, np.inf])
def test_mass_must_be_positive(mass):
  with pytest.raises(ValueError, match='mass'):
    offline_evidence.jeffreys([1], 8, mass=mass)
