"""The driver: one mask, appended ids only, and how episodes end."""

import dataclasses
import math

import messages
import numpy as np
import pytest
import scripted

from spopp_jax import types
from spopp_jax.sampler import base, rollout

OK = types.Status.OK


class CannedEngine(scripted.Engine):
  """Says what it is told to, turn by turn."""

  def __init__(self, turns, **kwargs):
    super().__init__(**kwargs)
    self._turns = iter(turns)

  def step(self):
    (slot,) = self._slots
    tokens, logprobs, *sets = next(self._turns)
    self._slots[slot][2].extend(tokens)
    return [
      base.Turn(
        slot,
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        tokens[-1:] == [scripted.END],
        messages.csr(*sets) if sets else None,
      )
    ]


def make_driver(engine=None, tasks=None, **kwargs):
  engine = scripted.load(engine or scripted.Engine())
  return rollout.RolloutDriver(
    engine, tasks or scripted.Tasks(), scripted.Template(), **kwargs
  )


def run(driver, *requests, most_steps=100):
  for request in requests:
    driver.submit(request)
  finished = []
  for _ in range(most_steps):
    finished.extend(driver.step())
    if driver.is_idle:
      return finished
  raise AssertionError(f'still busy after {most_steps} steps')


def canned(task_id, turns, sampling=scripted.SAMPLING):
  """Plays turns of tokens, log-probs and, where sampling cuts, kept sets."""
  engine = CannedEngine(turns, num_slots=1)
  tasks = scripted.Tasks()
  driver = make_driver(engine, tasks)
  (result,) = run(driver, scripted.request(1, task_id, sampling=sampling))
  return result, tasks, engine


def test_tok05_template_tokens_are_not_actions(cases):
  case = cases['TOK-05']
  sampled = case['input']['sampled']
  result, _, _ = canned(
    'win-2', [(sampled, [-1.0] * len(sampled)), ([22], [-0.5])]
  )
  expected = case['expected']
  assert result.tokens.tolist() == [*expected['ids'], 22]
  assert result.action_mask.tolist() == [*expected['action_mask'], 1]
  assert result.num_actions == expected['L'] + 1


def test_the_template_is_shown_the_turn_it_follows():
  class Watching(scripted.Template):
    turns = []  # noqa: RUF012

    def observation(self, observation, turn):
      self.turns.append(turn.tolist())
      return super().observation(observation, turn)

  engine = CannedEngine(
    [([20, 21, 22, 23], [-1.0] * 4), ([24, 99], [-1.0] * 2), ([99], [-1.0])],
    num_slots=1,
  )
  driver = rollout.RolloutDriver(
    scripted.load(engine), scripted.Tasks(), Watching()
  )
  run(driver, scripted.request(1, 'win-3'))
  assert Watching.turns == [[20, 21, 22, 23], [24, 99]]


def test_what_is_appended_has_no_logprob():
  result, _, _ = canned(
    'win-2', [([20, 21, 99], [-1.0, -2.0, -3.0]), ([22], [-0.5])]
  )
  assert result.tokens.tolist() == [10, 11, 20, 21, 99, 198, 30, 31, 22]
  assert result.action_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1]
  assert result.behaviour_logprobs.tolist() == [0, 0, -1, -2, -3, 0, 0, 0, -0.5]
  assert result.num_actions == 4
  assert result.num_turns == 2
  assert (result.status, result.reward, result.detail) == (OK, 1.0, '')


def test_environment_gets_the_command_without_its_end_token():
  _, tasks, _ = canned('win-1', [([20, 21, 99], [-1.0, -1.0, -1.0])])
  assert tasks.made[0].actions == ['w20 w21']


def test_a_turn_cut_at_its_limit_is_played_and_goes_on():
  result, tasks, _ = canned(
    'win-2', [([20, 21, 22, 23], [-1.0] * 4), ([24, 99], [-1.0] * 2)]
  )
  assert tasks.made[0].actions == ['w20 w21 w22 w23', 'w24']
  assert (result.status, result.num_turns) == (OK, 2)


