import contextlib
import dataclasses
import itertools
import pathlib
import sys

import external_world
import numpy as np
import pytest
import small_tokenizers
import tiny_world

from spopp_jax import envs, types
from spopp_jax.envs import base as envs_base
from spopp_jax.models import (
  parameters,
  policy_files,
  tokenizer,
  word_tokenizer,
)
from spopp_jax.runner import cold_start, sampling, serving
from spopp_jax.runner import config as config_lib
from spopp_jax.sampler import base as sampler_base
from spopp_jax.sampler import credentials, errors, retries


def served(config):
  """Returns the settings that the service of a run would parse."""
  program, script, *words = serving.serve_command(
    config, pathlib.Path('policy')
  )
  assert program == sys.executable
  assert pathlib.Path(script).name == 'serve_sampler.py'
  assert '--policy=policy' in words
  words.remove('--policy=policy')
  return config_lib.parse_command_line(['serve_sampler.py', *words])


def changed(config):
  """Changes every setting of a service to another one of its kind."""
  for name, value in config_lib.leaf_values(config).items():
    block, _, key = name.rpartition('.')
    if block in ('environment', 'sampler') and key not in ('name', 'size'):
      new = {
        bool: lambda v: not v,
        int: lambda v: v + 1,
        float: lambda v: v + 0.5,
        str: lambda v: v + 'unix:a path with spaces',
        tuple: lambda v: (*v, 'heat' if v == ('put',) else 'unix:heat'),
      }[type(value)](value)
      config[block][key] = new
  config.environment.size = 'medium'
  config.model.chat_format = 'qwen3'
  config.model.system_prompt = "Don't look,\n--just go."
  config.sampler.top_p = 0.5
  config.sampler.transport = 'grpc'
  config.sampler.compute_dtype = 'bfloat16'
  for name in ('tls_ca', 'tls_certificate', 'tls_key', 'token_file'):
    config.sampler[name] = __file__
  return config


def test_the_service_gets_every_setting_of_its_run(tmp_path):
  config = changed(tiny_world.load(tmp_path))
  assert served(config) == config


def test_settings_that_hold_only_together_reach_the_service(tmp_path):
  # The default dispatch asks for more requests than there are tasks here.
  config = tiny_world.load(tmp_path, 'run.resume=True')
  assert served(config).environment.num_tasks == 10
  assert served(config) == config


def test_a_run_shows_its_certificate_and_token(tmp_path):
  files = tiny_world.ROOT / 'tests/sampler/certificates'
  (tmp_path / 'token').write_text('0123456789abcdef')
  (tmp_path / 'another').write_text('fedcba9876543210')

  def own(name, token='token'):
    return (
      f'{files}/ca.pem',
      f'{files}/{name}.pem',
      f'{files}/{name}.key',
      f'{tmp_path}/{token}',
    )

  config = tiny_world.load(tmp_path)
  policy = tiny_world.random_policy(config)
  tasks = envs.load_tasks(config.environment)
  server = serving.serve(
    config,
    policy,
    tasks,
    '0.0.0.0:0',
    own=credentials.Credentials(*own('server')),
  )
  config.sampler.addresses = (f'127.0.0.1:{server.address.split(":")[1]}',)
  config.sampler.connect_timeout_s = 0.5

  def connect():
    return sampling.connect(
      config, policy, tmp_path, tasks, retries.RetryBudget(1)
    )

  names = ('tls_ca', 'tls_certificate', 'tls_key', 'token_file')
  try:
    with pytest.raises(errors.SamplerLost, match=r'sampler\.tls_certificate'):
      connect()
    config.sampler.update(
      dict(zip(names, own('client', 'another'), strict=True))
    )
    with pytest.raises(errors.HandshakeRefused, match=r'sampler\.token_file'):
      connect()
    config.sampler.update(dict(zip(names, own('client'), strict=True)))
    sampler = connect()
    sampler.publish(policy.params, 1)
    sampler.close()
  finally:
    server.stop()


def test_an_external_engine_serves_the_run(tmp_path):
  config = tiny_world.load(tmp_path)
  policy = tiny_world.random_policy(config)
  tasks = envs.load_tasks(config.environment)
  embedding = policy.params[external_world.EMBEDDING]
  weights = np.random.default_rng(0).normal(0, 0.5, embedding.shape)
  with contextlib.closing(
    external_world.FakeVllm({external_world.EMBEDDING: weights})
  ) as fake:
    decoder = serving.external_engine(
      config, policy, fake.address, tmp_path / 'handover'
    )
    server = serving.serve(
      config, policy, tasks, '127.0.0.1:0', decoder=decoder
    )
    config.sampler.addresses = (server.address,)
    try:
      sampler = sampling.connect(
        config, policy, tmp_path, tasks, retries.RetryBudget(1)
      )
      checksum = sampler.publish(policy.params, 1)
      params = sampling.sampling_params(config)
      sampler.submit(
        [sampler_base.Request('r', tasks.task_ids[0], 1, 5, params)]
      )
      answer = sampler.next(external_world.WAIT_S)
      sampler.close()
    finally:
      server.stop()
  assert answer.status == types.Status.OK, answer.detail
  assert answer.weights_checksum == checksum
  (own,) = (tmp_path / 'handover').iterdir()
  assert own.name == f'vllm-http-{fake.url.split("//")[1].replace(":", "-")}'
  assert [path.name for path in own.iterdir()] == [f'1-{checksum}']
  _, body = fake.asked[-1]
  wanted = body['sampling_params']
  assert wanted['stop_token_ids'] == [policy.tokenizer.end_id]
  assert wanted['max_tokens'] == config.sampler.max_turn_tokens


