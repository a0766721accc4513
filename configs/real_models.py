"""What the papers' experiments on real models share, and their devices.

Source: clip, T 1, no truncation, lr 1e-6, weight decay .1 and one step a batch
are SPO++'s (arXiv:2608.24870) Table 3; b2, dtypes and timeouts this project's.
Command: none; alfworld_*.py, math_tir_*.py and tetpo_*.py start from it.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from configs import common

# One host with eight GPUs of 80 GiB; a slice of 16 TPU v5p chips of 95 GiB on
# four hosts, which takes hosts.count=4 and one command a host.
GPU, TPU = 'gpu8', 'tpu16'
_MEMORY_GIB = {GPU: 80.0, TPU: 95.0}


def get_config(arg: str = '') -> config_dict.ConfigDict:
  config = common.get_config(arg)
  config.sampler.update(
    compute_dtype='bfloat16',
    context_length=8192,
    rollout_timeout_s=3600.0,
    recovery_timeout_s=600.0,
  )
  config.optimizer.update(
    learning_rate=1e-6, b2=0.999, weight_decay=0.1, warmup_steps=0
  )
  config.learner.update(
    minibatches=1, compute_dtype='bfloat16', remat='full', row_length=8192
  )
  return config


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
