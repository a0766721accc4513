import numpy as np
import pytest

from spopp_jax.sampler import recorded_calls


def call(prompt, tokens, logprob=-1.0):
  return recorded_calls.Call(
    np.array(prompt, np.int32),
    np.array(tokens, np.int32),
    np.full(len(tokens), logprob, np.float32),
  )


def test_tok02_a_prompt_that_departs_starts_a_row(cases):
  steps, expected = (cases['TOK-02'][k] for k in ('input', 'expected'))
  first, second = (
    call(steps[name]['prompt'], steps[name]['completion'])
    for name in ('step1', 'step2')
  )
  earlier = np.concatenate([first.prompt, first.tokens])
  position = recorded_calls.first_mismatch(earlier, second.prompt)
  assert position == expected['first_mismatch_index']
  rows, mismatches = recorded_calls.join([first, second])
  assert mismatches == 1
  assert [row.tokens.tolist() for row in rows] == [
    [1, 2, 3, 4],
    [1, 2, 3, 9, 7, 8],
  ]
  assert [row.action_mask.tolist() for row in rows] == [
    [False, False, True, True],
    [False, False, False, False, False, True],
  ]
  with pytest.raises(
    recorded_calls.PrefixMismatch, match=r'call 1 departs at position 3'
  ):
    recorded_calls.join([first, second], on_mismatch='refuse')


def test_tok04_stripped_thinking_is_a_mismatch(cases):
  given, expected = (cases['TOK-04'][k] for k in ('input', 'expected'))
  position = recorded_calls.first_mismatch(
    np.array(given['render_u1_a1']), np.array(given['render_u1_a1_u2_a2'])
  )
  assert position == expected['first_mismatch_index']


def test_tok06_the_first_end_counts_and_nothing_after_it(cases):
  given, expected = (cases['TOK-06'][k] for k in ('input', 'expected'))
  length = recorded_calls.turn_length(np.array(given['ids']), [given['eos']])
  assert length == expected['L']
  mask = (np.arange(len(given['ids'])) < length).astype(int)
  assert mask.tolist() == expected['mask']
  # By turn, not by row: each has its own first end.
  assert recorded_calls.turn_length(np.array([7, 2, 0]), [9, 2]) == 2
  assert recorded_calls.turn_length(np.array([7, 9, 2]), [9, 2]) == 2
  assert recorded_calls.turn_length(np.array([7, 8]), [2]) == 2
  assert recorded_calls.turn_length(np.array([], np.int32), [2]) == 0


def test_calls_that_continue_are_one_row():
  calls = [
    call([1, 2], [3, 4], -0.5),
    call([1, 2, 3, 4, 10], [5], -0.25),
    call([1, 2, 3, 4, 10, 5, 11, 12], [6], -2.0),
  ]
  (row,), mismatches = recorded_calls.join(calls, on_mismatch='refuse')
  assert mismatches == 0
  assert row.num_calls == 3
  assert row.tokens.tolist() == [1, 2, 3, 4, 10, 5, 11, 12, 6]
  assert row.action_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 1]
  np.testing.assert_array_equal(
    row.behaviour_logprobs, [0, 0, -0.5, -0.5, 0, -0.25, 0, 0, -2]
  )
  assert row.tokens.dtype == np.int32
  assert row.behaviour_logprobs.dtype == np.float32


def test_a_row_goes_on_after_a_mismatch():
  calls = [
    call([1], [2]),
    call([1, 3], [4]),  # departs at 1
    call([1, 3, 4, 5], [6]),
    call([1, 3, 4], [7]),  # ends before what was sampled
  ]
  rows, mismatches = recorded_calls.join(calls)
  assert mismatches == 2
  assert [row.tokens.tolist() for row in rows] == [
    [1, 2],
    [1, 3, 4, 5, 6],
    [1, 3, 4, 7],
  ]
  assert [row.num_calls for row in rows] == [1, 2, 1]
  # No sampled id is lost or counted twice.
  assert sum(row.action_mask.sum() for row in rows) == len(calls)


def test_positions_of_a_mismatch():
  def position(earlier, prompt):
    return recorded_calls.first_mismatch(np.array(earlier), np.array(prompt))

  assert position([1, 2], [1, 2]) is None
  assert position([1, 2], [1, 2, 3]) is None
  assert position([], [1]) is None
  assert position([1, 2], [1]) == 1
  assert position([1, 2], [2, 2]) == 0
  assert position([1, 2], []) == 0


def test_what_cannot_be_joined_is_refused():
  with pytest.raises(ValueError, match='at least one call'):
    recorded_calls.join([])
  with pytest.raises(ValueError, match='call 1 has 0 tokens'):
    recorded_calls.join([call([1], [2]), call([1, 2], [])])
  broken = call([1], [2])._replace(logprobs=np.zeros(2, np.float32))
  with pytest.raises(ValueError, match='call 0 has 1 tokens and 2 log-probs'):
    recorded_calls.join([broken])
  with pytest.raises(ValueError, match='must be split or refuse'):
    recorded_calls.join([call([1], [2])], on_mismatch='merge')
