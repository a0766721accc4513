"""Which test fails for which wrong formula.

Every mutation is a mistake that trainers have shipped, made in a copy of the
project. `pytest -m slow tests/mutation_test.py -v` reads as the table.
"""

import os
import pathlib
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_COPIED = ('spopp_jax', 'tests', '.pytest.ini', 'setup.py')

pytestmark = pytest.mark.slow


class Mutation(NamedTuple):
  """A wrong formula and the test that must notice it.

  Attributes:
    mistake: in words.
    file: below spopp_jax.
    old: text that stands in the file once.
    new: what it becomes.
    test: below tests.
  """

  mistake: str
  file: str
  old: str
  new: str
  test: str


_MUTATIONS = [
  # Measures and baselines.
  Mutation(
    'variance with divisor n',
    'kernels/standardize.py',
    'jnp.where(measurable, total - 1, 1)',
    'jnp.where(measurable, total, 1)',
    'kernels/standardize_test.py::test_n02_action_token_measure_is_eq_6',
  ),
  Mutation(
    'epsilon inside the square root',
    'kernels/standardize.py',
    'deviation = jnp.sqrt(variance)',
    'deviation = jnp.sqrt(variance + _EPSILON)',
    'kernels/standardize_test.py::test_n04_epsilon_is_added_to_the_deviation',
  ),
  Mutation(
    'variance in one pass',
    'kernels/standardize.py',
    'weights * centred**2, axis_name=axis_name\n  )',
    'weights * advantages**2, axis_name=axis_name\n  ) / jnp.where('
    'measurable, total - 1, 1) - total * mean**2',
    'kernels/standardize_test.py::test_adv11_small_spread_survives_float32',
  ),
  Mutation(
    'rounding of equal advantages blown up',
    'kernels/standardize.py',
    'deviation > _DEGENERATE * jnp.maximum(1, largest)',
    'deviation > 0',
    'kernels/standardize_test.py::'
    'test_adv07_constant_advantages_give_exactly_zero',
  ),
  Mutation(
    'whitening over one device',
    'kernels/standardize.py',
    'total = reduction.global_sum(weights, axis_name=axis_name)',
    'total = reduction.global_sum(weights)',
    'kernels/standardize_test.py::test_statistics_run_over_the_mapped_axis',
  ),
  Mutation(
    'whitening over trajectories instead of tokens',
    'objectives/composition.py',
    "lengths if config.measure == 'action_token' else lengths > 0",
    'lengths > 0',
    'objectives/composition_test.py::'
    'test_token_measure_centres_what_the_loss_sees',
  ),
  Mutation(
    'population deviation in a group',
    'kernels/group_advantage.py',
    'variance = total(centred**2) / jnp.maximum(number - 1, 1)',
    'variance = total(centred**2) / jnp.maximum(number, 1)',
    'kernels/group_advantage_test.py::test_adv05_bound_and_sample_deviation',
  ),
  Mutation(
    'group by position',
    'kernels/groups.py',
    '  ids = jnp.minimum(ids, num_groups)\n',
    '  ids = jnp.arange(ids.shape[0]) // group_size\n',
    'kernels/groups_test.py::test_members_are_found_by_id',
  ),
  Mutation(
    'the unusable in the mean of their group',
    'kernels/group_advantage.py',
    'counted = usable & (group_ids >= 0)',
    'counted = (group_ids >= 0)',
    'kernels/group_advantage_test.py::test_incomplete_and_interleaved_groups',
  ),
  # Weights.
  Mutation(
    'exponential of a clamped sum',
    'kernels/importance.py',
    '  return segments.trajectory_sums(\n'
    '    log_ratios, mask, trajectory_ids, num_trajectories=num_trajectories\n'
    '  )',
    '  return jnp.clip(segments.trajectory_sums(\n'
    '    log_ratios, mask, trajectory_ids, num_trajectories=num_trajectories\n'
    '  ), -20, 20)',
    'kernels/importance_test.py::'
    'test_a_sequence_weight_is_not_the_exponential_of_a_clamped_sum',
  ),
  Mutation(
    'mean over padding',
    'kernels/importance.py',
    'return sums / jnp.maximum(lengths, 1)',
    'return sums / mask.shape[1]',
    'kernels/importance_test.py::'
    'test_geometric_mask_judges_trajectories_not_rows_nor_padding',
  ),
  Mutation(
    'window on the inverse ratio',
    'kernels/importance.py',
    'return (log_weights >= log_low) & (log_weights <= math.log(high))',
    'return (-log_weights >= log_low) & (-log_weights <= math.log(high))',
    'kernels/importance_test.py::'
    'test_i03_the_window_is_on_the_ratio_not_on_its_inverse',
  ),
  Mutation(
    'weight of the current instead of the proximal policy',
    'objectives/composition.py',
    'jnp.where(mask, weights.importance, 0))',
    'jnp.where(mask, jnp.minimum(2, jnp.exp(\n'
    '    logprobs - batch.behaviour_logprobs)), 0))',
    'objectives/composition_test.py::'
    'test_the_whole_recipe[spopp-action_token-2.0-token]',
  ),
  Mutation(
    'weight times a ratio already against the sampler',
    'objectives/weighting.py',
    "  if config.ratio_to == 'proximal':\n    return proximal_logprobs",
    "  if config.ratio_to == 'proximal':\n    return batch.behaviour_logprobs",
    'objectives/composition_test.py::'
    'test_the_whole_recipe[spopp-action_token-2.0-token]',
  ),
  Mutation(
    'ESS after truncation',
    'objectives/diagnosis.py',
    "('token', raw, ",
    "('token', jnp.log(weights.importance), ",
    'objectives/composition_test.py::'
    'test_the_whole_recipe[spopp-action_token-2.0-token]',
  ),
  Mutation(
    'midpoint instead of the feasible end',
    'kernels/target_ess.py',
    'low, _ = jax.lax.fori_loop(0, iterations, halve, start)',
    'low = sum(jax.lax.fori_loop(0, iterations, halve, start)) / 2',
    'kernels/target_ess_test.py::'
    'test_coarse_bisection_returns_the_feasible_end[3]',
  ),
  Mutation(
    'target of slots instead of members',
    'kernels/target_ess.py',
    'math.log(kappa) + jnp.log(jnp.maximum(number, 1))',
    'math.log(kappa * offsets.shape[0]) + 0 * number',
    'kernels/target_ess_test.py::test_target_counts_members_and_not_slots',
  ),
  Mutation(
    'cap instead of drop',
    'objectives/weighting.py',
    'variant=config.second_moment_variant',
    "variant='official_cap'",
    'objectives/weighting_test.py::'
    'test_the_second_moment_mask_is_of_the_whole_minibatch',
  ),
  Mutation(
    'second-moment mask of a row',
    'objectives/weighting.py',
    """    chosen = second_moment_mask.second_moment_mask(
      log_ratios,
      segments.to_tokens(advantages, batch.trajectory_ids),
      mask,
      threshold=config.second_moment_threshold,
      variant=config.second_moment_variant,
      axis_name=axis_name,
    )
    kept = chosen.kept
""",
    """    chosen = jax.vmap(
      lambda *rows: second_moment_mask.second_moment_mask(
        *(row[None] for row in rows),
        threshold=config.second_moment_threshold,
        variant=config.second_moment_variant,
      )
    )(log_ratios, segments.to_tokens(advantages, batch.trajectory_ids), mask)
    kept = chosen.kept[:, 0]
    chosen = jax.tree.map(jnp.mean, chosen)
""",
    'objectives/weighting_test.py::'
    'test_the_second_moment_mask_is_of_the_whole_minibatch',
  ),
  Mutation(
    'second-moment mask of a device',
    'objectives/weighting.py',
    'variant=config.second_moment_variant,\n      axis_name=axis_name,',
    'variant=config.second_moment_variant,',
    'objectives/partition_test.py::test_any_partition[m2po]',
  ),
  # Surrogates.
  Mutation(
    'sign of the loss',
    'kernels/surrogate.py',
    'loss = -advantages * ratio\n',
    'loss = advantages * ratio\n',
    'kernels/surrogate_test.py::test_ratio02_dual_clip',
  ),
  Mutation(
    'dual clip on both signs',
    'kernels/surrogate.py',
    'dual_clipped = (advantages < 0) & (loss > worst)',
    'dual_clipped = loss > worst',
    'kernels/surrogate_test.py::'
    'test_p02_the_cap_holds_for_negative_advantages_alone',
  ),
  Mutation(
    'clip fraction without the sign',
    'kernels/surrogate.py',
    'clipped=above | below',
    'clipped=(judged > 1 + clip_high) | (judged < 1 - clip_low)',
    'kernels/surrogate_test.py::test_clip_fraction_follows_the_sign',
  ),
  Mutation(
    'masked NaN times zero',
    'kernels/importance.py',
    'return numerator - denominator',
    'return (numerator_logprobs - denominator_logprobs) * mask.astype(float)',
    'kernels/surrogate_test.py::'
    'test_adv04_masked_nan_leaves_the_gradient_alone',
  ),
  Mutation(
    'gradient through the weight',
    'kernels/importance.py',
    '  return jax.lax.stop_gradient(\n    jnp.where(\n      log_weights >',
    '  return (\n    jnp.where(\n      log_weights >',
    'kernels/importance_test.py::test_weights_are_detached',
  ),
  Mutation(
    'temperature on one side',
    'kernels/token_logprobs.py',
    'logits = logits / head.temperature',
    'logits = logits / 1.0',
    'kernels/token_logprobs_kept_test.py::'
    'test_same_weights_same_token_under_temperature',
  ),
  # Sums.
  Mutation(
    'token mean of a microbatch',
    'kernels/aggregate.py',
    'return numerator, jnp.sum(mask, dtype=jnp.float32)',
    'return numerator / jnp.sum(mask), jnp.float32(1)',
    'kernels/aggregate_test.py::test_g03_sums_of_parts_are_the_whole',
  ),
  Mutation(
    'token mean over padding',
    'kernels/aggregate.py',
    'means = sums / jnp.maximum(lengths, 1)',
    'means = sums / values.shape[1]',
    'kernels/aggregate_test.py::test_g01_means_over_trajectories',
  ),
  Mutation(
    'denominator that changes after rejection',
    'objectives/weighting.py',
    "counted = kept if config.denominator == 'kept' else mask",
    'counted = kept',
    'objectives/weighting_test.py::'
    'test_rejected_tokens_stay_in_the_denominator_unless_told',
  ),
  Mutation(
    'observation tokens in the loss',
    'objectives/weighting.py',
    '    batch.action_mask, batch.trajectory_ids, members(config, batch)',
    '    batch.segment_ids > 0, batch.trajectory_ids, members(config, batch)',
    'objectives/conformance_test.py::test_observations_carry_no_gradient[spopp]',
  ),
  Mutation(
    'pass@k with replacement',
    'evaluation/passk.py',
    'return 1 - failing / math.comb(num_samples, k)',
    'return 1 - (1 - num_correct / num_samples) ** k + 0 * failing',
    'evaluation/passk_test.py::test_golden',
  ),
  # Ids.
  Mutation(
    'a cut turn left without its end',
    'models/chat_template.py',
    'end_sampled = len(turn) > 0 and int(turn[-1]) in self._ends',
    'end_sampled = len(turn) >= 0',
    'models/chat_template_test.py::'
    'test_what_follows_depends_on_how_the_turn_ended',
  ),
  Mutation(
    'one user turn for each tool result',
    'models/chat_formats.py',
    "if i + 1 < len(messages) and messages[i + 1].role == 'tool':",
    'if i < 0:',
    'models/chat_template_test.py::'
    'test_tok03_ids_are_those_of_the_whole_conversation',
  ),
  Mutation(
    'special tokens made from the text of an environment',
    'models/tokenizer.py',
    'text, add_special_tokens=False, split_special_tokens=True',
    'text, add_special_tokens=False',
    'models/chat_template_test.py::'
    'test_text_that_spells_a_special_token_ends_nothing',
  ),
  Mutation(
    'a prompt compared with the last prompt alone',
    'sampler/recorded_calls.py',
    'earlier = np.concatenate([call.prompt, call.tokens])',
    'earlier = call.prompt',
    'sampler/recorded_calls_test.py::'
    'test_tok02_a_prompt_that_departs_starts_a_row',
  ),
]


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  """A copy of the project to be changed."""
  root = tmp_path_factory.mktemp('mutated')
  for name in _COPIED:
    source = _ROOT / name
    if source.is_dir():
      shutil.copytree(
        source, root / name, ignore=shutil.ignore_patterns('__pycache__')
      )
    else:
      shutil.copy(source, root / name)
  return root