def test_tokens_are_what_the_engine_holds():
  engine = scripted.Engine(num_slots=3)
  driver = make_driver(engine)
  requests = [
    scripted.request(n, task_id)
    for n, task_id in enumerate(scripted.TASK_IDS[:11])
  ]
  finished = run(driver, *requests)
  assert [r.tokens.tolist() for r in finished] == engine.histories
  for result in finished:
    seed = int(result.request_id[1:])
    assert result.tokens.dtype == np.int32
    assert result.behaviour_logprobs.dtype == np.float32
    positions = np.flatnonzero(result.action_mask)
    expected = -0.125 * (1 + (seed + positions) % 9)
    np.testing.assert_array_equal(
      result.behaviour_logprobs[positions], expected
    )
    assert not result.behaviour_logprobs[~result.action_mask].any()


def test_win_and_loss_have_rewards_one_and_zero():
  finished = run(
    make_driver(), scripted.request(1, 'win-3'), scripted.request(2, 'lose-3')
  )
  outcomes = {r.request_id: (r.status, r.reward) for r in finished}
  assert outcomes == {'r1': (OK, 1.0), 'r2': (OK, 0.0)}


def test_step_limit_is_a_failure_not_an_error():
  (result,) = run(make_driver(), scripted.request(1, 'endless'))
  assert (result.status, result.reward) == (OK, 0.0)
  assert result.num_turns == scripted.SAMPLING.max_turns == 6


def test_observation_that_leaves_no_room_for_a_turn_ends_by_context_limit():
  # ENV-06: 95 + 16 > 100 is found before the engine is asked.
  (result,) = run(make_driver(), scripted.request(1, 'wordy'))
  assert result.status == types.Status.CONTEXT_LIMIT
  assert math.isnan(result.reward)
  assert '96 tokens' in result.detail
  # A turn was played, so it was not the prompt that did not fit.
  assert result.num_turns == 1
  assert result.num_actions == len(result.tokens) - 2 > 0


@pytest.mark.parametrize('room, status', [(8, OK), (7, 'CONTEXT_LIMIT')])
def test_context_limit_is_exact(room, status):
  # After prompt and turn (3 ids) come 3 observation ids and 4 of a turn.
  engine = CannedEngine(
    [([99], [-1.0]), ([20, 21, 22, 99], [-1.0] * 4)],
    num_slots=1,
    max_context=2 + room,
  )
  (result,) = run(make_driver(engine), scripted.request(1, 'win-2'))
  assert result.status == (OK if status == OK else types.Status[status])
  assert len(result.tokens) <= engine.max_context


def test_prompt_that_does_not_fit_never_takes_a_slot():
  engine = scripted.Engine(max_context=5)
  (result,) = run(make_driver(engine), scripted.request(1))
  assert result.status == types.Status.CONTEXT_LIMIT
  assert engine.histories == []
  assert len(result.tokens) == 0


@pytest.mark.parametrize('where', ['crash-at-reset', 'crash-at-step'])
def test_environment_exception_is_env_error_without_reward(where):
  # ENV-04: an exception of the environment is not a failure of the policy.
  driver = make_driver()
  failed, won = sorted(
    run(driver, scripted.request(1, where), scripted.request(2, 'win-1')),
    key=lambda result: result.request_id,
  )
  assert failed.status == types.Status.ENV_ERROR
  assert math.isnan(failed.reward)
  assert 'IndexError: Cannot choose from an empty sequence' in failed.detail
  assert (won.status, won.reward) == (OK, 1.0)


def test_environment_that_never_answers_is_given_up():
  tasks = scripted.Tasks()
  driver = make_driver(tasks=tasks, env_timeout_s=0.05)
  finished = run(
    driver, scripted.request(1, 'stuck'), scripted.request(2, 'win-2')
  )
  tasks.release.set()
  stuck, won = sorted(finished, key=lambda result: result.request_id)
  assert stuck.status == types.Status.ENV_ERROR
  assert 'no answer within 0.05 s' in stuck.detail
  assert won.status == OK


def test_unknown_task_is_invalid_and_named():
  (result,) = run(make_driver(), scripted.request(1, 'no-such-task'))
  assert result.status == types.Status.INVALID
  assert "'no-such-task'" in result.detail


