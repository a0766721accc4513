import pytest

from spopp_jax.sampler import retries


def test_all_tries_of_a_rollout_share_its_budget():
  budget = retries.RetryBudget(3)
  assert budget.spend('r7')
  assert budget.spend('r7/2')
  assert budget.spend('r8')
  assert not budget.spend('r7/3')
  budget.forget('r7/3')
  assert budget.spend('r7')


def test_one_attempt_is_no_retry():
  assert not retries.RetryBudget(1).spend('r7')


def test_no_attempt_is_refused():
  with pytest.raises(ValueError, match=r'attempts \(0\)'):
    retries.RetryBudget(0)


def test_tries_are_numbered_in_their_ids():
  assert retries.next_try('r7') == 'r7/2'
  assert retries.next_try('r7/2') == 'r7/3'
  assert retries.stem('r7/3') == 'r7'
