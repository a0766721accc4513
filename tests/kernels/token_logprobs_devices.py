"""Prints how far ways of spreading the head are from one device.

Usage: XLA_FLAGS=--xla_force_host_platform_device_count=4 python
token_logprobs_devices.py
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spopp_jax.kernels import token_logprobs

_DEVICES, _LENGTH, _WIDTH, _VOCABULARY = 4, 9, 6, 12


def make_inputs():
  """Two rows a device whose counts differ; one device has none."""
  rng = np.random.default_rng(0)
  rows = 2 * _DEVICES
  shape = (rows, _LENGTH)
  tokens = rng.integers(0, _VOCABULARY, shape).astype(np.int32)
  mask = rng.random(shape) < np.linspace(0, 1, rows)[:, None]
  mask[:2] = False
  kept = (tokens[..., None] + np.array([0, 3, 5], np.int32)) % _VOCABULARY
  kept[rng.random(shape) < 0.5] = -1
  slopes = rng.normal(size=(3, *shape)).astype(np.float32)
  hidden = rng.normal(size=(*shape, _WIDTH)).astype(np.float32)
  matrix = rng.normal(size=(_VOCABULARY, _WIDTH)).astype(np.float32)
  return matrix, (hidden, tokens, mask, kept, slopes.transpose(1, 2, 0))


def loss(matrix, rows):
  """A sum over all scores, and the scores."""
  hidden, tokens, mask, kept_ids, slopes = rows
  scores = token_logprobs.token_logprobs(
    hidden,
    matrix,
    tokens,
    mask,
    kept_ids,
    temperature=0.7,
    chunk_tokens=4,
    with_entropy=True,
  )
  stacked = jnp.stack(scores, axis=-1)
  return (stacked * slopes).sum(), stacked


def differentiate(matrix, rows):
  """Scores, gradient by matrix, gradient by hidden states."""
  of_rows = lambda matrix, hidden: loss(matrix, (hidden, *rows[1:]))
  gradients, scores = jax.grad(of_rows, argnums=(0, 1), has_aux=True)(
    matrix, rows[0]
  )
  return scores, *gradients


def mapped(matrix, rows, *, reduce):
  """One device's share; without types its matrix gradient is reduced."""
  scores, by_matrix, by_hidden = differentiate(matrix, rows)
  if reduce:
    by_matrix = jax.lax.psum(by_matrix, 'data')
  return scores, by_matrix, by_hidden


def total(mesh, matrix, rows):
  """The loss as a shard_map, to be differentiated from outside."""
  spread = jax.shard_map(
    lambda *args: jax.lax.psum(loss(*args)[0], 'data'),
    mesh=mesh,
    in_specs=(PartitionSpec(), PartitionSpec('data')),
    out_specs=PartitionSpec(),
  )
  return spread(matrix, rows)


def worst(got, want):
  """The largest difference of any entry."""
  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return max(
    float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs
  )


def main():
  """Compares shard_map, pmap and jit on sharded arrays with one device."""
  if jax.device_count() != _DEVICES:
    raise SystemExit(f'{jax.device_count()} devices, {_DEVICES} are needed')
  matrix, rows = make_inputs()
  want = jax.jit(differentiate)(matrix, rows)
  mesh = jax.make_mesh((_DEVICES,), ('data',), (AxisType.Auto,))
  by_row, whole = PartitionSpec('data'), PartitionSpec()
  results = {}
  for name, types in {'shard_map': True, 'untyped_shard_map': False}.items():
    spread = jax.shard_map(
      functools.partial(mapped, reduce=not types),
      mesh=mesh,
      in_specs=(whole, by_row),
      out_specs=(by_row, whole, by_row),
      check_vma=types,
    )
    results[name] = worst(jax.jit(spread)(matrix, rows), want)
  results['around_shard_map'] = worst(
    jax.jit(jax.grad(functools.partial(total, mesh)))(matrix, rows), want[1]
  )
  split = lambda x: x.reshape(_DEVICES, -1, *x.shape[1:])
  scores, by_matrix, by_hidden = jax.pmap(
    functools.partial(mapped, reduce=True), axis_name='data', in_axes=(None, 0)
  )(matrix, jax.tree.map(split, rows))
  by_pmap = (
    scores.reshape(want[0].shape),
    by_matrix[0],
    by_hidden.reshape(want[2].shape),
  )
  results['pmap'] = worst(by_pmap, want)
  # The output matrix is sharded too, over the vocabulary.
  sharded = jax.device_put((matrix, rows), NamedSharding(mesh, by_row))
  results['sharded_jit'] = worst(jax.jit(differentiate)(*sharded), want)
  copied = jax.device_put(matrix, NamedSharding(mesh, whole))
  program = jax.jit(differentiate).lower(copied, sharded[1]).compile()
  if 'all-gather' in program.as_text():
    raise SystemExit('rows leave their devices')
  if not all(jnp.abs(x).sum() > 0 for x in want):
    raise SystemExit('nothing is compared')
  print(json.dumps(results))


if __name__ == '__main__':
  main()