def test_parameters_that_the_engine_refuses_are_invalid():
  class Strict(scripted.Engine):
    def open(self, slot, *, seed, sampling):
      raise ValueError('top_k (-5) must be at least 0')

  (result,) = run(make_driver(Strict()), scripted.request(1))
  assert result.status == types.Status.INVALID
  assert result.detail == 'top_k (-5) must be at least 0'


@pytest.mark.parametrize('version', [-1, 1, 7])
def test_only_the_active_version_generates(version):
  (result,) = run(make_driver(), scripted.request(1, version=version))
  assert result.status == types.Status.STALE
  assert result.policy_version == 0
  assert f'version {version}' in result.detail


def test_episode_that_spans_two_versions_is_refused():
  # ASYNC-12: it fits no single policy.
  driver = make_driver(scripted.Engine(num_slots=1))
  driver.submit(scripted.request(1, 'win-3'))
  driver.step()
  driver.engine.policy_version = 1
  (result,) = driver.step()
  assert result.status == types.Status.MIXED_VERSIONS
  assert math.isnan(result.reward)
  assert result.policy_version == 0


def crossing(number, task_id, version=0):
  return dataclasses.replace(
    scripted.request(number, task_id, version=version), crosses_versions=True
  )


def load(driver, version):
  driver.load(scripted.params(1.0), version=version, checksum=f'c{version}')


def test_an_episode_may_cross_versions_and_says_which_made_each_token():
  # ASYNC-12, interruptible: per-token versions are kept.
  driver = make_driver()
  driver.submit(crossing(1, 'win-3'))
  assert driver.step() == []
  load(driver, 4)
  assert driver.step() == []
  (result,) = driver.step()
  assert result.status == types.Status.OK
  lengths = [len(x) for x in split_actions(result)]
  assert len(lengths) == 3
  assert result.spans == (
    types.VersionSpan(0, result.weights_checksum, lengths[0]),
    types.VersionSpan(4, 'c4', sum(lengths[1:])),
  )
  assert result.policy_version == 0
  expected = np.repeat([0, 4, 4], lengths)
  np.testing.assert_array_equal(
    result.token_versions[result.action_mask], expected
  )
  assert set(result.token_versions[~result.action_mask]) == {-1}


def split_actions(trajectory):
  """Returns the runs of action tokens."""
  mask = np.concatenate([[False], trajectory.action_mask])
  starts = np.flatnonzero(mask[1:] & ~mask[:-1])
  runs = np.split(trajectory.tokens, starts)[1:]
  masks = np.split(trajectory.action_mask, starts)[1:]
  return [run[inside] for run, inside in zip(runs, masks, strict=True)]


def test_a_version_that_generated_nothing_leaves_no_span():
  driver = make_driver(scripted.Engine(num_slots=1))
  driver.submit(crossing(1, 'win-1'))
  driver.submit(crossing(2, 'win-1'))
  driver._fill_slots()
  load(driver, 4)
  (first,) = driver.step()
  (second,) = driver.step()  # it waited for the slot: opened by version 4
  for result in (first, second):
    assert (result.policy_version, result.weights_checksum) == (4, 'c4')
    assert result.spans == ()
    assert set(result.token_versions[result.action_mask]) == {4}


def test_a_later_request_is_not_generated_by_an_earlier_version():
  (result,) = run(make_driver(), crossing(1, 'win-1', version=3))
  assert result.status == types.Status.STALE


@pytest.mark.parametrize(
  'turn, problem',
  [
    (([], []), 'without a token'),
    (([20, 99], [-1.0]), '1 log-probs for 2 tokens'),
    (([20, 99], [-1.0, math.nan]), 'nan at action 1'),
    (([20, 99], [0.5, -1.0]), '0.5 at action 0'),
  ],
)
def test_engine_that_breaks_its_contract_is_sampler_error(turn, problem):
  result, tasks, _ = canned('win-1', [turn])
  assert result.status == types.Status.SAMPLER_ERROR
  assert problem in result.detail
  assert result.num_actions == 0
  assert tasks.made[0].actions == []


