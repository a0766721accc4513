"""Both sides agree, or the words name what both have."""

import dataclasses
import uuid

import pytest
import scripted

from spopp_jax.sampler import errors, handshake, options

LIMITS = options.ChannelLimits()
SESSION = scripted.SESSION
DESCRIPTION = handshake.Description(
  tokenizer_fingerprint=scripted.EXPECTED.tokenizer_fingerprint,
  model_fingerprint=scripted.EXPECTED.model_fingerprint,
  tasks_fingerprint=scripted.EXPECTED.tasks_fingerprint,
  num_tasks=3,
  max_context_tokens=100,
  num_slots=2,
  max_pending=8,
  active_policy_version=-1,
  active_weights_checksum='',
)


def test_description_survives_the_wire():
  data = handshake.reply(DESCRIPTION, LIMITS).SerializeToString()
  message = handshake.reply(DESCRIPTION, LIMITS).FromString(data)
  assert handshake.describe(message) == DESCRIPTION
  handshake.check_contract(message, LIMITS)
  handshake.check_contract(handshake.request(LIMITS, SESSION), LIMITS)


def test_fitting_sides_agree():
  handshake.check_description(DESCRIPTION, scripted.EXPECTED)
  shorter = dataclasses.replace(DESCRIPTION, max_context_tokens=99)
  handshake.check_description(shorter, scripted.EXPECTED)


@pytest.mark.parametrize(
  'name', ['tokenizer_fingerprint', 'model_fingerprint', 'tasks_fingerprint']
)
def test_other_fingerprints_are_refused(name):
  other = dataclasses.replace(DESCRIPTION, **{name: 'of-another'})
  with pytest.raises(errors.HandshakeRefused) as caught:
    handshake.check_description(other, scripted.EXPECTED)
  assert f'{name} is {getattr(scripted.EXPECTED, name)}' in str(caught.value)
  assert 'of-another at the service' in str(caught.value)


@pytest.mark.parametrize(
  'name', ['num_slots', 'max_pending', 'max_context_tokens']
)
def test_a_service_that_could_take_nothing_is_refused(name):
  # Its room would be 0 for ever: a wait without an end.
  useless = dataclasses.replace(DESCRIPTION, **{name: 0})
  with pytest.raises(errors.HandshakeRefused, match=f'{name} .* is 0'):
    handshake.check_description(useless, scripted.EXPECTED)


def test_longer_context_is_refused():
  longer = dataclasses.replace(DESCRIPTION, max_context_tokens=101)
  with pytest.raises(errors.HandshakeRefused, match=r'100 at.*101 at'):
    handshake.check_description(longer, scripted.EXPECTED)


@pytest.mark.parametrize(
  'name', ['max_message_bytes', 'keepalive_time_ms', 'keepalive_timeout_ms']
)
def test_other_limits_are_refused(name):
  other = dataclasses.replace(LIMITS, **{name: 777})
  with pytest.raises(errors.HandshakeRefused) as caught:
    handshake.check_contract(handshake.request(other, SESSION), LIMITS)
  assert name in str(caught.value)
  assert '777' in str(caught.value)
  assert str(getattr(LIMITS, name)) in str(caught.value)


def test_other_contract_is_refused():
  message = handshake.request(LIMITS, SESSION)
  message.contract_version = 99
  with pytest.raises(errors.HandshakeRefused, match=r'contract_version.*99'):
    handshake.check_contract(message, LIMITS)


def test_a_session_is_named_by_a_uuid_in_hex():
  handshake.check_session_id(uuid.uuid4().hex)
  assert handshake.request(LIMITS, SESSION).session_id == SESSION
  for other in ('', SESSION[:-1], SESSION + '0', SESSION.upper(), 'x' * 32):
    with pytest.raises(errors.HandshakeRefused, match='allowed: 32 digits'):
      handshake.check_session_id(other)
