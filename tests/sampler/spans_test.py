"""Episodes that cross versions, on the wire and over a real channel."""

import dataclasses

import messages
import pytest
import scripted

from spopp_jax import types
from spopp_jax.sampler import base, codec, provenance, weights

OTHER = 'b' * 64
SPANS = (
  types.VersionSpan(3, messages.CHECKSUM, 1),
  types.VersionSpan(7, OTHER, 1),
)
SNAPSHOTS = {3: messages.CHECKSUM, 7: OTHER}
WAIT_S = 20.0


def test_spans_come_back_as_they_were():
  sent = messages.simple(spans=SPANS)
  assert messages.decode(codec.encode_trajectory(sent)).spans == SPANS
  request = dataclasses.replace(scripted.request(1), crosses_versions=True)
  assert codec.decode_request(codec.encode_request(request)) == request


def span(index, **changes):
  """Returns the spans with one changed."""
  spans = list(SPANS)
  spans[index] = dataclasses.replace(spans[index], **changes)
  return tuple(spans)


@pytest.mark.parametrize(
  'spans, words',
  [
    (SPANS[:1], 'several, rising'),
    (span(1, policy_version=3), 'several, rising'),
    (span(1, policy_version=2), 'several, rising'),
    (span(0, policy_version=2), 'policy_version 3'),
    (span(0, weights_checksum=OTHER), 'its checksum'),
    (span(1, weights_checksum=''), '64 hex digits'),
    (span(1, num_actions=0), 'positive, 2 in sum'),
    (span(1, num_actions=2), 'positive, 2 in sum'),
  ],
)
def test_spans_that_do_not_fit_are_refused(spans, words):
  message = codec.encode_trajectory(messages.simple(spans=spans))
  assert words in str(messages.refusal(message))


def asked(version=3, **changes):
  return base.Request('r9', 't', version, 1, types.SamplingParams(), **changes)


@pytest.mark.parametrize(
  'changes, request_, words',
  [
    ({}, asked(), ''),
    ({'spans': SPANS}, asked(crosses_versions=True), ''),
    ({'spans': SPANS}, asked(2, crosses_versions=True), ''),
    ({}, asked(2, crosses_versions=True), ''),
    ({}, asked(2), 'policy_version is 3; allowed: 2'),
    ({}, asked(4, crosses_versions=True), 'policy_version is 3; allowed: 4'),
    ({'spans': SPANS}, asked(), 'crosses no versions'),
    (
      {'spans': span(1, policy_version=8)},
      asked(crosses_versions=True),
      'weights_checksum of version 8',
    ),
    (
      {'spans': span(1, weights_checksum='c' * 64)},
      asked(crosses_versions=True),
      'weights_checksum of version 7',
    ),
    ({'weights_checksum': OTHER}, asked(), 'weights_checksum of version 3'),
    (
      {'status': types.Status.CONTEXT_LIMIT, 'weights_checksum': OTHER},
      asked(),
      'weights_checksum of version 3',
    ),
    ({'task_id': 'u'}, asked(), 'task_id is u'),
    ({'sampling': types.SamplingParams(0.5)}, asked(), 'sampling is'),
    ({'status': types.Status.ENV_ERROR, 'policy_version': 9}, asked(), ''),
  ],
)
def test_a_reply_must_come_of_what_was_asked_and_activated(
  changes, request_, words
):
  trajectory = messages.simple(**changes)
  said = provenance.problem(trajectory, request_, SNAPSHOTS)
  assert (words in said) if words else (said == '')


def test_an_open_episode_goes_on_with_a_snapshot_that_interrupts():
  engine = scripted.load(scripted.Engine(step_s=0.3))
  with (
    scripted.serving(engine) as server,
    scripted.connected(server) as sampler,
  ):
    request = dataclasses.replace(
      scripted.request(1, 'win-5'), crosses_versions=True
    )
    sampler.submit([request])
    scripted.wait_until(lambda: engine.num_open)
    snapshot = weights.snapshot(scripted.params(1.0), 1)
    sampler.install(snapshot, interrupt=True)
    assert engine.num_open  # it was not waited for
    result = sampler.next(WAIT_S)
  assert result.status == types.Status.OK
  assert [s.policy_version for s in result.spans] == [0, 1]
  assert result.spans[1].weights_checksum == snapshot.checksum
  assert set(result.token_versions[result.action_mask]) == {0, 1}
