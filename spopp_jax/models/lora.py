"""LoRA: W + (alpha / rank) B A, of which only B and A are trained.

Adapters are parameters named as in PEFT: beside `NAME.weight` [out, in] stand
`NAME.lora_A.weight` [rank, in] and `NAME.lora_B.weight` [out, rank].
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from spopp_jax.models import tensor_files

_PREFIX = 'base_model.model.'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Which matrices get adapters, and how wide they are.

  Attributes:
    rank: columns of B and rows of A, at least 1.
    alpha: > 0; the product is scaled by alpha / rank.
    targets: last words of the adapted layers' names, such as 'q_proj'.
    seed: of A's first values; B starts at 0, which leaves the policy as it is.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...]
  seed: int = 0

  def __post_init__(self):
    if self.rank < 1 or self.alpha <= 0 or not self.targets:
      raise ValueError(
        f'rank ({self.rank}) must be at least 1, alpha ({self.alpha}) positive '
        f'and targets ({self.targets}) not empty'
      )

  @property
  def scale(self) -> float:
    """Returns what the product B A is multiplied by."""
    return self.alpha / self.rank


def shapes(config: Config, base: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the adapters' shapes by name, float32.

  Args:
    config: which and how wide.
    base: arrays or jax.ShapeDtypeStruct of the model, by name.

  Raises:
    ValueError: a target that names no matrix of a layer.
  """
  matrices = {
    name: (name.split('.')[-2], value.shape)
    for name, value in base.items()
    if '.layers.' in name and name.endswith('.weight') and len(value.shape) == 2
  }
  there = {layer for layer, _ in matrices.values()}
  if missing := sorted(set(config.targets) - there):
    raise ValueError(
      f'targets {missing} name no matrix of a layer; it has {sorted(there)}'
    )
  found: dict[str, Any] = {}
  for name, (layer, (rows, columns)) in matrices.items():
    if layer in config.targets:
      down, up = (config.rank, columns), (rows, config.rank)
      found[_name(name, 'A')] = jax.ShapeDtypeStruct(down, np.float32)
      found[_name(name, 'B')] = jax.ShapeDtypeStruct(up, np.float32)
  return found


def initial(config: Config, base: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns first adapters: A uniform within 1 / sqrt(in), B zero."""
  rng = np.random.default_rng(config.seed)
  adapters = {}
  for name, value in sorted(shapes(config, base).items()):
    limit = 0.0 if name.endswith('lora_B.weight') else value.shape[1] ** -0.5
    adapters[name] = rng.uniform(-limit, limit, value.shape).astype(np.float32)
  return adapters


def attach(
  decoder: nnx.Module, config: Config, adapters: Mapping[str, jax.Array]
) -> None:
  """Makes a decoder's linear layers add their adapters; traceable.

  Args:
    decoder: bound to the base's parameters; changed in place.
    config: as the adapters were made with.
    adapters: all of them.
  """
  for name, down in adapters.items():
    stem, _, part = name.removesuffix('.weight').rpartition('.')
    if part == 'lora_A':
      *path, last = stem.split('.')
      parent: Any = decoder
      for word in path:
        parent = parent[int(word)] if word.isdigit() else getattr(parent, word)
      up = adapters[f'{stem}.lora_B.weight']
      adapted = _Adapted(getattr(parent, last), down, up, config.scale)
      setattr(parent, last, adapted)


def merge(
  config: Config,
  base: Mapping[str, np.ndarray],
  adapters: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
  """Returns the model's parameters W + scale B A, float32."""
  merged = {k: np.asarray(v, np.float32) for k, v in base.items()}
  for name in merged:
    if (down := adapters.get(_name(name, 'A'))) is not None:
      up = adapters[_name(name, 'B')]
      product = np.asarray(up, np.float32) @ np.asarray(down, np.float32)
      merged[name] = merged[name] + np.float32(config.scale) * product
  return merged


def save(
  directory: str | pathlib.Path,
  config: Config,
  adapters: Mapping[str, np.ndarray],
  *,
  base_model: str,
) -> None:
  """Writes a directory that PEFT loads onto the base model.

  Args:
    directory: created when needed.
    config: as the adapters were made with.
    adapters: all of them.
    base_model: path or name that PEFT finds the base under.
  """
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  settings = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base_model,
    'r': config.rank,
    'lora_alpha': config.alpha,
    'lora_dropout': 0.0,
    'target_modules': list(config.targets),
    'bias': 'none',
    'fan_in_fan_out': False,
    'inference_mode': True,
    'use_rslora': False,
  }
  (path / 'adapter_config.json').write_text(
    json.dumps(settings, indent=2) + '\n', encoding='utf-8'
  )
  (path / 'adapter_model.safetensors').write_bytes(
    tensor_files.encode(
      {_PREFIX + k: np.asarray(v) for k, v in adapters.items()}
    )
  )


class _Adapted(nnx.Module):
  """A linear layer and the product that is added to it."""

  def __init__(
    self, linear: nnx.Module, down: jax.Array, up: jax.Array, scale: float
  ):
    self.linear = linear
    self.down = nnx.Param(down)
    self.up = nnx.Param(up)
    self.scale = scale

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Maps [..., in] to [..., out]."""
    plain = self.linear(inputs)
    flat = inputs.reshape(-1, inputs.shape[-1])
    added = (flat @ self.down[...].T) @ self.up[...].T
    return plain + (self.scale * added).reshape(plain.shape)


def is_adapter(name: str) -> bool:
  """Returns whether a parameter is A or B."""
  return name.endswith(('.lora_A.weight', '.lora_B.weight'))


def _name(weight: str, part: str) -> str:
  return f'{weight.removesuffix(".weight")}.lora_{part}.weight'