def test_defaults_are_not_said(tmp_path):
  config = config_lib.load_config(str(tiny_world.ROOT / 'configs/common.py'))
  words = serving.serve_command(config, tmp_path)
  assert not [word for word in words if word.startswith('--config.')]


@pytest.fixture
def words_of_qwen(tmp_path):
  pytest.importorskip('transformers')
  small_tokenizers.write(tmp_path / 'qwen', 'qwen')
  return tokenizer.load(tmp_path / 'qwen')


def test_a_chat_is_written_as_the_settings_say(tmp_path, words_of_qwen):
  config = tiny_world.load(
    tmp_path, 'model.chat_format=qwen3', 'model.system_prompt=Be brief.'
  )
  template = serving.make_template(config, words_of_qwen)
  assert words_of_qwen.decode(template.prompt('Hi')) == (
    '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n'
    '<|im_start|>assistant\n'
  )
  other = tiny_world.load(tmp_path, 'model.chat_format=qwen3')
  assert (
    serving.make_template(other, words_of_qwen).fingerprint
    != template.fingerprint
  )


def test_the_words_of_games_are_their_own_template(tmp_path):
  words = word_tokenizer.WordTokenizer.build(['go to desk 1'])
  config = tiny_world.load(tmp_path)
  assert serving.make_template(config, words) is words
  config = tiny_world.load(tmp_path, 'model.chat_format=llama3')
  with pytest.raises(
    config_lib.ConfigError, match=r"chat_format \('llama3'\) must be 'words'"
  ):
    serving.make_template(config, words)


def test_a_chat_format_that_does_not_fit_is_refused(tmp_path, words_of_qwen):
  with pytest.raises(
    config_lib.ConfigError, match=r"chat_format \('words'\).*choose of plain"
  ):
    serving.make_template(tiny_world.load(tmp_path), words_of_qwen)
  config = tiny_world.load(tmp_path, 'model.chat_format=llama3')
  with pytest.raises(
    config_lib.ConfigError, match=r'chat_format: .*llama3 does not fit'
  ):
    serving.make_template(config, words_of_qwen)


class Refusing:
  """A task suite of one that says no to whatever it is told."""

  task_ids = ('refuse',)

  def make(self, task_id):
    return self

  def reset(self):
    return 'Hi'

  def step(self, action):
    return envs_base.StepResult('No', done=False, success=False)


def says(config, vocab_size, chances):
  """Returns sizes and parameters that draw ids by chance, whatever was said."""
  sizes = dataclasses.replace(
    cold_start.decoder_config(config.model, vocab_size),
    tie_word_embeddings=False,
  )
  _, abstract = parameters.graph(sizes)
  params = {k: np.zeros(v.shape, np.float32) for k, v in abstract.items()}
  for name, value in params.items():
    if name.endswith(('norm.weight', 'embed_tokens.weight')):
      value[:] = 1
  # Every hidden state is all ones, so a row's sum is the id's logit.
  logits = np.full(vocab_size, -100.0)
  logits[list(chances)] = np.log(list(chances.values()))
  params['lm_head.weight'][:] = logits[:, None] / sizes.hidden_size
  return sizes, params


def test_a_chat_is_played_in_ids(tmp_path, words_of_qwen):
  (word,) = words_of_qwen.encode('go').tolist()
  stops = end, text_end = [
    words_of_qwen.special_id(t) for t in ('<|im_end|>', '<|endoftext|>')
  ]
  config = tiny_world.load(
    tmp_path,
    'model.chat_format=qwen3',
    *('sampler.context_length=128', 'sampler.max_turn_tokens=3'),
    *('learner.row_length=128', 'environment.step_limit=7'),
  )
  sizes, params = says(
    config, words_of_qwen.vocab_size, {word: 0.7, end: 0.15, text_end: 0.15}
  )
  policy = policy_files.Policy(sizes, params, words_of_qwen)
  driver = serving.make_driver(config, policy, Refusing())
  driver.load(params, version=0, checksum='')
  request = sampler_base.Request(
    request_id='1',
    task_id='refuse',
    seed=3,
    policy_version=0,
    sampling=sampling.sampling_params(config),
  )
  driver.submit(request)
  finished = []
  for _ in range(200):
    finished += driver.step()
  (trajectory,) = finished
  assert (trajectory.status, trajectory.num_turns) == (types.Status.OK, 7)
  runs = [
    (is_action, [token for token, _ in run])
    for is_action, run in itertools.groupby(
      zip(trajectory.tokens.tolist(), trajectory.action_mask, strict=True),
      key=lambda pair: pair[1],
    )
  ]
  turns = [ids for is_action, ids in runs if is_action]
  assert len(turns) == 7
  kinds = set()
  for i, (is_action, ids) in enumerate(runs):
    if is_action:
      # The first stop id ends a turn, and nothing else is one.
      assert not set(ids[:-1]) & set(stops)
      assert ids[-1] in stops or len(ids) == 3
      kinds.add(ids[-1])
    elif i:
      # What the policy did not sample of an end was written for it.
      closing = [] if runs[i - 1][1][-1] == end else [end]
      assert ids[: len(closing) + 1] == [
        *closing,
        *words_of_qwen.encode('\n').tolist(),
      ]
      shown = words_of_qwen.decode(ids[len(closing) :])
      assert shown == (
        '\n<|im_start|>user\nNo<|im_end|>\n<|im_start|>assistant\n'
      )
  assert kinds == {word, end, text_end}
