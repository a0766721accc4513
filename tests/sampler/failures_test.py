import json
import math

import client_test
import messages
import pytest
import scripted
from google.protobuf import json_format

from spopp_jax import types
from spopp_jax.sampler import base, codec, errors, failures, sampler_pb2


def kept(directory):
  """Returns what is kept, oldest first."""
  return [json.loads(path.read_text()) for path in sorted(directory.iterdir())]


def read_back(record):
  return json_format.ParseDict(record['message'], sampler_pb2.Trajectory())


def answer(request_id='r1', **changes):
  return codec.encode_trajectory(
    messages.truncated([6, 9], [7], request_id=request_id, **changes)
  )


def test_a_message_is_read_back_and_is_refused_as_it_was(tmp_path):
  message = answer(seconds=math.inf)
  with pytest.raises(errors.InvalidMessage) as caught:
    messages.decode(message)
  failures.Failures(tmp_path / 'f').add(message, str(caught.value), 'host:1')
  (record,) = kept(tmp_path / 'f')
  assert record['reason'] == str(caught.value)
  assert record['from'] == 'host:1'
  assert read_back(record) == message
  with pytest.raises(errors.InvalidMessage) as again:
    messages.decode(read_back(record))
  assert str(again.value) == record['reason']


def test_the_newest_stay_also_over_a_restart(tmp_path):
  for start in (0, 4):
    keeper = failures.Failures(tmp_path, keep=3)
    for number in range(start, start + 4):
      keeper.add(answer(f'r{number}'), 'broken', 'host:1')
  assert [read_back(r).request_id for r in kept(tmp_path)] == ['r5', 'r6', 'r7']
  assert [path.name for path in sorted(tmp_path.iterdir())] == [
    f'{number:06d}.json' for number in (5, 6, 7)
  ]


def test_large_messages_leave_room_for_few(tmp_path):
  (tmp_path / 'notes.json').write_text('{}')  # not one of ours
  keeper = failures.Failures(tmp_path, max_bytes=12_000)
  for number in range(4):
    keeper.add(answer(detail='x' * 4096), f'reason {number}', 'host:1')
  numbered = sorted(tmp_path.glob('0*.json'))
  assert [path.stem for path in numbered] == ['000002', '000003']
  keeper.add(answer(detail='x' * 20_000), 'larger than all', 'host:1')
  assert [path.stem for path in sorted(tmp_path.glob('0*.json'))] == ['000004']
  assert (tmp_path / 'notes.json').exists()


def test_a_disk_that_takes_nothing_costs_a_warning(tmp_path, caplog):
  (tmp_path / 'f').write_text('a file where the directory should be')
  keeper = failures.Failures(tmp_path / 'f')
  keeper.add(answer(), 'broken', 'host:1')
  assert 'cannot keep a message that failed' in caplog.text


@pytest.mark.parametrize(
  'spoil, reason',
  [
    (client_test.flip, 'payload_crc32'),
    (client_test.spoiled(policy_version=7), 'policy_version is 7'),
  ],
)
def test_what_a_client_refuses_is_kept_as_it_came(tmp_path, spoil, reason):
  sent = []
  liar = client_test.Liar(lambda message: sent.extend(spoil(message)) or sent)
  keeper = failures.Failures(tmp_path)
  with client_test.connected(liar, failures=keeper) as sampler:
    sampler.submit([scripted.request(1)])
    assert sampler.next(client_test.WAIT_S).status is types.Status.INVALID
  (record,) = kept(tmp_path)
  assert reason in record['reason']
  assert record['from'] == sampler.address
  assert [read_back(record)] == sent


def test_what_cannot_be_given_to_a_request_is_kept_too(tmp_path):
  liar = client_test.Liar(client_test.spoiled(request_id=''))
  keeper = failures.Failures(tmp_path)
  with client_test.connected(liar, failures=keeper) as sampler:
    sampler.submit([scripted.request(1)])
    with pytest.raises(errors.InvalidMessage):
      sampler.next(client_test.WAIT_S)
  (record,) = kept(tmp_path)
  assert 'request_id' in record['reason']


@pytest.mark.parametrize(
  'status, is_kept',
  [
    (types.Status.ENV_ERROR, True),
    (types.Status.SAMPLER_ERROR, True),
    (types.Status.STALE, False),
    (types.Status.CANCELLED, False),
    (types.Status.LENGTH, False),
  ],
)
def test_failures_that_a_service_tells_of_are_kept(tmp_path, status, is_kept):
  def spoil(message):
    if status is types.Status.LENGTH:
      message.status = int(status)
      message.ClearField('reward')
      return [message]
    request = scripted.request(1)
    return [codec.encode_trajectory(base.unanswered(request, status, 'why'))]

  keeper = failures.Failures(tmp_path / 'f')
  liar = client_test.Liar(spoil)
  with client_test.connected(liar, failures=keeper) as sampler:
    sampler.submit([scripted.request(1)])
    assert sampler.next(client_test.WAIT_S).status is status
  reasons = [r['reason'] for r in kept(tmp_path / 'f')] if is_kept else []
  assert reasons == [f'{status.name}: why'] * is_kept
  assert (tmp_path / 'f').exists() == is_kept
