"""A policy as a directory: config.json, model.safetensors, tokenizer.json."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from spopp_jax.models import dense, parameters
from spopp_jax.models import tokenizer as tokenizer_lib

_MODEL_TYPE = 'qwen3'


class PolicyError(ValueError):
  """A policy directory is missing, broken or does not fit together."""


class Policy(NamedTuple):
  """A decoder's sizes, its parameters by name, and its tokenizer."""

  config: dense.DecoderConfig
  params: dict[str, np.ndarray]
  tokenizer: tokenizer_lib.WordTokenizer


def save(directory: str | pathlib.Path, policy: Policy) -> None:
  """Writes the three files; the directory is created."""
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  config = {'model_type': _MODEL_TYPE, **dataclasses.asdict(policy.config)}
  (directory / 'config.json').write_text(json.dumps(config, indent=2) + '\n')
  policy.tokenizer.save(directory / 'tokenizer.json')
  arrays: Mapping[str, np.ndarray] = {
    name: np.ascontiguousarray(value) for name, value in policy.params.items()
  }
  safetensors.numpy.save_file(dict(arrays), directory / 'model.safetensors')


def load(directory: str | pathlib.Path) -> Policy:
  """Reads a policy directory.

  Raises:
    PolicyError: naming the file that is missing, broken or does not fit.
  """
  directory = pathlib.Path(directory)
  if not directory.is_dir():
    raise PolicyError(
      f'{directory} is not a directory; a policy directory holds config.json, '
      'model.safetensors and tokenizer.json (experiments/cold_start.py makes '
      'one)'
    )
  config = _read_config(directory / 'config.json')
  try:
    tokenizer = tokenizer_lib.WordTokenizer.load(directory / 'tokenizer.json')
  except ValueError as error:
    raise PolicyError(str(error)) from error
  if tokenizer.vocab_size > config.vocab_size:
    raise PolicyError(
      f'{directory}: the tokenizer has {tokenizer.vocab_size} ids, the model '
      f'only {config.vocab_size}'
    )
  path = directory / 'model.safetensors'
  try:
    params = safetensors.numpy.load_file(path)
  except (OSError, safetensors.SafetensorError) as error:
    raise PolicyError(f'cannot read the parameters {path}: {error}') from error
  try:
    parameters.check(config, params)
  except ValueError as error:
    raise PolicyError(f'{path}: {error}') from error
  return Policy(config, params, tokenizer)


def _read_config(path: pathlib.Path) -> dense.DecoderConfig:
  try:
    fields = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    raise PolicyError(f'cannot read the model sizes {path}: {error}') from error
  if (
    not isinstance(fields, dict) or fields.pop('model_type', '') != _MODEL_TYPE
  ):
    raise PolicyError(f'{path}: model_type must be {_MODEL_TYPE!r}')
  try:
    return dense.DecoderConfig(**fields)
  except (TypeError, ValueError) as error:
    raise PolicyError(f'{path}: {error}') from error
