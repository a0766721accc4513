import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from spopp_jax.kernels import group_advantage


def _advantages(rewards, group_ids=None, usable=None, num_groups=1, **kwargs):
  return group_advantage.group_advantages(
    *_members(rewards, group_ids, usable), num_groups=num_groups, **kwargs
  )


def _members(rewards, group_ids=None, usable=None):
  rewards = np.asarray(rewards, np.float32)
  if group_ids is None:
    group_ids = np.zeros(len(rewards))
  if usable is None:
    usable = np.ones(len(rewards))
  return rewards, np.asarray(group_ids, np.int32), np.asarray(usable, bool)


@pytest.mark.parametrize(
  ('name', 'scale', 'leave_one_out'),
  [
    ('grpo_ddof1_eps1e6', True, False),
    ('dr_grpo', False, False),
    ('rloo', False, True),
  ],
)
def test_a01_group_advantages(vectors, name, scale, leave_one_out):
  vector = vectors['A01_group_adv']
  got = _advantages(
    vector['inputs']['R'], scale=scale, leave_one_out=leave_one_out
  )
  np.testing.assert_allclose(got, vector['expected'][name], rtol=1e-6)


def test_rloo_is_the_difference_to_the_mean_of_the_others():
  rewards = np.array([0.3, 1.0, -2.0, 0.7, 0.1])
  others = (rewards.sum() - rewards) / 4
  got = _advantages(rewards, scale=False, leave_one_out=True)
  np.testing.assert_allclose(got, rewards - others, rtol=1e-5)


def test_epsilon_is_added_to_the_deviation():
  rewards = np.array([1e-6, 3e-6, 2e-6, 8e-6])
  offsets = rewards - rewards.mean()
  want = offsets / (rewards.std(ddof=1) + 1e-6)
  np.testing.assert_allclose(_advantages(rewards), want, rtol=1e-5)


def test_adv05_bound_and_sample_deviation(group_cases):
  case = group_cases['ADV-05']
  got = _advantages(case['input']['rewards'])
  np.testing.assert_allclose(got, case['expected']['grpo_sample'], rtol=3e-6)
  assert np.abs(got).max() <= case['expected']['bound_sample']
  rest = _advantages(case['input']['rewards'], leave_one_out=True)
  np.testing.assert_allclose(rest, np.asarray(got) * 4 / 3, rtol=1e-6)


def test_adv06_variance_in_two_passes(cases):
  case = cases['ADV-06']
  got = _advantages(case['input']['rewards_float32'])
  sample = np.array(case['expected']['grpo_population']) * np.sqrt(7 / 8)
  np.testing.assert_allclose(got, sample, rtol=4e-6)


def test_adv11_small_spread_at_a_large_mean(cases):
  rewards = np.array(cases['ADV-11']['input']['A'])
  want = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
  # One pass in float32 has an error of the size of the variance.
  np.testing.assert_allclose(_advantages(rewards), want, rtol=1e-2)


@pytest.mark.parametrize('scale', [True, False])
@pytest.mark.parametrize('leave_one_out', [True, False])
@pytest.mark.parametrize('rewards', [[0.95] * 7, [0.1] * 3, [0.4], [1.0, 1.0]])
def test_equal_rewards_give_exactly_zero(rewards, scale, leave_one_out):
  got = _advantages(rewards, scale=scale, leave_one_out=leave_one_out)
  np.testing.assert_array_equal(got, np.zeros(len(rewards)))


def test_incomplete_and_interleaved_groups():
  rewards = [1, 5, 0, 7, 1, 9, 3, np.nan]
  ids = [2, 0, 2, 0, 2, 0, 1, 2]
  usable = [1, 1, 1, 1, 1, 0, 1, 0]
  got = _advantages(rewards, ids, usable, num_groups=4, scale=False)
  np.testing.assert_allclose(
    got, [1 / 3, -1, -2 / 3, 1, 1 / 3, 0, 0, 0], atol=1e-6
  )


