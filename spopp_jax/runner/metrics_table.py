"""What every number in metrics.jsonl means."""

from typing import NamedTuple

from spopp_jax import types


class Metric(NamedTuple):
  """What a number means.

  Attributes:
    meaning: one sentence.
    unit: of the number; '1' for counts, fractions and ratios.
    healthy: the values of a run that goes well.
  """

  meaning: str
  unit: str
  healthy: str


def _weights(level: str) -> dict[str, Metric]:
  of = f'{level} importance weights before truncation'
  return {
    f'weight_{level}_mean': Metric(f'mean of {of}', '1', 'near 1'),
    f'weight_{level}_max': Metric(f'largest of {of}', '1', 'below 100'),
    f'weight_{level}_ess_fraction': Metric(
      f'effective sample size of {of} over their number', '1', 'above 0.5'
    ),
    f'weight_{level}_chi2': Metric(
      f'mean square of {of}, less 1', '1', '0 to 1'
    ),
    f'weight_{level}_used_mean': Metric(
      f'mean of the {level} weights that the loss uses, rejected ones as 0',
      '1',
      '0.8 to 1.2',
    ),
    f'weight_{level}_used_ess_fraction': Metric(
      f'effective sample size of the {level} weights that the loss uses over '
      'their number',
      '1',
      'above the one before',
    ),
  }


