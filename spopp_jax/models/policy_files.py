"""A policy as a directory: config.json, safetensors and tokenizer files.

transformers and vLLM read such a directory as it is.
"""

import json
import pathlib
from typing import NamedTuple

import numpy as np

from spopp_jax.models import (
  config_files,
  dense,
  parameters,
  qwen3_5,
  tensor_files,
)
from spopp_jax.models import tokenizer as tokenizer_lib


class PolicyError(ValueError):
  """A policy directory is missing, broken or does not fit together."""


class Policy(NamedTuple):
  """A decoder's sizes, its parameters by name, and its tokenizer."""

  config: dense.DecoderConfig
  params: dict[str, np.ndarray]
  tokenizer: tokenizer_lib.Tokenizer


def save(directory: str | pathlib.Path, policy: Policy) -> None:
  """Writes the files; the directory is created.

  Tokenizer files are the very bytes that `load` read.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  ends = list(policy.tokenizer.stop_ids)
  fields = config_files.to_fields(policy.config) | {'eos_token_id': ends}
  config = json.dumps(fields, indent=2)
  (directory / 'config.json').write_text(config + '\n')
  for name, content in policy.tokenizer.files.items():
    (directory / name).write_bytes(content)
  tensor_files.write(directory, policy.params)


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
  try:
    config = config_files.read(directory / 'config.json')
  except ValueError as error:
    raise PolicyError(str(error)) from error
  try:
    tokenizer = tokenizer_lib.load(directory)
  except (ValueError, ModuleNotFoundError) as error:
    raise PolicyError(str(error)) from error
  if tokenizer.vocab_size > config.vocab_size:
    raise PolicyError(
      f'{directory}: the tokenizer has {tokenizer.vocab_size} ids, the model '
      f'only {config.vocab_size}'
    )
  try:
    params = tensor_files.read(directory)
    params = _without_tied(config, _text_decoder(config, params))
    parameters.check(config, params)
    _check_finite(params)
  except ValueError as error:
    raise PolicyError(f'{directory}: {error}') from error
  return Policy(config, params, tokenizer)


def _check_finite(params: dict[str, np.ndarray]) -> None:
  strange = [n for n, array in params.items() if not np.isfinite(array).all()]
  if strange:
    raise ValueError(
      f'{len(strange)} tensors hold NaN or infinity, first {min(strange)}'
    )


def _text_decoder(
  config: dense.DecoderConfig, params: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Takes a Qwen3.5 out of what also sees pictures and drafts tokens."""
  if not isinstance(config, qwen3_5.Config):
    return params
  return {
    name.replace('model.language_model.', 'model.', 1): array
    for name, array in params.items()
    if not name.startswith(('model.visual.', 'mtp.'))
  }


def _without_tied(
  config: dense.DecoderConfig, params: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Removes an output matrix that repeats the embedding it is tied to."""
  if config.tie_word_embeddings and 'lm_head.weight' in params:
    embedding = params.get('model.embed_tokens.weight', np.zeros(0))
    if not np.array_equal(params['lm_head.weight'], embedding):
      raise ValueError(
        'lm_head.weight differs from model.embed_tokens.weight, and '
        'tie_word_embeddings says that they are one'
      )
    del params['lm_head.weight']
  return params
