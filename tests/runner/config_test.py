import pathlib
import subprocess
import sys

import pytest

from spopp_jax.runner import config as config_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / 'configs' / 'quickstart.py')


def load(*overrides):
  return config_lib.load_config(QUICKSTART, overrides)


def refused(*overrides):
  with pytest.raises(config_lib.ConfigError) as caught:
    load(*overrides)
  return str(caught.value)


def write_config(directory, body):
  path = directory / 'mine.py'
  path.write_text(
    'from configs import common\n'
    f'def get_config(arg=""):\n  config = common.get_config()\n  {body}\n'
    '  return config\n'
  )
  return str(path)


def test_both_spellings_and_every_type_are_taken():
  config = load(
    'objective.name=spo',
    '--config.run.steps=7',
    'config.optimizer.learning_rate=1',
    '--config.run.resume',
    'run.progress=false',
    'objective.clip_low=0.1',
    'objective.measure=trajectory',
    'learner.row_buckets=(2, 6)',
    'environment.task_types=("put", "heat")',
  )
  assert config.objective.name == 'spo'
  assert config.run.steps == 7
  assert config.optimizer.learning_rate == 1.0
  assert type(config.optimizer.learning_rate) is float
  assert config.run.resume is True
  assert config.run.progress is False
  assert config.objective.clip_low == 0.1
  assert config.objective.measure == 'trajectory'
  assert config.objective.dual_clip is None
  assert config.learner.row_buckets == (2, 6)
  assert config.environment.task_types == ('put', 'heat')
  assert config.is_locked


def test_the_file_is_not_changed_by_an_override():
  load('run.steps=7')
  assert load().run.steps != 7


@pytest.mark.parametrize(
  'override, nearest',
  [
    ('objective.clip_loww=0.3', 'objective.clip_low'),
    ('optimiser.learning_rate=1e-3', 'optimizer.learning_rate'),
    ('steps=3', 'run.steps'),
    ('--config.sampler.adresses=x', 'sampler.addresses'),
    ('--config.seed.x=3', 'seed'),
    ('--conifg.seed=3', 'seed'),
    ('--batch_size=3', 'batch_size'),
  ],
)
def test_unknown_name_is_refused_with_the_nearest(override, nearest):
  message = refused(override)
  assert 'unknown setting' in message
  assert nearest in message.split('did you mean')[1]


def test_a_group_cannot_be_overridden_as_a_whole():
  assert 'run.steps' in refused("run={'steps': 3}")


@pytest.mark.parametrize(
  'override, words',
  [
    ('run.steps=1e3', ['run.steps', '1e3', 'whole number']),
    ('run.steps=many', ['run.steps', 'many', 'whole number']),
    ('run.steps=None', ['run.steps', 'None', 'whole number']),
    ('run.resume=maybe', ['run.resume', 'maybe', 'true or false']),
    ('objective.dual_clip=None', ['objective.dual_clip', 'None', 'number']),
    ('learner.row_buckets=(1, 8.0)', ['learner.row_buckets', '8.0', 'whole']),
    ('learner.row_buckets=()', ['learner.row_buckets', 'empty']),
    ('environment.task_types=(1,)', ['environment.task_types', '1', 'text']),
    ('run.steps', ['run.steps']),
  ],
)
def test_ill_typed_override_is_refused(override, words):
  message = refused(override)
  for word in words:
    assert word in message