def test_padding_id_is_no_group():
  got = _advantages([1, 0, 1, 0], [0, 0, 1, 1], num_groups=1, scale=False)
  np.testing.assert_array_equal(got, [0.5, -0.5, 0, 0])


_GROUPS = st.lists(
  st.tuples(
    st.integers(-4, 4).map(lambda x: x / 4), st.integers(0, 3), st.booleans()
  ),
  min_size=12,
  max_size=12,
)


@hypothesis.given(_GROUPS, st.permutations(range(12)))
@hypothesis.settings(deadline=None, max_examples=40)
def test_order_does_not_matter_and_groups_are_centred(members, order):
  rewards, ids, usable = _members(*zip(*members, strict=True))
  got = np.asarray(_jitted(rewards, ids, usable))
  order = np.array(order)
  moved = _jitted(rewards[order], ids[order], usable[order])
  np.testing.assert_allclose(moved, got[order], atol=1e-5)
  for group in range(3):
    member = usable & (ids == group)
    number = max(member.sum(), 1)
    assert abs(got[member].sum()) < 1e-4
    assert np.all(np.abs(got[member]) <= (number - 1) / number**0.5 + 1e-5)
    if number > 1 and np.ptp(rewards[member]) > 0:
      np.testing.assert_allclose(got[member].std(ddof=1), 1, rtol=1e-4)
  np.testing.assert_array_equal(got[~usable | (ids == 3)], 0)


_jitted = jax.jit(
  functools.partial(group_advantage.group_advantages, num_groups=3)
)


def test_groups_over_devices_are_the_whole():
  rng = np.random.default_rng(1)
  rewards, ids, usable = _members(
    rng.integers(0, 2, 16), rng.integers(0, 4, 16), rng.random(16) < 0.8
  )
  whole = group_advantage.group_advantages(rewards, ids, usable, num_groups=4)
  counts = group_advantage.group_counts(rewards, ids, usable, num_groups=4)
  split = lambda function: jax.vmap(
    functools.partial(function, num_groups=4, axis_name='devices'),
    axis_name='devices',
  )(*(x.reshape(4, 4) for x in (rewards, ids, usable)))
  np.testing.assert_allclose(
    split(group_advantage.group_advantages).reshape(-1), whole, rtol=1e-6
  )
  for part, all_of_it in zip(
    split(group_advantage.group_counts), counts, strict=True
  ):
    np.testing.assert_array_equal(part, np.full(4, all_of_it))


def test_group_counts_and_the_groups_dapo_keeps():
  rewards = [0, 1, 1, 0, 0, 1, 0.5, 0.5, 1, 1]
  ids = [0, 1, 1, 0, 2, 2, 3, 3, 5, 1]
  usable = [1, 1, 1, 1, 1, 1, 1, 1, 1, 0]
  members = _members(rewards, ids, usable)
  got = group_advantage.group_counts(*members, num_groups=6)
  # Group 4 has nobody and does not count; group 5 has one member.
  assert got == group_advantage.GroupCounts(
    groups=5, equal=4, all_zero=1, all_one=2
  )
  kept = group_advantage.in_varied_group(*members, num_groups=6)
  np.testing.assert_array_equal(kept, [0, 0, 0, 0, 1, 1, 0, 0, 0, 0])


def test_unusable_rewards_do_not_make_a_group_varied():
  members = _members([1, 1, 0], [0, 0, 0], [1, 1, 0])
  kept = group_advantage.in_varied_group(*members, num_groups=1)
  np.testing.assert_array_equal(kept, [False, False, False])


def test_advantages_are_constants():
  gradient = jax.grad(
    lambda rewards: group_advantage.group_advantages(
      rewards, *_members([1, 0, 1])[1:], num_groups=1
    )[0]
  )(np.array([1, 0, 1], np.float32))
  np.testing.assert_array_equal(gradient, [0, 0, 0])


def test_float_ids_are_refused():
  with pytest.raises(AssertionError):
    group_advantage.group_advantages(
      np.ones(2, np.float32),
      np.zeros(2, np.float32),
      np.ones(2, bool),
      num_groups=1,
    )
