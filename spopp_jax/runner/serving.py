"""Builds the service of a sampler from one configuration."""

import pathlib
import re
import sys

import ml_collections

from spopp_jax.envs import base as envs
from spopp_jax.models import (
  chat_formats,
  chat_template,
  parameters,
  policy_files,
  word_tokenizer,
)
from spopp_jax.models import tokenizer as tokenizer_lib
from spopp_jax.runner import config as config_lib
from spopp_jax.runner import config_rules
from spopp_jax.sampler import base as sampler_base
from spopp_jax.sampler import credentials, engine, rollout, service
from spopp_jax.sampler.external import engine as external

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SCHEMA = _ROOT / 'configs' / 'common.py'
# Requests that one service holds at a time, queued and running.
MAX_PENDING = 4096


def make_template(
  config: ml_collections.ConfigDict, tokenizer: tokenizer_lib.Tokenizer
) -> word_tokenizer.WordTokenizer | chat_template.ChatTemplate:
  """Returns how the turns of an episode are written, and the ids that end one.

  Args:
    config: reads model.chat_format and model.system_prompt.
    tokenizer: of the policy.

  Raises:
    ConfigError: the two do not fit.
  """
  name, system = config.model.chat_format, config.model.system_prompt
  if isinstance(tokenizer, word_tokenizer.WordTokenizer):
    if name != 'words':
      raise config_rules.ConfigError(
        f"model.chat_format ({name!r}) must be 'words': the policy's tokenizer "
        'knows the words of games only'
      )
    return tokenizer
  if not isinstance(tokenizer, tokenizer_lib.PretrainedTokenizer):
    raise TypeError(f'{type(tokenizer).__name__} has no chat formats')
  if name == 'words':
    raise config_rules.ConfigError(
      "model.chat_format ('words') does not fit the policy's tokenizer, which "
      f'is a pretrained one; choose of {", ".join(chat_formats.FORMATS)}'
    )
  try:
    return chat_template.ChatTemplate(
      tokenizer, chat_formats.FORMATS[name], system=system
    )
  except ValueError as error:
    raise config_rules.ConfigError(f'model.chat_format: {error}') from error


def make_driver(
  config: ml_collections.ConfigDict,
  policy: policy_files.Policy,
  tasks: envs.TaskSuite,
  decoder: sampler_base.Engine | None = None,
) -> rollout.RolloutDriver:
  """Returns engine and environments joined, with no parameters loaded.

  Args:
    config: reads the block sampler.
    policy: sizes and tokenizer.
    tasks: what can be asked for.
    decoder: None is an engine in this process.
  """
  template = make_template(config, policy.tokenizer)
  return rollout.RolloutDriver(
    decoder
    or engine.DecodeEngine(
      policy.config,
      num_slots=config.sampler.slots,
      max_context=config.sampler.context_length,
      max_turn_tokens=config.sampler.max_turn_tokens,
      stop_ids=template.stop_ids,
    ),
    tasks,
    template,
  )


def external_engine(
  config: ml_collections.ConfigDict,
  policy: policy_files.Policy,
  address: str,
  directory: pathlib.Path,
) -> sampler_base.Engine:
  """Returns an engine in front of a vLLM or SGLang server.

  Args:
    config: reads the block sampler.
    policy: sizes and tokenizer.
    address: vllm:http://host:port or sglang:http://host:port.
    directory: weights are handed over in it; the server must see it under this
      name. Every server has a directory of its own there.

  Raises:
    ValueError: the address is none, or the server holds too few tokens.
    EngineError: the server cannot be reached or is not fit for this.
  """
  return external.connect(
    address,
    policy.config,
    num_slots=config.sampler.slots,
    max_context=config.sampler.context_length,
    max_turn_tokens=config.sampler.max_turn_tokens,
    stop_ids=make_template(config, policy.tokenizer).stop_ids,
    directory=directory / re.sub('[^a-zA-Z0-9.]+', '-', address),
    turn_deadline_s=config.sampler.rollout_timeout_s,
  )


def serve(
  config: ml_collections.ConfigDict,
  policy: policy_files.Policy,
  tasks: envs.TaskSuite,
  address: str,
  *,
  decoder: sampler_base.Engine | None = None,
  own: credentials.Credentials = credentials.NONE,
  allow_insecure: bool = False,
) -> service.SamplerServer:
  """Starts the service in this process.

  Args:
    config: reads the block sampler.
    policy: sizes and tokenizer; its parameters are not loaded, the runner
      publishes.
    tasks: what can be asked for.
    address: host:port (port 0 is any free one) or unix:path.
    decoder: None is an engine in this process.
    own: the service's credentials; those in the block sampler are the runner's.
    allow_insecure: True lets other machines in without TLS.
  """
  return service.serve(
    make_driver(config, policy, tasks, decoder),
    model_fingerprint=parameters.fingerprint(policy.config),
    address=address,
    own=own,
    allow_insecure=allow_insecure,
    max_pending=MAX_PENDING,
  )


def serve_command(
  config: ml_collections.ConfigDict, policy_directory: pathlib.Path
) -> list[str]:
  """Returns the command line of a service of this very configuration.

  All that differs from configs/common.py is said, also what a service does not
  read: rules that join several settings hold for the whole alone.
  """
  defaults = config_lib.leaf_values(config_lib.load_config(str(_SCHEMA)))
  return [
    sys.executable,
    str(_ROOT / 'experiments' / 'serve_sampler.py'),
    f'--config={_SCHEMA}',
    f'--policy={policy_directory}',
    *(
      f'--config.{name}={value}'
      for name, value in config_lib.leaf_values(config).items()
      if value != defaults[name]
    ),
  ]
