"""May these log-probabilities be compared with the learner's?

An importance ratio is exact when both sides speak of one distribution. The
learner divides logits by its temperature and renormalises over the ids that
truncated decoding kept:

  ratio = [pi(a) / pi(S)]_learner / [pi(a) / pi(S)]_sampler

Without the kept ids only a proxy is left: both sides before truncation.
"""

from collections.abc import Sequence

from spopp_jax import types


class LogprobContractError(ValueError):
  """Log-probs that give no importance ratio; the text says what would."""


def check(
  trajectories: Sequence[types.Trajectory],
  *,
  temperature: float,
  allow_proxy_ratio: bool,
) -> None:
  """Refuses trajectories that have no importance ratio.

  Args:
    trajectories: as they came from the sampler.
    temperature: the learner's.
    allow_proxy_ratio: accept truncated decoding without kept ids, by the
      log-probs before truncation.

  Raises:
    LogprobContractError: naming the request: another temperature, or
      truncated decoding that neither kept ids nor the switch make comparable.
  """
  for trajectory in trajectories:
    _check_temperature(trajectory, temperature)
    if not is_exact(trajectory):
      _check_proxy(trajectory, allow_proxy_ratio)


def is_exact(trajectory: types.Trajectory) -> bool:
  """Whether the learner can compute the distribution that was sampled."""
  processed = trajectory.logprob_kind is types.LogprobKind.PROCESSED
  return not trajectory.sampling.truncated or (
    processed and trajectory.kept is not None
  )


def _check_temperature(
  trajectory: types.Trajectory, temperature: float
) -> None:
  sampled_at = trajectory.sampling.temperature
  if sampled_at != temperature:
    raise LogprobContractError(
      f'request {trajectory.request_id} was sampled at temperature '
      f'{sampled_at}, the learner computes log-probs at {temperature}: both '
      'must be the same'
    )


def _check_proxy(trajectory: types.Trajectory, allowed: bool) -> None:
  sampling = trajectory.sampling
  how = (
    f'request {trajectory.request_id} was truncated (top_p {sampling.top_p}, '
    f'top_k {sampling.top_k}, min_p {sampling.min_p})'
  )
  if trajectory.logprob_kind is types.LogprobKind.PROCESSED:
    raise LogprobContractError(
      f'{how} and its log-probs come after truncation, but without the ids '
      'that were kept no learner can compute the same: the sampler must send '
      'kept ids, or log-probs before truncation (RAW)'
    )
  if not allowed:
    raise LogprobContractError(
      f'{how} and its log-probs come before truncation: the importance ratio '
      'would be a proxy. Have the sampler send PROCESSED log-probs with the '
      'ids that were kept, or accept the proxy with learner.allow_proxy_ratio'
    )