@pytest.mark.parametrize(
  'overrides, names',
  [
    (['run.steps=0'], ['run.steps (0)']),
    (['seed=-1'], ['seed (-1)']),
    (['optimizer.learning_rate=nan'], ['optimizer.learning_rate (nan)']),
    (['optimizer.learning_rate=inf'], ['optimizer.learning_rate (inf)']),
    (['optimizer.b2=1'], ['optimizer.b2 (1.0)', '[0, 1)']),
    (['evidence.retention=1.5'], ['retention (1.5)', '(0, 1]']),
    (
      ['objective.name=spo', 'evidence.retention_min=0.97'],
      ['retention_min', 'retention_max'],
    ),
    (['evidence.retention_min=0.9'], ["'retention_min'", 'event_time']),
    (['sampler.temperature=0'], ['sampler.temperature (0.0)', '(0, inf)']),
    (['sampler.top_p=0'], ['sampler.top_p (0.0)', '(0, 1]']),
    (['sampler.top_p=1.01'], ['sampler.top_p (1.01)', '(0, 1]']),
    (['sampler.top_k=-1'], ['sampler.top_k (-1)', '[0, 4294967295]']),
    (
      ["sampler.addresses=('localhost',)"],
      ["'localhost'", 'host:port', "'local'"],
    ),
    (['dispatch.max_lag=2'], ['dispatch.max_lag (2)', '0 or 1', 'drain']),
    (['dispatch.max_lag=-1'], ['dispatch.max_lag (-1)']),
    (['dispatch.staleness=drains'], ["'drains'", 'interruptible']),
    (
      ['dispatch.staleness=scheduled', 'dispatch.max_lag=0'],
      ['dispatch.max_lag (0)', 'at least 1', 'scheduled'],
    ),
    (['dispatch.discard_overdue=true'], ['discard_overdue', 'drain']),
    (
      [
        'dispatch.staleness=bounded',
        'dispatch.discard_overdue=true',
        'dispatch.in_order=true',
      ],
      ['discard_overdue', 'in_order', 'exclude'],
    ),
    (
      ['dispatch.staleness=bounded', 'dispatch.in_order=true'],
      ['in_order', "evidence_from='consumed'"],
    ),
    (
      ['dispatch.staleness=scheduled', 'dispatch.batch_size=129'],
      ['batch_size (129)', 'in_flight'],
    ),
    (['dispatch.per_prompt=0'], ['dispatch.per_prompt (0)', '[1, inf)']),
    (['dispatch.evidence_from=sent'], ["'sent'", 'received, consumed']),
    (['dispatch.in_flight=95'], ['in_flight (95)', 'batch_size (96)']),
    (['environment.num_tasks=95'], ['in_flight (96)', 'num_tasks (95)']),
    (
      ['environment.path=games', 'environment.num_tasks=95'],
      ['in_flight (96)', 'num_tasks (95)'],
    ),
    (
      ['dispatch.batch_size=3', 'learner.minibatches=4'],
      ['batch_size (3)', 'minibatches (4)'],
    ),
    (
      ['objective.name=tetpo', 'dispatch.batch_size=92'],
      ['batch_size (92)', 'group_size (8)', 'whole'],
    ),
    (
      ['objective.name=grpo', 'environment.num_tasks=11'],
      ['in_flight (96)', 'num_tasks (11)', 'group_size (8)'],
    ),
    (
      ['objective.name=grpo', 'learner.minibatches=13'],
      ['batch_size (96)', 'minibatches (13)', 'group_size (8)'],
    ),
    (
      ['objective.name=grpo', 'evidence.retention=0.9'],
      ["'retention'", 'none'],
    ),
    (['objective.group_size=8'], ['group_size (8) must be 1']),
    (['objective.correction=tempered'], ["tempering_scope 'batch'"]),
    (['learner.row_length=100'], ['row_length (100)', 'context_length']),
    (['sampler.max_turn_tokens=500'], ['max_turn_tokens (500)']),
    (['model.num_key_value_heads=3'], ['num_key_value_heads (3)', '(4)']),
    (['model.head_dim=15'], ['head_dim (15)', 'even']),
    (['model.chat_format=chatml'], ["'chatml'", 'words, plain, qwen3']),
    (
      ['model.system_prompt=Be brief.'],
      ["system_prompt ('Be brief.')", "chat_format 'words'"],
    ),
    (['learner.row_buckets=(8, 4)'], ['row_buckets', 'rising']),
    (['hosts.index=1'], ['hosts.index (1)', 'below hosts.count (1)']),
    (['hosts.coordinator=:80'], ['hosts.coordinator', 'host:port']),
    (['hosts.coordinator=a:99999'], ['a:99999', '1 to 65535']),
    (['objective.dual_clip=1.0'], ['objective', 'dual_clip (1.0)', 'exceed 1']),
    (['objective.measure=token'], ["'token'", 'action_token']),
    (['objective.name=spoppp'], ["'spoppp'", "'spopp'"]),
    (
      ["sampler.addresses=('10.1.2.3:500',)", f'sampler.token_file={__file__}'],
      ['10.1.2.3:500', 'sampler.tls_ca', 'sampler.allow_insecure'],
    ),
    (['sampler.tls_ca=no/ca.pem'], ["sampler.tls_ca ('no/ca.pem')", 'file']),
    (['sampler.tls_key=no/key'], ["sampler.tls_key ('no/key')"]),
    (['sampler.tls_certificate=no'], ["sampler.tls_certificate ('no')"]),
    (['sampler.token_file=no/token'], ["sampler.token_file ('no/token')"]),
    (
      [f'sampler.tls_ca={__file__}', f'sampler.tls_key={__file__}'],
      ["certificate ('')", 'sampler.tls_certificate', 'all three'],
    ),
    (['run.name='], ['run.name']),
    (['run.name=../x'], ['run.name', "'../x'", 'one directory']),
    (["sampler.addresses=('10.1.2.3:500',)"], ['10.1.2.3:500', 'ssh -L']),
    (["sampler.addresses=('localhost:abc',)"], ['localhost:abc', 'host:port']),
    (["environment.task_types=('fly',)"], ['task_types', "'fly'", 'heat']),
    (["environment.task_types=('put', 'put')"], ['task_types', 'distinct']),
  ],
)
def test_values_that_exclude_each_other_are_refused(overrides, names):
  message = refused(*overrides)
  for name in names:
    assert name in message


