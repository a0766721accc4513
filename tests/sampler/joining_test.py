import dataclasses
import itertools
import math

import messages
import scripted
from hypothesis import given
from hypothesis import strategies as st

from spopp_jax import types
from spopp_jax.sampler import codec, joining, sampler_pb2


@given(st.lists(messages.trajectories(), max_size=8), st.integers(900, 3_000))
def test_answers_keep_their_order_in_messages_that_fit(trajectories, most):
  replies = list(joining.replies(trajectories, most))
  assert all(reply.ByteSize() <= most for reply in replies)
  assert [m for reply in replies for m in reply.trajectories] == [
    codec.encode_trajectory(one) for one in trajectories
  ]
  # No two neighbours would have fitted into one.
  for reply, following in itertools.pairwise(replies):
    size = following.trajectories[0].ByteSize()
    assert reply.ByteSize() + size > most - 8 * len(reply.trajectories) - 8


def test_few_messages_carry_many_answers():
  one = messages.truncated([5, 6], [5, 7])
  size = codec.encode_trajectory(one).ByteSize()
  (reply,) = joining.replies([one] * 100, 2**24)
  assert len(reply.trajectories) == 100
  # A mebibyte at a time, whatever a message may take.
  many = list(joining.replies([one] * (2**21 // size), 2**24))
  assert len(many) == 3
  assert max(reply.ByteSize() for reply in many) <= 2**20


def test_an_answer_too_long_for_the_channel_says_so_instead():
  sets = [list(range(6, 500)), list(range(7, 500))]
  trajectory = messages.truncated(*sets, seconds=2.5)
  small = dataclasses.replace(messages.truncated([6], [7]), request_id='r1')
  (whole,) = joining.replies([trajectory], 10_000)
  assert list(whole.trajectories) == [codec.encode_trajectory(trajectory)]
  size = whole.trajectories[0].ByteSize() + 8
  assert size > 4 * 2 * 494 - 20
  assert list(joining.replies([trajectory], size)) == [whole]
  (short,) = joining.replies([small, trajectory, small], size - 1)
  assert short.ByteSize() < 1000
  before, result, after = map(messages.decode, short.trajectories)
  assert (before.request_id, after.request_id) == ('r1', 'r1')
  assert result.status == types.Status.SAMPLER_ERROR
  assert math.isnan(result.reward)
  assert (result.request_id, result.num_actions) == ('r9', 0)
  assert len(result.tokens) == 0
  assert result.kept is None
  for words in (f'{size} bytes', f'at most {size - 1}', 'lower top_k or top_p'):
    assert words in result.detail


def acknowledging(name):
  return sampler_pb2.RolloutMessage(
    acknowledgement=sampler_pb2.Acknowledgement(request_ids=[name])
  )


def parts(message):
  """Returns what a message carries, one entry each."""
  return [
    *message.requests.requests,
    *message.acknowledgement.request_ids,
    *([message.opening] if message.HasField('opening') else []),
  ]


@given(
  st.lists(st.tuples(st.booleans(), st.integers(0, 99))), st.integers(70, 400)
)
def test_a_caller_is_heard_in_the_order_in_which_it_spoke(kinds, most):
  sent = [scripted.OPENING] + [
    acknowledging(f'r{number}')
    if acknowledges
    else scripted.asking(sampler_pb2.Request(request_id=f'r{number}'))
    for acknowledges, number in kinds
  ]
  joined = list(joining.rollout_messages(sent, most))
  assert joined[0] == scripted.OPENING
  assert all(message.ByteSize() <= most for message in joined)
  heard = [part for message in joined for part in parts(message)]
  assert heard == [part for message in sent for part in parts(message)]
  # Neighbours of one kind are together unless that would be too long.
  for one, following in itertools.pairwise(joined[1:]):
    if one.WhichOneof('part') == following.WhichOneof('part'):
      assert one.ByteSize() + following.ByteSize() > most - 20 * len(parts(one))
