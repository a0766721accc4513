"""Pure jnp kernels: importable from any trainer, no state, no I/O.

  from spopp_jax import kernels
  kernels.standardize.standardize(advantages, lengths, usable)

They are plain functions, to be called inside jit, `shard_map` or `pmap`.
Shapes are [B, S] rows x tokens, [N] trajectories and [G, K] groups, static;
`axis_name` reduces over a mapped axis. Sums are float32.

  segments            counted_tokens, trajectory_sums, trajectory_lengths,
                      to_tokens: quantities per trajectory of packed rows
  groups              to_groups, from_groups: trajectories by group id
  reduction           global_sum, global_max: over a mapped axis
  standardize         standardize: SPO++ Eq. 4 and 6
  group_advantage     group_advantages: GRPO, Dr. GRPO, RLOO;
                      in_varied_group, group_counts
  overlong            soft_overlong_penalty: DAPO
  importance          log_ratio, sequence_log_weights,
                      sequence_mean_log_ratios; truncate, icepop, in_window,
                      geometric_mean_mask; proximal_coefficients,
                      interpolated_proximal: A-3PO
  target_ess          log_ess, tempering_exponent, tempered_weights: TETPO;
                      finite_members
  second_moment_mask  second_moment_mask: M2PO
  sequence_ratio      token_form_log_ratios: GSPO; group_expectations,
                      group_expectation_logprobs: GEPO
  surrogate           clipped_surrogate: PPO, dual clip; weighted_likelihood:
                      CISPO
  aggregate           token_mean, token_sum, seq_mean_token_mean,
                      seq_mean_token_sum, seq_mean_token_sum_norm
  token_logprobs      token_logprobs: the chunked language-model head
  diagnostics         weight_statistics, weighted_mean, length_coupling:
                      SPO++ Eq. 5
"""

from spopp_jax.kernels import (
  aggregate,
  diagnostics,
  group_advantage,
  groups,
  importance,
  overlong,
  reduction,
  second_moment_mask,
  segments,
  sequence_ratio,
  standardize,
  surrogate,
  target_ess,
  token_logprobs,
)

__all__ = [
  'aggregate',
  'diagnostics',
  'group_advantage',
  'groups',
  'importance',
  'overlong',
  'reduction',
  'second_moment_mask',
  'segments',
  'sequence_ratio',
  'standardize',
  'surrogate',
  'target_ess',
  'token_logprobs',
]