def test_another_machine_is_allowed_with_tls_or_by_name():
  elsewhere = "sampler.addresses=('10.1.2.3:500',)"
  load(elsewhere, 'sampler.allow_insecure=True')
  names = ('tls_ca', 'tls_certificate', 'tls_key')
  load(elsewhere, *(f'sampler.{name}={__file__}' for name in names))


def test_allowed_ends_are_allowed():
  load('optimizer.b2=0', 'objective.dual_clip=0')
  load('environment.num_tasks=96')
  load('objective.name=tetpo', 'environment.num_tasks=12')


def test_a_type_lost_after_none_is_refused():
  # ml_collections lets a None'd leaf take any type afterwards.
  config = load().unlock()
  config.run.steps = None
  with pytest.raises(config_lib.ConfigError, match=r'run\.steps \(None\)'):
    config_lib.validate_config(config)
  config.run.steps = True
  with pytest.raises(config_lib.ConfigError, match=r'run\.steps \(True\)'):
    config_lib.validate_config(config)
  config.run.steps = None
  config.run.steps = 'many'
  with pytest.raises(config_lib.ConfigError, match=r"run\.steps \('many'\)"):
    config_lib.validate_config(config)


def test_added_and_missing_leaves_are_refused():
  config = load().unlock()
  config.run.stepz = 3
  with pytest.raises(config_lib.ConfigError, match=r'run\.stepz.*run\.steps'):
    config_lib.validate_config(config)
  del config.run.stepz
  del config.run.steps
  with pytest.raises(config_lib.ConfigError, match=r'run\.steps is missing'):
    config_lib.validate_config(config)


def test_a_file_anywhere_may_derive_from_configs(tmp_path):
  config = config_lib.load_config(
    write_config(tmp_path, 'config.run.steps = 3'), ['seed=4']
  )
  assert (config.run.steps, config.seed) == (3, 4)


@pytest.mark.parametrize(
  'body, words',
  [
    ('config.run.stepz = 3', 'stepz'),
    ('config.run.steps = "3"', 'steps'),
    ('config.run.steps = 0', 'run.steps'),
    ('config = 3', 'ConfigDict'),
    ('raise ValueError("not today")', 'not today'),
  ],
)
def test_a_wrong_file_is_refused(tmp_path, body, words):
  with pytest.raises(config_lib.ConfigError, match=words):
    config_lib.load_config(write_config(tmp_path, body))


