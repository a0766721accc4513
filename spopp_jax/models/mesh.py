"""The devices of a learner: how parameters and rows are laid over them.

Three axes: `data` and `fsdp` cut the rows of a batch, `fsdp` and `tensor` cut
the parameters and their optimizer state. A parameter's name says how.
"""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from spopp_jax import types

_LOG = logging.getLogger(__name__)
_P = jax.sharding.PartitionSpec
AXES = ('data', 'fsdp', 'tensor')
# Rows [B, ...] over the axes that share them.
ROWS = _P(('data', 'fsdp'))
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
# What a whole name ends in -> the axes of its dimensions; the first one holds.
_RULES = (
  (r'(embed_tokens|lm_head)\.weight', ('tensor', 'fsdp')),
  (r'(q|k|v|gate|up)_proj\.weight', ('tensor', 'fsdp')),
  (r'(o|down)_proj\.weight', ('fsdp', 'tensor')),
  (r'linear_attn\.in_proj_(qkv|z|a|b)\.weight', ('tensor', 'fsdp')),
  (r'linear_attn\.out_proj\.weight', ('fsdp', 'tensor')),
  (r'linear_attn\.(conv1d\.weight|A_log|dt_bias)', ()),
  (r'\w*norm\.weight', ()),
)


class Sizes(NamedTuple):
  """Devices along each axis, of all hosts together; one may be 0, the rest."""

  data: int = 1
  fsdp: int = 1
  tensor: int = 1


_ONE = Sizes()


class DeviceMesh:
  """The devices of one host, or of all, along the three axes.

  Attributes:
    mesh: with Auto axes.
    row_parts: the number that rows have to divide by, data x fsdp.
    everywhere: the sharding of what every device holds.
  """

  def __init__(self, sizes: Sizes = _ONE, *, all_hosts: bool = False):
    """Takes the first devices of each host.

    Args:
      sizes: of the axes.
      all_hosts: those of every host take part, not of this one alone; each then
        has to make the same calls.

    Raises:
      ValueError: a size below 0, more than one 0, or another number of devices
        than there is; the text names the sizes and the devices.
    """
    hosts = range(jax.process_count()) if all_hosts else [jax.process_index()]
    there = {
      host: [d for d in jax.devices() if d.process_index == host]
      for host in hosts
    }
    fewest = min(map(len, there.values()))
    sizes = resolve(sizes, fewest * len(there))
    share, rest = divmod(math.prod(sizes), len(there))
    if rest:
      raise ValueError(
        f'{_words(sizes)} are {math.prod(sizes)} devices, which {len(there)} '
        'hosts cannot share evenly'
      )
    devices = [d for found in there.values() for d in found[:share]]
    self.mesh = jax.make_mesh(
      tuple(sizes),
      AXES,
      (jax.sharding.AxisType.Auto,) * len(AXES),
      devices=devices,
    )
    self.row_parts = sizes.data * sizes.fsdp
    self.everywhere = jax.sharding.NamedSharding(self.mesh, _P())

  def parameters(
    self, shapes: Mapping[str, Any]
  ) -> dict[str, jax.sharding.NamedSharding]:
    """Returns each parameter's sharding.

    A dimension that an axis does not divide stays whole along it, which is
    logged.

    Args:
      shapes: arrays or jax.ShapeDtypeStruct by name.

    Raises:
      ValueError: no rule knows a name.
    """
    uneven: dict[tuple[int, str], list[str]] = {}
    specs = {}
    for name, value in shapes.items():
      axes: list[str | None] = []
      for size, axis in zip(value.shape, _axes(name, value.ndim), strict=True):
        if axis is not None and size % self.mesh.shape[axis]:
          uneven.setdefault((size, axis), []).append(name)
          axis = None
        axes.append(axis)
      specs[name] = jax.sharding.NamedSharding(self.mesh, _P(*axes))
    for (size, axis), names in uneven.items():
      _LOG.warning(
        'mesh.%s (%d) does not divide a dimension of %d: it stays whole in %s',
        *(axis, self.mesh.shape[axis], size, ', '.join(names)),
      )
    return specs

  def like_parameters(
    self, tree: Any, parameters: Mapping[str, jax.sharding.NamedSharding]
  ) -> Any:
    """Returns shardings of a tree: dict entries by parameters' names as those.

    Args:
      tree: arrays or jax.ShapeDtypeStruct, such as an optimizer's state.
      parameters: shardings by name.
    """

    def sharding(path, leaf):
      found = parameters.get(str(getattr(path[-1], 'key', '')))
      if found is None or len(found.spec) != leaf.ndim:
        return self.everywhere
      return found

    return jax.tree_util.tree_map_with_path(sharding, tree)

  def rows(self, batch: types.PackedBatch) -> types.PackedBatch:
    """Returns the shardings that cut rows; all else is on every device."""
    cut = jax.sharding.NamedSharding(self.mesh, _P(None, *ROWS))
    return types.PackedBatch(
      **{
        name: cut if name in PER_TOKEN else self.everywhere
        for name in batch._fields
      }
    )


