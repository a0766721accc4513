"""Parameters as flat dictionaries keyed by their Hugging Face names."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spopp_jax.models import dense

Parameters = dict[str, jax.Array]
# Numbers of products and activations; norms, softmax and logits are float32.
COMPUTE_DTYPES = ('float32', 'bfloat16')


def graph(config: dense.DecoderConfig) -> tuple[nnx.GraphDef, dict]:
  """Returns the decoder's structure and its abstract parameters by name."""
  abstract = nnx.eval_shape(lambda: dense.Decoder(config, rngs=nnx.Rngs(0)))
  graphdef, state = nnx.split(abstract)
  return graphdef, _flatten(state)


def initial(config: dense.DecoderConfig, seed: int) -> Parameters:
  """Returns freshly initialized float32 parameters."""
  _, state = nnx.split(dense.Decoder(config, rngs=nnx.Rngs(seed)))
  return _flatten(state)


def bind(graphdef: nnx.GraphDef, parameters: Mapping) -> dense.Decoder:
  """Returns the decoder with these parameters; traceable."""
  flat = [(_path(name), value) for name, value in parameters.items()]
  return nnx.merge(graphdef, nnx.from_flat_state(flat))


def cast(params: Mapping[str, Any], dtype: str) -> dict[str, Any]:
  """Returns parameters as they are computed with; vectors stay float32.

  Args:
    params: float32 arrays by name.
    dtype: of COMPUTE_DTYPES.
  """
  kind = jnp.dtype(dtype)
  return {k: v.astype(kind) if v.ndim > 1 else v for k, v in params.items()}


def check(
  config: dense.DecoderConfig, parameters: Mapping[str, np.ndarray]
) -> None:
  """Raises ValueError naming missing, surplus or misshaped parameters."""
  _, expected = graph(config)
  problems = [f'missing {name}' for name in expected.keys() - parameters.keys()]
  problems += [
    f'surplus {name}' for name in parameters.keys() - expected.keys()
  ]
  problems += [
    f'{name} has shape {tuple(parameters[name].shape)}, '
    f'the model needs {tuple(expected[name].shape)}'
    for name in expected.keys() & parameters.keys()
    if tuple(parameters[name].shape) != tuple(expected[name].shape)
  ]
  if problems:
    raise ValueError(
      'parameters do not fit the model: ' + '; '.join(sorted(problems))
    )


def fingerprint(config: dense.DecoderConfig) -> str:
  """Returns a sha256 hex digest of the architecture and its sizes."""
  text = json.dumps(dataclasses.asdict(config), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _flatten(state: nnx.State) -> dict:
  return {
    '.'.join(str(part) for part in path): variable.get_value()
    for path, variable in nnx.to_flat_state(state)
  }


def _path(name: str) -> tuple:
  return tuple(
    int(part) if part.isdigit() else part for part in name.split('.')
  )