def test_the_text_after_a_colon_is_the_argument(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(
    'from configs import common\n'
    'def get_config(arg="plain"):\n  config = common.get_config()\n'
    '  config.run.name = arg\n  return config\n'
  )
  assert config_lib.load_config(str(path)).run.name == 'plain'
  assert config_lib.load_config(f'{path}:large').run.name == 'large'
  assert 'no argument' in refused_path(f'{QUICKSTART}:large')


def refused_path(path):
  with pytest.raises(config_lib.ConfigError) as caught:
    config_lib.load_config(path)
  return str(caught.value)


def test_a_missing_file_is_named():
  assert 'nowhere.py' in refused_path('configs/nowhere.py')


def test_command_line_equals_load_config():
  words = [
    'objective.name=spo',
    'run.steps=7',
    'run.resume=true',
    'learner.row_buckets=(2, 6)',
  ]
  expected = load(*words)
  joined = [f'--config.{word}' for word in words]
  split = [part for word in joined for part in word.split('=', 1)]
  split.remove('true')  # A bool takes its value after '=' or none at all.
  for argv in (
    ['train.py', f'--config={QUICKSTART}', *joined],
    ['train.py', *joined, '--config', QUICKSTART],
    ['train.py', '-config', QUICKSTART, *split],
  ):
    assert config_lib.parse_command_line(argv) == expected


def test_refusal_is_one_sentence_and_a_status(capsys):
  for argv in (
    ['train.py', f'--config={QUICKSTART}', '--config.run.stepz=3'],
    ['train.py', '--config.run.steps=3'],
    ['train.py', f'--config={QUICKSTART}', 'run.steps=3'],
  ):
    with pytest.raises(SystemExit) as caught:
      config_lib.parse_command_line(argv)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith('train.py: error: ')
    assert message.count('\n') == 1


def test_a_refusal_touches_no_device_and_writes_nothing(tmp_path):
  program = (
    'import sys\n'
    'from spopp_jax.runner import config\n'
    'try:\n'
    '  config.parse_command_line(sys.argv)\n'
    'finally:\n'
    '  from jax._src import xla_bridge\n'
    '  print("backends", len(xla_bridge._backends))\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', program, f'--config={QUICKSTART}', '--config.x=1'],
    cwd=tmp_path,
    env={'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.returncode == 2
  assert done.stdout == 'backends 0\n'
  assert "unknown setting 'x'" in done.stderr
  assert list(tmp_path.iterdir()) == []


def test_help_describes_every_setting(capsys):
  with pytest.raises(SystemExit) as caught:
    config_lib.parse_command_line(
      ['train.py', '--help', f'--config={QUICKSTART}']
    )
  assert caught.value.code == 0
  text = capsys.readouterr().out
  lines = text.splitlines()
  for name, value in config_lib.leaf_values(load()).items():
    (at,) = [
      number
      for number, line in enumerate(lines)
      if line.startswith(f'  --config.{name} (') and repr(value) in line
    ]
    assert len(lines[at + 1].strip()) > 10, f'{name} has no description'
  assert '--config.objective.clip_low (float: None)' in text


def test_no_setting_is_a_list_or_dict():
  # The command line cannot override them.
  values = config_lib.leaf_values(load())
  assert not any(isinstance(value, list | dict) for value in values.values())


def test_notebooks_may_give_values_and_paths():
  path = ROOT / 'configs' / 'common.py'
  texts = ['run.steps=3', 'learner.row_buckets=(2, 6)', 'run.progress=False']
  values = {
    'run.steps': 3,
    'learner.row_buckets': (2, 6),
    'run.progress': False,
  }
  assert config_lib.load_config(path, values) == (
    config_lib.load_config(str(path), texts)
  )


@pytest.mark.parametrize('overrides', ['run.steps=3', [3], {3}])
def test_what_are_no_overrides_is_refused(overrides):
  path = ROOT / 'configs' / 'common.py'
  with pytest.raises(config_lib.ConfigError, match='must be a list such as'):
    config_lib.load_config(path, overrides)


@pytest.mark.parametrize('body', ['def f(:', 'x = 1 / 0', 'x = {}["a"]', 'y'])
def test_a_file_with_a_mistake_is_named(tmp_path, body):
  path = tmp_path / 'mine.py'
  path.write_text(body)
  with pytest.raises(config_lib.ConfigError, match=r'mine\.py: .*Error'):
    config_lib.load_config(path)
