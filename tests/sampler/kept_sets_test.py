import dataclasses

import messages
import numpy as np
import pytest

from spopp_jax import types
from spopp_jax.sampler import kept_sets


@pytest.mark.parametrize('vocabulary', [1, 7, 8, 9, 20])
def test_bits_are_the_ids_that_are_set(vocabulary):
  rng = np.random.default_rng(vocabulary)
  kept = rng.random((30, vocabulary)) < 0.4
  kept[0] = True
  kept[1] = False
  mass = -rng.random(30).astype(np.float32)
  got = kept_sets.from_bits(np.packbits(kept, axis=1), mass)
  expected = messages.csr(*(np.flatnonzero(row).tolist() for row in kept))
  expected = dataclasses.replace(expected, log_mass=mass)
  messages.assert_same(expected, got)


def test_no_tokens_have_no_sets():
  got = kept_sets.from_bits(np.zeros((0, 3), np.uint8), np.zeros(0, np.float32))
  messages.assert_same(messages.csr(log_mass=[]), got)


def test_turns_follow_each_other():
  got = kept_sets.concatenate(
    [
      messages.csr([3, 1], [2]),
      messages.csr(),
      messages.csr([9]),
      messages.csr([4, 5, 6], [7, 8]),
    ]
  )
  expected = messages.csr([3, 1], [2], [9], [4, 5, 6], [7, 8])
  messages.assert_same(expected, got)
  one = messages.csr([3, 1], [2])
  messages.assert_same(one, kept_sets.concatenate([one]))


def test_log_masses_follow_each_other_if_all_have_them():
  first = messages.csr([3, 1], [2], log_mass=[-0.5, -0.25])
  second = messages.csr([9], log_mass=[-1])
  got = kept_sets.concatenate([first, second])
  expected = messages.csr([3, 1], [2], [9], log_mass=[-0.5, -0.25, -1])
  messages.assert_same(expected, got)
  assert kept_sets.concatenate([first, messages.csr([9])]).log_mass is None


@pytest.mark.parametrize(
  'log_mass, words',
  [
    ([-1], '1 log masses for 2 action tokens'),
    ([-1, 0.25], 'log mass 0.25'),
    ([float('nan'), 0], 'log mass nan at action 0'),
    ([0, -np.inf], 'log mass -inf at action 1'),
  ],
)
def test_a_wrong_log_mass_is_named(log_mass, words):
  kept = messages.csr([6], [7], log_mass=log_mass)
  assert words in kept_sets.problem(kept, np.array([6, 7], np.int32))
  fine = messages.csr([6], [7], log_mass=[1e-5, -30])
  assert kept_sets.problem(fine, np.array([6, 7], np.int32)) is None


def test_sets_with_their_token_and_distinct_ids_are_fine():
  sampled = np.array([6, 7, 6], np.int32)
  for sets in (
    ([6], [7], [6]),
    ([6, 7], [6, 7], [7, 6]),
    ([9, 6], [7, 9, 8], [1, 2, 3, 6]),
    ([5, 6], [6, 7], [7, 6, 8]),
  ):
    assert kept_sets.problem(messages.csr(*sets), sampled) is None
  assert kept_sets.problem(messages.csr(), sampled[:0]) is None


@pytest.mark.parametrize(
  'sets, words',
  [
    (([6], [7]), '3 offsets for 3 action tokens'),
    (([6], [7], [6], [6]), '5 offsets for 3 action tokens'),
    (([6], [], [6, 7]), 'do not rise at action 1'),
    (([6], [7], [7, 8]), 'lacks 6, the token drawn at action 2'),
    (([6, 2, 2], [7], [6]), '2 twice at action 0'),
    (([6], [7, 2, 3, 7], [6]), '7 twice at action 1'),
    (([6], [7, -1], [6]), 'the id -1'),
  ],
)
def test_the_first_fault_is_named(sets, words):
  sampled = np.array([6, 7, 6], np.int32)
  assert words in kept_sets.problem(messages.csr(*sets), sampled)


def test_hostile_offsets_are_refused_without_being_followed():
  ids = np.array([6, 7, 8], np.int32)
  least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
  # The difference of the last pair exceeds an int64.
  for middle in ([least, 2], [most, 2], [1, 2**40], [2**62 + 9, -(2**62) - 9]):
    kept = types.KeptIds(ids, np.array([0, *middle, 3], np.int64))
    assert 'do not rise' in kept_sets.problem(kept, ids)
