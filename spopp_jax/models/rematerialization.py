"""Activations that are computed again in the backward pass, to save memory."""

from typing import Any

import jax
from flax import nnx

# What of a block is kept from the forward pass: all, its inputs alone, or also
# the results of products with parameters.
CHOICES = ('none', 'full', 'dots')


class _Block(nnx.Module):
  """A block whose activations are not kept, or only some of them."""

  def __init__(self, block: nnx.Module, policy: Any):
    self.block = block
    self.policy = policy

  def __call__(self, *args: Any) -> Any:
    """Computes what the block does."""
    return jax.checkpoint(lambda *xs: self.block(*xs), policy=self.policy)(
      *args
    )


def apply(decoder: Any, choice: str) -> None:
  """Makes a decoder's blocks forget activations; values do not change.

  Args:
    decoder: has blocks in `model.layers`; changed in place.
    choice: of CHOICES: 'none' keeps all, 'full' only what enters a block, which
      costs a second forward pass; 'dots' also keeps products with parameters.

  Raises:
    ValueError: unknown choice.
  """
  if choice not in CHOICES:
    raise ValueError(f'remat ({choice!r}) must be one of {CHOICES}')
  if choice == 'none':
    return
  policies = jax.checkpoint_policies
  policy = {
    'full': policies.nothing_saveable,
    'dots': policies.dots_with_no_batch_dims_saveable,
  }[choice]
  decoder.model.layers = nnx.List(
    [_Block(block, policy) for block in decoder.model.layers]
  )
