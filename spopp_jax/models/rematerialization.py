"""Activations that are computed again in the backward pass, to save memory."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# What of a block is kept from the forward pass: all, its inputs alone, or also
# the results of products with parameters.
CHOICES = ('none', 'full', 'dots')


class _Loop(nnx.Module):
  """Blocks in a loop, whose activations are not kept, or only some of them.

  A loop and not one block after another: a compiler may begin to compute again
  long before it needs to, and holds all of it then.
  """

  def __init__(self, blocks: Sequence[nnx.Module], policy: Any):
    self.blocks = nnx.List(blocks)
    self.policy = policy

  def __call__(self, hidden: jax.Array, context: Any, cache: None) -> Any:
    """Computes what the blocks do one after another, without caches."""
    structures, states = zip(*map(nnx.split, self.blocks), strict=True)
    period = _period(structures)
    stacked = [
      jax.tree.map(lambda *layers: jnp.stack(layers), *states[i::period])
      for i in range(period)
    ]

    def turn(hidden, states):
      for structure, state in zip(structures[:period], states, strict=True):

        def block(hidden, state, structure=structure):
          return nnx.merge(structure, state)(hidden, context, None)[0]

        hidden = jax.checkpoint(block, policy=self.policy, prevent_cse=False)(
          hidden, state
        )
      return hidden, None

    return jax.lax.scan(turn, hidden, stacked)[0], cache


def apply(decoder: Any, choice: str) -> None:
  """Makes a decoder's blocks forget activations; values do not change.

  It then computes whole rows alone, no cached sequences.

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
  decoder.model.layers = nnx.List([_Loop(decoder.model.layers, policy)])


def _period(structures: Sequence[nnx.GraphDef]) -> int:
  """Returns after how many blocks their kinds repeat."""
  count = len(structures)
  return next(
    period
    for period in range(1, count + 1)
    if count % period == 0
    and all(structures[i] == structures[i % period] for i in range(count))
  )
