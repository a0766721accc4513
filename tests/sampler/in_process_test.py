"""The sampler without a network keeps the same promises."""

import numpy as np
import pytest
import scripted

from spopp_jax import types
from spopp_jax.sampler import errors, in_process, rollout, weights


@pytest.fixture
def engine():
  return scripted.Engine(num_slots=2)


@pytest.fixture
def sampler(engine):
  driver = rollout.RolloutDriver(engine, scripted.Tasks(), scripted.Template())
  sampler = in_process.InProcessSampler(driver)
  sampler.publish(scripted.params(0.5), 0)
  return sampler


def test_completion_order(sampler):
  sampler.submit([scripted.request(1, 'win-4'), scripted.request(2, 'win-1')])
  assert [sampler.next(1.0).request_id for _ in range(2)] == ['r2', 'r1']


def test_known_requests_run_once(sampler):
  sampler.submit([scripted.request(1), scripted.request(1)])
  sampler.submit([scripted.request(1)])
  assert sampler.next(1.0).request_id == 'r1'
  with pytest.raises(errors.SamplerTimeout, match='nothing is outstanding'):
    sampler.next(1.0)


def test_publication_drains_and_keeps_what_finished(sampler, engine):
  sampler.submit([scripted.request(1, 'win-3'), scripted.request(2, 'win-5')])
  checksum = sampler.publish(scripted.params(1.0), 1)
  assert checksum == weights.checksum(weights.to_bytes(scripted.params(1.0)))
  assert engine.loaded[-1] == (1, [1.0, -1.0])
  old = [sampler.next(1.0) for _ in range(2)]
  assert {r.policy_version for r in old} == {0}
  sampler.submit([scripted.request(3, version=1)])
  new = sampler.next(1.0)
  assert (new.policy_version, new.weights_checksum) == (1, checksum)


def test_same_snapshot_again_is_not_loaded_again(sampler, engine):
  sampler.publish(scripted.params(0.5), 0)
  assert len(engine.loaded) == 1


def test_a_new_sampler_begins_anew_on_the_driver_of_an_old_one(engine):
  driver = rollout.RolloutDriver(engine, scripted.Tasks(), scripted.Template())
  old = in_process.InProcessSampler(driver)
  old.publish(scripted.params(0.5), 7)
  old.submit([scripted.request(n, 'endless', version=7) for n in range(3)])
  with pytest.raises(errors.SamplerTimeout):
    old.next(0.0)
  new = in_process.InProcessSampler(driver)
  new.submit([scripted.request(0, 'win-1', version=7)])
  assert new.next(1.0).status == types.Status.STALE
  checksum = new.publish(scripted.params(0.5), 3)
  new.submit([scripted.request(0, 'win-1', version=3)])
  result = new.next(1.0)
  assert (result.policy_version, result.weights_checksum) == (3, checksum)


@pytest.mark.parametrize('version', [0, -1])
def test_version_must_increase(sampler, version):
  with pytest.raises(errors.PublicationError, match='must exceed the active'):
    sampler.publish(scripted.params(2.0), version)


def test_refused_parameters_leave_the_old_version(sampler, engine):
  with pytest.raises(errors.PublicationError, match='refused version 1'):
    sampler.publish({'w': np.zeros(3, np.float32)}, 1)
  assert engine.policy_version == 0


def test_nothing_in_time_names_what_is_waited_for(sampler):
  sampler.submit([scripted.request(7, 'endless')])
  with pytest.raises(errors.SamplerTimeout, match=r"\['r7'\]"):
    sampler.next(-1.0)


def test_close_frees_the_slots(sampler, engine):
  sampler.submit([scripted.request(n, 'endless') for n in range(3)])
  with pytest.raises(errors.SamplerTimeout):
    sampler.next(0.0)
  sampler.close()
  sampler.submit([scripted.request(9, 'win-1')])
  result = sampler.next(1.0)
  assert (result.request_id, result.status) == ('r9', types.Status.OK)
