"""The devices that share the rows of a batch, of one host or of several."""

from typing import Any

import jax
import numpy as np

from spopp_jax import types

_P = jax.sharding.PartitionSpec
# Fields of a PackedBatch with the axes [M, B, S, ...].
PER_TOKEN = (
  'tokens',
  'positions',
  'segment_ids',
  'trajectory_ids',
  'action_mask',
  'behaviour_logprobs',
  'kept_ids',
)


class RowDevices:
  """A mesh with the one axis `rows`.

  Attributes:
    count: devices, of all hosts together.
    everywhere: the sharding of what every device holds.
  """

  def __init__(self, per_host: int, *, all_hosts: bool = False):
    """Takes the first devices of a host.

    Args:
      per_host: devices of a host.
      all_hosts: those of every host take part, not of this one alone; each then
        has to make the same calls.

    Raises:
      ValueError: a host has fewer devices.
    """
    hosts = range(jax.process_count()) if all_hosts else [jax.process_index()]
    found: list[Any] = []
    for host in hosts:
      there = [d for d in jax.devices() if d.process_index == host]
      if not 1 <= per_host <= len(there):
        raise ValueError(
          f'devices ({per_host}) must be between 1 and the {len(there)} of '
          f'host {host}'
        )
      found += there[:per_host]
    self.count = len(found)
    mesh = jax.sharding.Mesh(np.array(found), ('rows',))
    self.everywhere = jax.sharding.NamedSharding(mesh, _P())
    self._by_rows = jax.sharding.NamedSharding(mesh, _P(None, 'rows'))

  def replicate(self, tree: Any) -> Any:
    """Puts arrays, the same at every host, whole on every device."""
    return jax.tree.map(lambda x: _put(x, self.everywhere), tree)

  def spread(self, batch: types.PackedBatch) -> types.PackedBatch:
    """Lays the rows over the devices and everything else on each."""
    return types.PackedBatch(
      **{
        name: _put(x, self._by_rows if name in PER_TOKEN else self.everywhere)
        for name, x in batch._asdict().items()
      }
    )


def _put(array: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
  if sharding.is_fully_addressable:
    return jax.device_put(array, sharding)
  if isinstance(array, jax.Array) and array.sharding == sharding:
    return array
  # device_put would compare the values of all hosts first.
  host = np.asarray(array)
  return jax.make_array_from_callback(
    host.shape, sharding, lambda index: host[index]
  )