TRUNCATED = dataclasses.replace(scripted.SAMPLING, top_k=3)


def test_kept_sets_are_those_of_the_action_tokens_in_order():
  result, _, _ = canned(
    'win-2',
    [
      ([20, 99], [-1.0, -2.0], [20, 7], [98, 99, 8]),
      ([22], [-0.5], [22]),
    ],
    TRUNCATED,
  )
  assert result.status == OK
  assert result.logprob_kind == types.LogprobKind.PROCESSED
  messages.assert_same(messages.csr([20, 7], [98, 99, 8], [22]), result.kept)
  assert len(result.kept.offsets) == result.num_actions + 1


@pytest.mark.parametrize(
  'task_id, status',
  [('wordy', 'CONTEXT_LIMIT'), ('crash-at-step', 'ENV_ERROR')],
)
def test_an_episode_cut_short_keeps_the_sets_of_what_it_has(task_id, status):
  result, _, _ = canned(
    task_id, [([20, 99], [-1.0, -2.0], [20, 7], [99])], TRUNCATED
  )
  assert result.status == types.Status[status]
  assert result.num_actions == 2
  messages.assert_same(messages.csr([20, 7], [99]), result.kept)


def test_without_truncation_nothing_is_kept():
  turns = [([20, 99], [-1.0, -2.0])]
  result, _, _ = canned('win-1', turns)
  assert result.kept is None
  assert result.logprob_kind == types.LogprobKind.PROCESSED
  # An engine that cannot tell is heard all the same.
  result, _, _ = canned('win-1', turns, TRUNCATED)
  assert (result.status, result.kept) == (OK, None)


@pytest.mark.parametrize(
  'sampling, turns, problem',
  [
    (
      scripted.SAMPLING,
      [([20], [-1.0], [20])],
      'kept sets though sampling is not truncated',
    ),
    (
      TRUNCATED,
      [([20], [-1.0], [20]), ([21], [-1.0])],
      'no kept sets but did before',
    ),
    (
      TRUNCATED,
      [([20], [-1.0]), ([21], [-1.0], [21])],
      'kept sets but did not before',
    ),
    (
      TRUNCATED,
      [([20, 21], [-1.0, -1.0], [20], [20, 22])],
      'lacks 21, the token drawn at action 1',
    ),
    (TRUNCATED, [([20, 21], [-1.0, -1.0], [20])], '2 offsets for 2 action'),
    (TRUNCATED, [([20], [-1.0], [20, 20])], '20 twice'),
  ],
)
def test_sets_that_break_the_contract_are_sampler_error(
  sampling, turns, problem
):
  result, _, _ = canned('win-3', turns, sampling)
  assert result.status == types.Status.SAMPLER_ERROR
  assert problem in result.detail
  assert result.num_actions == len(turns) - 1


def test_cancelled_requests_do_not_finish_and_free_their_slot():
  driver = make_driver(scripted.Engine(num_slots=1))
  for number, task_id in ((1, 'endless'), (2, 'endless'), (3, 'win-1')):
    driver.submit(scripted.request(number, task_id))
  driver.step()
  driver.cancel('r1')
  driver.cancel('r2')
  assert driver.num_open == 0
  finished = driver.step()
  assert [result.request_id for result in finished] == ['r3']
  assert driver.is_idle


def test_completion_order_and_slots_are_first_come_first_served():
  driver = make_driver(scripted.Engine(num_slots=2))
  finished = run(
    driver,
    scripted.request(1, 'win-4'),
    scripted.request(2, 'win-1'),
    scripted.request(3, 'win-2'),
  )
  # r1 runs 4 turns; r2 ends first, then r3 takes its slot for 2.
  assert [result.request_id for result in finished] == ['r2', 'r3', 'r1']


def test_tasks_fingerprint_depends_on_order_and_ids():
  ids = ['a', 'b']
  assert rollout.tasks_fingerprint(ids) == rollout.tasks_fingerprint(('a', 'b'))
  assert rollout.tasks_fingerprint(['b', 'a']) != rollout.tasks_fingerprint(ids)