def resolve(sizes: Sizes, available: int) -> Sizes:
  """Returns the sizes with a 0 replaced by what the others leave.

  Raises:
    ValueError: a size below 0, more than one 0, more devices than there are,
      or a number that the given sizes do not divide.
  """
  given = math.prod(size for size in sizes if size)
  if min(sizes) < 0 or sizes.count(0) > 1:
    raise ValueError(
      f'{_words(sizes)}: sizes must be positive, or one of them 0 for the '
      'devices that the others leave'
    )
  if given > available or (0 in sizes and available % given):
    relation = 'divide' if 0 in sizes else 'be at most'
    raise ValueError(
      f'{_words(sizes)}: their product must {relation} the number of '
      f'devices, {available}'
    )
  return Sizes(*(size or available // given for size in sizes))


def place(tree: Any, shardings: Any) -> Any:
  """Lays arrays out that every host holds whole.

  Args:
    tree: arrays, the same at every host.
    shardings: a tree of the same structure, or one sharding for all.
  """
  if isinstance(shardings, jax.sharding.Sharding):
    return jax.tree.map(lambda x: _put(x, shardings), tree)
  return jax.tree.map(_put, tree, shardings)


def by_rows(values: jax.Array) -> jax.Array:
  """Keeps [B, ...] cut by rows where a mesh of these axes is set.

  Between blocks, so that parameters are gathered for a product and activations
  stay where they are.
  """
  return _constrained(values, ROWS)


def by_words(table: jax.Array) -> jax.Array:
  """Gathers the columns of an embedding [V, D] before rows are looked up.

  Else the looked-up states would come cut by columns, to be cut anew by rows.
  """
  return _constrained(table, _P('tensor'))


def _constrained(
  array: jax.Array, spec: jax.sharding.PartitionSpec
) -> jax.Array:
  """Cuts the first dimension where a mesh is set, if it divides."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.axis_names != AXES or mesh.size == 1:
    return array
  axes = spec[0] if isinstance(spec[0], tuple) else (spec[0],)
  if array.shape[0] % math.prod(mesh.shape[axis] for axis in axes):
    spec = _P()
  return jax.lax.with_sharding_constraint(array, spec)


def _axes(name: str, rank: int) -> tuple[str | None, ...]:
  """Returns the axis of each dimension by the rules."""
  if adapter := re.fullmatch(r'(.*)\.lora_([AB])\.weight', name):
    out_axis, in_axis = _axes(f'{adapter[1]}.weight', 2)
    return (None, in_axis) if adapter[2] == 'A' else (out_axis, None)
  for pattern, axes in _RULES:
    if re.search(rf'(^|\.){pattern}$', name) and len(axes) in (0, rank):
      return axes or (None,) * rank
  raise ValueError(
    f'no sharding rule knows the parameter {name} of {rank} dimensions; '
    'spopp_jax/models/mesh.py lists them'
  )


def _words(sizes: Sizes) -> str:
  return ', '.join(
    f'mesh.{axis} ({size})' for axis, size in zip(AXES, sizes, strict=True)
  )


def _put(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  if sharding.is_fully_addressable:
    return jax.device_put(array, sharding)
  if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(
    sharding, array.ndim
  ):
    return array
  # device_put would compare the values of all hosts first.
  host = np.asarray(array)
  return jax.make_array_from_callback(
    host.shape, sharding, lambda index: host[index]
  )