def _run(project, *tests):
  return subprocess.run(
    [
      *(sys.executable, '-m', 'pytest', '-q', '--tb=native'),
      *('-p', 'no:cacheprovider', '-c', '.pytest.ini'),
      *(f'tests/{test}' for test in tests),
    ],
    cwd=project,
    env={
      **os.environ,
      'PYTHONPATH': str(project),
      'PYTHONDONTWRITEBYTECODE': '1',
      'JAX_PLATFORMS': 'cpu',
    },
    capture_output=True,
    text=True,
    timeout=110,
    check=False,
  )


def test_all_pass_unchanged(project):
  finished = _run(project, *sorted({m.test for m in _MUTATIONS}))
  assert finished.returncode == 0, finished.stdout


@pytest.mark.parametrize(
  'mutation', _MUTATIONS, ids=[f'{m.mistake} -> {m.test}' for m in _MUTATIONS]
)
def test_is_noticed(project, mutation):
  file = project / 'spopp_jax' / mutation.file
  text = file.read_text('utf-8')
  assert text.count(mutation.old) == 1, f'{mutation.file}: {mutation.old}'
  file.write_text(text.replace(mutation.old, mutation.new), 'utf-8')
  try:
    finished = _run(project, mutation.test)
  finally:
    file.write_text(text, 'utf-8')
  assert finished.returncode == 1, finished.stdout
  assert '\nAssertionError' in finished.stdout, finished.stdout
