"""The interface of an objective: a NamedTuple of pure functions."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from spopp_jax import types

Metrics = Mapping[str, types.Array]


class Objective(NamedTuple):
  """A policy objective composed of kernels.

  Attributes:
    name: registry name.
    group_size: rollouts a prompt and dispatch; 1 is single-stream.
    baseline: which evidence gives `values`: 'event_time', 'receipt_order' or
      'none'.
    advantages: (batch) -> [N] float32; once, on the global collected batch.
    weights: (batch, proximal_logprobs [B, S], advantages [N]) -> [B, S]
      float32 detached; once per optimizer minibatch.
    loss: (logprobs [B, S], batch, proximal_logprobs [B, S], advantages [N],
      weights [B, S]) -> (numerator [], count [], metrics); the only
      differentiated part. metrics are sums over action tokens: whoever
      divides, divides by count once, after every reduction.
    diagnostics: (batch, advantages [N], proximal_logprobs [B, S]) ->
      finished global values [] float32, not sums; once, on the global
      collected batch.
  """

  name: str
  group_size: int
  baseline: str
  advantages: Callable[[types.PackedBatch], types.Array]
  weights: Callable[[types.PackedBatch, types.Array, types.Array], types.Array]
  loss: Callable[..., tuple[types.Array, types.Array, Metrics]]
  diagnostics: Callable[[types.PackedBatch, types.Array, types.Array], Metrics]