METRICS: dict[str, Metric] = {
  # What the policy earns.
  'reward_collected': Metric(
    'mean reward of the trained batch; flattered where the first finished '
    'are kept, since successes are short',
    '1',
    'rises to 1',
  ),
  'reward_dispatched': Metric(
    'mean reward of everything dispatched, late arrivals included: unbiased',
    '1',
    'rises to 1',
  ),
  'value_mean': Metric(
    'mean of the baselines v-hat frozen at dispatch', '1', 'follows the reward'
  ),
  # What was collected.
  'trajectories': Metric('trajectories trained on', '1', 'the batch size'),
  'late_trajectories': Metric(
    'trajectories that finished after the batch was full', '1', 'below 25%'
  ),
  'action_tokens': Metric('action tokens trained on', 'tokens', 'steady'),
  'action_tokens_mean': Metric(
    'action tokens a trajectory', 'tokens', 'falls as games are won sooner'
  ),
  'turns_mean': Metric(
    'environment interactions a trajectory', '1', 'below the step limit'
  ),
  'lag_events': Metric(
    'mean policy updates between the snapshot that generated the batch and '
    'the parameters that train on it',
    '1',
    'at most dispatch.max_lag',
  ),
  'lag_events_max': Metric(
    'the most policy updates that a rollout of the batch was old',
    '1',
    'at most dispatch.max_lag',
  ),
  'length_bias': Metric(
    'mean action tokens of all rollouts trained so far over the mean of all '
    'received, less 1; below 0 where long ones are trained less',
    '1',
    '-0.1 to 0.1',
  ),
  'in_flight': Metric('requests in flight after the step', '1', 'steady'),
  'held': Metric(
    'rollouts that have finished and wait for a later step', '1', 'bounded'
  ),
  **{
    f'status/{status.name.lower()}': Metric(
      f'requests so far that ended as {status.name}',
      '1',
      'rises' if status is types.Status.OK else '0 or rare',
    )
    for status in types.Status
  },
  # The update.
  'loss': Metric(
    'policy loss, aggregated as the objective says',
    '1',
    'near 0; no trend expected',
  ),
  'grad_norm': Metric(
    'global gradient norm before clipping, mean of the minibatches',
    '1',
    'steady',
  ),
  'ratio': Metric('mean current-to-proximal ratio', '1', '0.9 to 1.1'),
  'clip_fraction': Metric(
    'tokens whose gradient the clip stops', '1', 'below 0.2'
  ),
  'dual_clip_fraction': Metric(
    'tokens whose gradient the dual clip stops', '1', 'below 0.02'
  ),
  'k1': Metric('mean of -log ratio', 'nats', '-0.05 to 0.05'),
  'k3': Metric('mean of ratio - 1 - log ratio', 'nats', '0 to 0.05'),
  'rollout_weight': Metric(
    'mean truncated rollout weight in the loss', '1', '0.8 to 1.2'
  ),
  'skipped_update': Metric(
    'minibatches not applied: empty, or a gradient that is not finite',
    '1',
    '0',
  ),
  'skipped_in_a_row': Metric(
    'updates skipped one after another for gradients that are not finite',
    '1',
    '0',
  ),
  # Advantages and weights of the whole batch.
  'advantage_token_mean': Metric(
    'token mean of the standardized advantage (SPO++ Eq. 5 residual under '
    'trajectory standardization)',
    '1',
    '0 for SPO++; -0.3 to 0 for SPO',
  ),
  'advantage_weighted_token_mean': Metric(
    'token mean of weight times standardized advantage', '1', '-0.1 to 0.1'
  ),
  'degenerate_batch': Metric(
    '1 where all advantages are equal and nothing can be learnt', '1', '0'
  ),
  'length_advantage_covariance': Metric(
    'covariance of length and advantage', 'tokens', 'negative or near 0'
  ),
  'length_residual': Metric(
    'covariance of length and advantage over the mean length', '1', '-0.3 to 0'
  ),
  'length_advantage_correlation': Metric(
    'correlation of length and advantage', '1', 'negative where success is fast'
  ),
  **_weights('token'),
  **_weights('sequence'),
  'weight_truncated_fraction': Metric(
    'tokens whose rollout weight is truncated', '1', 'below 0.05'
  ),
  'kept_mass_mean': Metric(
    'probability, before truncation, of what truncated decoding could draw, '
    'over action tokens; there only where decoding is truncated and the '
    'sampler tells',
    '1',
    'above 0.5',
  ),
  'proxy_ratio_fraction': Metric(
    'trajectories of truncated decoding whose importance ratio is a proxy, '
    'since the kept ids are missing',
    '1',
    '0',
  ),
  'log_ratio_nonfinite': Metric(
    'trajectories whose importance weight is not finite', '1', '0'
  ),
  'log_ratio_abs_mean': Metric(
    'mean gap between the log-probs of learner, before the update, and sampler',
    'nats a token',
    'below 0.05, no jumps',
  ),
  'tempering_exponent': Metric(
    'mean tempering exponent of the prompt groups (TETPO alpha)',
    '1',
    '1 on fresh data, above 0.1 on stale data',
  ),
  'tempering_exponent_min': Metric(
    'smallest tempering exponent of a prompt group, mean of the minibatches',
    '1',
    'above 0',
  ),
  'tempered_ess_fraction': Metric(
    'mean effective share of a prompt group after tempering',
    '1',
    'at least target_ess_fraction',
  ),
  'tempering_dropped': Metric(
    'trajectories of a minibatch left out of tempering, their weight being '
    'not finite; mean of the minibatches',
    '1',
    '0',
  ),
  'rejected_fraction': Metric(
    'tokens that the token mask rejects', '1', 'below 0.1'
  ),
  'second_moment': Metric(
    'mean squared log-ratio of the tokens that M2PO bounds',
    'nats^2',
    'below 0.1',
  ),
  'second_moment_kept': Metric(
    'the same of the tokens that are kept',
    'nats^2',
    'at most second_moment_threshold',
  ),
  'second_moment_all_masked': Metric(
    'share of minibatches in which M2PO rejects all tokens it bounds', '1', '0'
  ),
  'groups_equal_fraction': Metric(
    'prompt groups of equal rewards: no signal', '1', 'below 0.5'
  ),
  'groups_all_zero_fraction': Metric(
    'prompt groups of which no rollout succeeds', '1', 'falls'
  ),
  'groups_all_one_fraction': Metric(
    'prompt groups of which every rollout succeeds', '1', 'rises'
  ),
  # Where the time goes.
  'tokens_per_s': Metric(
    'tokens of the step over its time', 'tokens/s', 'high'
  ),
  'step_s': Metric('whole step', 's', 'steady'),
  'collect_s': Metric('waiting for the batch', 's', 'most of a step'),
  'drain_s': Metric('waiting for the late ones', 's', 'below collect_s'),
  'update_s': Metric('packing and the update', 's', 'steady after step 0'),
  'publish_s': Metric('publishing and dispatching', 's', 'below update_s'),
}


def describe_metrics() -> str:
  """Returns the table of all metrics in Markdown."""
  lines = ['| metric | meaning | unit | healthy |', '|---|---|---|---|']
  lines += [
    f'| {name} | {metric.meaning} | {metric.unit} | {metric.healthy} |'
    for name, metric in METRICS.items()
  ]
  return '\n'.join(lines) + '\n'
