"""The devices that published experiments are laid out for."""

from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

# One host with eight GPUs of 80 GiB; a slice of 16 TPU v5e chips of 16 GiB on
# four hosts, which takes hosts.count=4 and one command a host.
GPU, TPU = 'gpu8', 'tpu16'
_MEMORY_GIB = {GPU: 80.0, TPU: 16.0}


def lay_out(
  config: config_dict.ConfigDict,
  arg: str,
  microbatches: Mapping[str, int],
  **axes: Mapping[str, int],
) -> None:
  """Sets mesh and microbatches for the devices that a config's argument names.

  Args:
    config: changed in place.
    arg: the text after the colon of --config=FILE:arg; '' is gpu8.
    microbatches: by name of the devices.
    **axes: sizes of the mesh's axes by name of the devices; 1 if absent.

  Raises:
    ValueError: unknown devices.
  """
  name = arg or GPU
  if name not in _MEMORY_GIB:
    raise ValueError(
      f'devices ({name!r}) must be one of {", ".join(_MEMORY_GIB)}, as in '
      f'--config=FILE:{TPU}'
    )
  sizes: dict[str, Any] = {'data': 1, 'fsdp': 1, 'tensor': 1}
  sizes |= {axis: number[name] for axis, number in axes.items()}
  config.mesh.update(**sizes, memory_gib=_MEMORY_GIB[name])
  config.learner.microbatches = microbatches[name]
