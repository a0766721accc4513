import dataclasses

import numpy as np
import pytest

from spopp_jax import types
from spopp_jax.learner import logprob_contract, packing

PROCESSED, RAW = types.LogprobKind.PROCESSED, types.LogprobKind.RAW
KEPT = types.KeptIds(np.array([2, 5], np.int32), np.array([0, 2]))


def trajectory(*, kind=PROCESSED, kept=None, **sampling):
  return types.Trajectory(
    request_id='r7',
    task_id='t',
    status=types.Status.OK,
    reward=1.0,
    policy_version=0,
    weights_checksum='',
    tokens=np.array([1, 2], np.int32),
    action_mask=np.array([False, True]),
    behaviour_logprobs=np.array([0, -0.5], np.float32),
    num_turns=1,
    sampling=types.SamplingParams(**sampling),
    logprob_kind=kind,
    kept=kept,
  )


def check(given, *, allow=False, temperature=1.0):
  logprob_contract.check(
    [given], temperature=temperature, allow_proxy_ratio=allow
  )


@pytest.mark.parametrize('kind', [PROCESSED, RAW])
@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_whole_vocabulary_is_exact_at_the_same_temperature(kind, temperature):
  given = trajectory(kind=kind, temperature=temperature)
  check(given, temperature=temperature)
  assert logprob_contract.is_exact(given)


def test_temp01_one_side_at_another_temperature_is_refused(cases):
  sampled_at = cases['TEMP-01']['input']['temperature']
  with pytest.raises(
    logprob_contract.LogprobContractError,
    match=rf'r7 was sampled at temperature {sampled_at}, the learner .* 1.0',
  ):
    check(trajectory(temperature=sampled_at), allow=True)


@pytest.mark.parametrize('sampling', [{'top_p': 0.9}, {'top_k': 3}])
def test_kept_ids_make_truncated_decoding_exact(sampling):
  given = trajectory(kept=KEPT, **sampling)
  check(given)
  assert logprob_contract.is_exact(given)


@pytest.mark.parametrize('kept', [None, KEPT])
def test_a_proxy_needs_the_switch(kept):
  given = trajectory(kind=RAW, kept=kept, top_p=0.9)
  assert not logprob_contract.is_exact(given)
  check(given, allow=True)
  with pytest.raises(
    logprob_contract.LogprobContractError, match=r'learner\.allow_proxy_ratio'
  ):
    check(given)


@pytest.mark.parametrize('allow', [True, False])
def test_processed_without_kept_ids_is_not_even_a_proxy(allow):
  given = trajectory(top_k=3)
  assert not logprob_contract.is_exact(given)
  with pytest.raises(
    logprob_contract.LogprobContractError, match='sampler must send kept ids'
  ):
    check(given, allow=allow)


def test_the_learner_renormalises_only_what_the_sampler_did():
  def width(given):
    return packing.pack(
      [given],
      [0.0],
      num_slots=1,
      minibatches=1,
      row_length=2,
      row_buckets=(1,),
    ).kept_ids.shape[-1]

  exact = trajectory(kept=KEPT, top_p=0.9)
  assert width(exact) == 2
  assert width(dataclasses.replace(exact, logprob_kind=RAW)) == 0
