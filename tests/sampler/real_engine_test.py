"""The decoder and the household games behind the real service."""

import contextlib
import dataclasses

import engine_world
import messages
import numpy as np
import pytest

from spopp_jax import types
from spopp_jax.envs import household
from spopp_jax.models import dense, parameters, word_tokenizer
from spopp_jax.sampler import (
  base,
  client,
  engine,
  handshake,
  in_process,
  rollout,
  service,
)

CONTEXT = 256
SAMPLING = types.SamplingParams(max_turn_tokens=4, max_turns=3)
GRID = [
  dataclasses.replace(SAMPLING, temperature=temperature, top_p=top_p, top_k=k)
  for temperature in (0.6, 1.0, 1.5)
  for top_p in (1.0, 0.95, 0.5)
  for k in (20, 3, 0)
]


@pytest.fixture(scope='module')
def world():
  """Returns the sizes of a small decoder, tasks, and both joined."""
  tasks = household.load_tasks(num_tasks=3, seed=1, size='small')
  words = word_tokenizer.WordTokenizer.build(
    [tasks.make(name).reset() for name in tasks.task_ids]
    + ['Nothing happens. go to take from look inventory']
  )
  config = dense.DecoderConfig(
    vocab_size=words.vocab_size,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=32,
  )
  # One compiled shape, so that company does not change a slot's rounding.
  decoder = engine.DecodeEngine(
    config,
    num_slots=2,
    max_context=CONTEXT,
    max_turn_tokens=SAMPLING.max_turn_tokens,
    stop_ids=words.stop_ids,
    feed_buckets=(64,),
    shortest_piece=CONTEXT,
  )
  return config, rollout.RolloutDriver(decoder, tasks, words)


def random_parameters(config):
  draw = np.random.default_rng(3)
  return {
    name: draw.normal(0.0, 0.3, value.shape).astype(np.float32)
    for name, value in parameters.graph(config)[1].items()
  }


@contextlib.contextmanager
def connected(config, driver):
  """Serves the driver and connects a client over a real channel."""
  server = service.serve(
    driver, model_fingerprint=parameters.fingerprint(config)
  )
  sampler = client.SamplerClient(
    server.address,
    handshake.Expectation(
      tokenizer_fingerprint=driver.template.fingerprint,
      model_fingerprint=parameters.fingerprint(config),
      tasks_fingerprint=rollout.tasks_fingerprint(driver.tasks.task_ids),
      max_context_tokens=CONTEXT,
      vocab_size=config.vocab_size,
    ),
  )
  try:
    yield sampler
  finally:
    sampler.close()
    server.stop()


def ask(sampler, params, version, requests):
  """Returns the snapshot's checksum and the answers by id."""
  checksum = sampler.publish(params, version)
  sampler.submit(requests)
  answers = [sampler.next(60.0) for _ in requests]
  return checksum, {answer.request_id: answer for answer in answers}


def test_the_network_changes_no_bit(world):
  config, driver = world
  params = random_parameters(config)
  requests = [
    base.Request(f'r{n}', task_id, 2, 100 + n, SAMPLING)
    for n, task_id in enumerate([*driver.tasks.task_ids] * 2)
  ]
  local = in_process.InProcessSampler(driver)
  checksum, expected = ask(local, params, 2, requests)
  driver.forget()
  with connected(config, driver) as sampler:
    theirs, answers = ask(sampler, params, 2, requests)
  assert theirs == checksum
  assert answers.keys() == expected.keys()
  for request in requests:
    answer = answers[request.request_id]
    assert answer.status == types.Status.OK, answer.detail
    assert (answer.policy_version, answer.weights_checksum) == (2, checksum)
    assert answer.num_turns == 3
    assert answer.num_actions == answer.action_mask.sum() > 0
    assert (answer.behaviour_logprobs[answer.action_mask] < 0).all()
    messages.assert_same(expected[request.request_id], answer, but=('seconds',))
  # The seed tells two episodes of one task apart.
  assert not np.array_equal(answers['r0'].tokens, answers['r3'].tokens)


def test_same_weights_and_token_have_the_same_logprob(world):
  """R1, over a channel: the ratio is 1 once both sides divide by pi(S)."""
  config, driver = world
  driver.forget()
  params = random_parameters(config)
  requests = [
    base.Request(f'r{n}', driver.tasks.task_ids[n % 3], 0, n, sampling)
    for n, sampling in enumerate(GRID)
  ]
  with connected(config, driver) as sampler:
    _, answers = ask(sampler, params, 0, requests)
  everything = np.arange(config.vocab_size)
  for request in requests:
    answer, sampling = answers[request.request_id], request.sampling
    assert answer.status == types.Status.OK, answer.detail
    assert answer.sampling == sampling
    assert answer.logprob_kind == types.LogprobKind.PROCESSED
    assert (answer.kept is not None) == sampling.truncated
    logits = engine_world.action_logits(config, params, answer, CONTEXT)
    sets = [everything] * answer.num_actions
    if sampling.truncated:
      sets = np.split(answer.kept.ids, answer.kept.offsets[1:-1])
    tokens = answer.tokens[answer.action_mask]
    exact, proxy = (
      [
        engine_world.renormalised(row, token, kept, sampling.temperature)
        for row, token, kept in zip(logits, tokens, over, strict=True)
      ]
      for over in (sets, [everything] * len(sets))
    )
    got = answer.behaviour_logprobs[answer.action_mask]
    np.testing.assert_allclose(got, exact, atol=1e-5, err_msg=str(sampling))
    if sampling.truncated:
      assert np.mean(got - proxy) > 0.01
