"""Builds both ends of the sampler service from one configuration."""

import functools
import pathlib
import re
import sys

import ml_collections

from spopp_jax import types
from spopp_jax.envs import base as envs
from spopp_jax.models import (
  chat_formats,
  chat_template,
  parameters,
  policy_files,
  word_tokenizer,
)
from spopp_jax.models import tokenizer as tokenizer_lib
from spopp_jax.runner import (
  batcher,
  config_rules,
  pauses,
  preemption,
  sampler_list,
)
from spopp_jax.runner import config as config_lib
from spopp_jax.sampler import base as sampler_base
from spopp_jax.sampler import (
  client,
  credentials,
  engine,
  failures,
  handshake,
  local,
  member,
  pool,
  publication,
  retries,
  rollout,
  service,
)
from spopp_jax.sampler.external import engine as external

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SCHEMA = _ROOT / 'configs' / 'common.py'
# Requests that one service holds at a time, queued and running.
MAX_PENDING = 4096


def sampling_params(config: ml_collections.ConfigDict) -> types.SamplingParams:
  """Returns the decoding parameters of every request."""
  return types.SamplingParams(
    temperature=config.sampler.temperature,
    top_p=config.sampler.top_p,
    top_k=config.sampler.top_k,
    min_p=config.sampler.min_p,
    max_turn_tokens=config.sampler.max_turn_tokens,
    max_turns=config.environment.step_limit,
  )


def make_batcher(
  config: ml_collections.ConfigDict,
  sampler: sampler_base.Sampler,
  budget: retries.RetryBudget,
  *,
  directory: pathlib.Path | None = None,
  stop: preemption.StopRequest | None = None,
) -> batcher.Batcher:
  """Returns the runner's end of a sampler.

  Args:
    config: reads the blocks sampler and dispatch.
    sampler: serves the rollouts.
    budget: tries of a rollout, shared with the sampler.
    directory: the run's, which gets pauses.jsonl.
    stop: looked at while waiting.
  """
  return batcher.Batcher(
    sampler,
    sampling_params(config),
    budget=budget,
    keep_truncated=config.dispatch.keep_truncated,
    # A lost sampler is restored by the sampler's side in the meantime.
    rollout_timeout_s=config.sampler.rollout_timeout_s
    + config.sampler.recovery_timeout_s,
    max_given_up=2 * config.dispatch.in_flight,
    crosses_versions=config.dispatch.staleness == 'interruptible',
    pauses=pauses.Pauses(directory and directory / 'pauses.jsonl'),
    check_stop=(stop or preemption.StopRequest()).check,
  )


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
    stop_ids=(policy.tokenizer.end_id,),
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


def connect(
  config: ml_collections.ConfigDict,
  policy: policy_files.Policy,
  directory: pathlib.Path,
  tasks: envs.TaskSuite,
  budget: retries.RetryBudget,
  stop: preemption.StopRequest | None = None,
) -> sampler_base.Sampler:
  """Connects to the configured services and starts those of this run's own.

  Args:
    config: `sampler.addresses` decides.
    policy: what the services must serve.
    directory: the run's; holds `policy/`, gets samplers.txt and, of a service
      of its own, the log.
    tasks: what the services must offer.
    budget: tries of a rollout.
    stop: looked at while waiting.

  Raises:
    SamplerLost: not one service in time.
    Stopped: `stop` asks for it.
    HandshakeRefused: no service that fits.
  """
  expected = handshake.Expectation(
    tokenizer_fingerprint=make_template(config, policy.tokenizer).fingerprint,
    model_fingerprint=parameters.fingerprint(policy.config),
    tasks_fingerprint=rollout.tasks_fingerprint(tasks.task_ids),
    max_context_tokens=config.learner.row_length,
    vocab_size=policy.config.vocab_size,
  )
  timeout_s = config.sampler.connect_timeout_s
  transport = config.sampler.transport
  own = config_rules.sampler_credentials(config.sampler)
  allow_insecure = config.sampler.allow_insecure
  kept = failures.Failures(directory / 'failures')

  def make_connect(name: str) -> member.Connect:
    if sampler_list.is_own(name):
      return lambda deliver: local.LocalSampler(
        serve_command(config, directory / 'policy'),
        expected,
        log_path=directory / sampler_list.log_name(name),
        ready_deadline_s=timeout_s,
        transport=transport,
        deliver=deliver,
        failures=kept,
      )
    return lambda deliver: client.SamplerClient(
      name,
      expected,
      own=own,
      allow_insecure=allow_insecure,
      connect_deadline_s=timeout_s,
      transport=transport,
      deliver=deliver,
      failures=kept,
    )

  store = None
  if transport != 'grpc':
    store = publication.Store(directory / 'weights')
  names = sampler_list.SamplerList(
    directory,
    config.sampler.addresses,
    functools.partial(
      credentials.check_address, credentials=own, allow_insecure=allow_insecure
    ),
  )
  samplers = pool.Pool(
    names,
    make_connect,
    budget=budget,
    request_timeout_s=config.sampler.rollout_timeout_s,
    recovery_timeout_s=config.sampler.recovery_timeout_s,
    store=store,
  )
  samplers.start(timeout_s, (stop or preemption.StopRequest()).check)
  return samplers


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
