"""The interface of an objective: a NamedTuple of pure functions.

  advantages   once on the collected batch
  weights      once per optimizer minibatch, before it is cut
  loss         per microbatch, the only differentiated part
  diagnostics  once on the collected batch

What depends on whole prompt groups or on the whole minibatch is computed
before anything is cut, so that no cut can change it. A cut keeps trajectories
whole. Under a mapped axis (`shard_map`, `pmap`) every device holds whole
trajectories and whole groups with ids of its own.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from spopp_jax import types

Metrics = Mapping[str, types.Array]


class Weights(NamedTuple):
  """Constants of one optimizer minibatch; rows may be cut freely.

  Attributes:
    importance: [B, S] float32; factor of the token's loss, 0 where rejected
      and outside `counted`.
    denominator_logprobs: [B, S] float32 nats; the ratio that carries the
      gradient is current over this.
    counted: [B, S] bool; tokens that the loss and its metrics divide by.
    tokens: [] float32; their number in the whole minibatch, all devices.
  """

  importance: types.Array
  denominator_logprobs: types.Array
  counted: types.Array
  tokens: types.Array


class Objective(NamedTuple):
  """A policy objective composed of kernels.

  Attributes:
    name: registry name.
    group_size: rollouts a prompt and dispatch; 1 is single-stream.
    baseline: which evidence gives `values`: 'event_time', 'receipt_order' or
      'none'.
    advantages: (batch) -> [N] float32.
    weights: (batch, proximal_logprobs [B, S], advantages [N]) -> (Weights,
      metrics); detached. The metrics are finished values [] float32.
    loss: (logprobs [B, S], batch, advantages [N], weights) -> (numerator [],
      count [], metrics), sums over this cut: the loss is the quotient of the
      sums over all cuts and devices. metrics are sums over `counted` tokens:
      whoever divides, divides by `weights.tokens`, once.
    diagnostics: (batch, advantages [N], proximal_logprobs [B, S], weights) ->
      finished values [] float32 of all devices.
  """

  name: str
  group_size: int
  baseline: str
  advantages: Callable[[types.PackedBatch], types.Array]
  weights: Callable[
    [types.PackedBatch, types.Array, types.Array], tuple[Weights, Metrics]
  ]
  loss: Callable[..., tuple[types.Array, types.Array, Metrics]]
  diagnostics: Callable[..., Metrics]
