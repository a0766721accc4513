"""Log-probabilities of packed rows: what is scored and differentiated."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spopp_jax import types
from spopp_jax.kernels import token_logprobs
from spopp_jax.models import lora, parameters, rematerialization

# Tokens whose logits are held at a time; enough for efficient products.
CHUNK_TOKENS = 1024


COMPUTE_DTYPES = ('float32', 'bfloat16')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How log-probabilities are computed.

  Attributes:
    temperature: > 0; the sampler's, so that log-probs mean the same.
    chunk_tokens: >= 1; tokens whose logits are held at a time.
    compute_dtype: of products and activations. Norms, softmax, logits and
      log-probs are float32 in any case, and so are parameters and gradients.
    remat: of `rematerialization.CHOICES`.
    adapters: of the trained parameters, if they are not the model's own.
  """

  temperature: float = 1.0
  chunk_tokens: int = CHUNK_TOKENS
  compute_dtype: str = 'float32'
  remat: str = 'none'
  adapters: lora.Config | None = None

  def __post_init__(self):
    for name, allowed in (
      ('compute_dtype', COMPUTE_DTYPES),
      ('remat', rematerialization.CHOICES),
    ):
      if getattr(self, name) not in allowed:
        raise ValueError(
          f'{name} ({getattr(self, name)!r}) must be one of {allowed}'
        )


def cast(params: Mapping[str, Any], compute_dtype: str) -> dict[str, Any]:
  """Returns parameters as they are computed with; vectors stay float32."""
  dtype = jnp.dtype(compute_dtype)
  return {k: v.astype(dtype) if v.ndim > 1 else v for k, v in params.items()}


def packed_logprobs(
  graphdef: nnx.GraphDef,
  settings: Settings,
  params: parameters.Parameters,
  batch: types.PackedBatch,
) -> jax.Array:
  """Returns [B, S] float32 nats where the action mask is set, else 0."""
  # Here, so that gradients are those of the float32 parameters.
  params = cast(params, settings.compute_dtype)
  added = {k: v for k, v in params.items() if lora.is_adapter(k)}
  base = {k: v for k, v in params.items() if k not in added}
  decoder = parameters.bind(graphdef, base)
  if settings.adapters is not None:
    lora.attach(decoder, settings.adapters, added)
  rematerialization.apply(decoder, settings.remat)
  hidden = decoder.hidden(batch.tokens, batch.positions, batch.segment_ids)
  return token_logprobs.token_logprobs(
    hidden,
    decoder.output_matrix(),
    batch.tokens,
    batch.action_mask,
    batch.kept_ids,
    temperature=settings.temperature,
    chunk_tokens=settings.chunk_tokens,
  ).logprobs
