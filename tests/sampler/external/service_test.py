"""The whole way: client, gRPC service, environments, engine, HTTP server."""

import contextlib

import external_world as world
import grpc
import numpy as np
import pytest
import scripted
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spopp_jax import types
from spopp_jax.sampler import client, errors, handshake, rollout, service

SAMPLING = types.SamplingParams(
  temperature=0.7, top_k=12, max_turn_tokens=world.TURN, max_turns=3
)
EXPECTED = handshake.Expectation(
  tokenizer_fingerprint=scripted.Template.fingerprint,
  model_fingerprint='external',
  tasks_fingerprint=rollout.tasks_fingerprint(scripted.TASK_IDS),
  max_context_tokens=world.CONTEXT,
  vocab_size=world.CONFIG.vocab_size,
)


@contextlib.contextmanager
def serving(fake, directory, **limits):
  """Runs a service in front of a fake; yields it and a client."""
  driver = rollout.RolloutDriver(
    world.connect(fake, directory, **limits),
    scripted.Tasks(),
    scripted.Template(),
  )
  server = service.serve(driver, model_fingerprint='external')
  try:
    sampler = client.SamplerClient(server.address, EXPECTED)
    try:
      yield server, sampler
    finally:
      sampler.close()
  finally:
    server.stop(grace_s=0.2)


@pytest.fixture(params=world.KINDS, ids=lambda kind: kind.kind)
def fake(request):
  with world.running(request.param) as server:
    yield server


def request(number, version=0, task_id='endless'):
  return scripted.request(number, task_id, version, SAMPLING)


def check(trajectory, params):
  """Holds a trajectory against weights."""
  actions = np.flatnonzero(trajectory.action_mask)
  offsets = trajectory.kept.offsets
  for index, position in enumerate(actions):
    expected = world.log_distribution(
      params,
      trajectory.tokens[position - 1],
      temperature=SAMPLING.temperature,
      top_k=SAMPLING.top_k,
    )
    np.testing.assert_allclose(
      trajectory.behaviour_logprobs[position],
      expected[trajectory.tokens[position]],
      rtol=1e-5,
      atol=1e-6,
    )
    np.testing.assert_array_equal(
      trajectory.kept.ids[offsets[index] : offsets[index + 1]],
      np.flatnonzero(np.isfinite(expected)),
    )


def test_rollouts_of_two_versions(fake, tmp_path):
  with serving(fake, tmp_path) as (_, sampler):
    for version in (0, 1):
      params = world.make_parameters(version)
      checksum = sampler.publish(params, version)
      sampler.submit([request(10 * version + n, version) for n in range(6)])
      for trajectory in scripted.collect(sampler, 6):
        assert trajectory.status == types.Status.OK, trajectory.detail
        assert trajectory.num_turns == SAMPLING.max_turns
        assert trajectory.policy_version == version
        assert trajectory.weights_checksum == checksum
        assert trajectory.logprob_kind is types.LogprobKind.PROCESSED
        check(trajectory, params)
      assert fake.label == f'{version}-{checksum}'


def test_requests_of_an_old_version_are_stale(fake, tmp_path):
  with serving(fake, tmp_path) as (_, sampler):
    sampler.publish(world.make_parameters(3), 3)
    sampler.submit([request(1, version=2)])
    assert sampler.next(world.WAIT_S).status == types.Status.STALE


def test_raw_log_probs_are_said_to_be_raw(tmp_path):
  with (
    world.running(world.FakeSglang, most_kept=0) as fake,
    serving(fake, tmp_path) as (_, sampler),
  ):
    sampler.publish(world.make_parameters(0), 0)
    sampler.submit([request(1)])
    trajectory = sampler.next(world.WAIT_S)
    assert trajectory.status == types.Status.OK
    assert trajectory.logprob_kind is types.LogprobKind.RAW
    assert trajectory.kept is None


def test_a_failed_turn_is_a_sampler_error_and_the_rest_goes_on(fake, tmp_path):
  with serving(fake, tmp_path) as (_, sampler):
    sampler.publish(world.make_parameters(0), 0)

    def fail_once(_):
      del fake.hooks[fake.generate_path]
      raise world.Status(500, 'on fire')

    fake.hooks[fake.generate_path] = fail_once
    sampler.submit([request(n) for n in range(4)])
    results = scripted.collect(sampler, 4)
    (failed,) = (r for r in results if r.status != types.Status.OK)
    assert failed.status == types.Status.SAMPLER_ERROR
    assert 'the engine failed: ' in failed.detail
    assert 'status 500: on fire' in failed.detail


def test_a_refused_publication_leaves_the_old_version(fake, tmp_path):
  with serving(fake, tmp_path) as (_, sampler):
    params = world.make_parameters(0)
    sampler.publish(params, 0)

    def fail_once(_):
      del fake.hooks[fake.update_path]
      raise world.Status(500, 'out of memory')

    fake.hooks[fake.update_path] = fail_once
    with pytest.raises(errors.PublicationError, match='out of memory'):
      sampler.publish(world.make_parameters(1), 1)
    sampler.submit([request(1)])
    trajectory = sampler.next(world.WAIT_S)
    assert trajectory.status == types.Status.OK
    check(trajectory, params)


def test_a_server_that_goes_away_ends_the_service(fake, tmp_path):
  with serving(fake, tmp_path) as (server, sampler):
    sampler.publish(world.make_parameters(0), 0)
    fake.close()
    sampler.submit([request(1)])
    with pytest.raises(errors.SamplerLost, match='cannot be reached'):
      sampler.next(world.WAIT_S)
    assert 'EngineLost' in server.wait(world.WAIT_S)
    with grpc.insecure_channel(server.address) as channel:
      health = health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(), timeout=world.WAIT_S
      )
    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
