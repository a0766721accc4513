import socket

import pytest
import serve_sampler
import tiny_world

from spopp_jax.models import policy_files


@pytest.fixture
def said(tmp_path, jax_settings):
  """Returns the one sentence that the service ends with."""

  def ended(*arguments):
    words = [*tiny_world.SETTINGS, f'run.directory={tmp_path / "runs"}']
    argv = [
      'serve_sampler.py',
      f'--config={tiny_world.ROOT / "configs" / "common.py"}',
      *(f'--config.{word}' for word in words),
      *arguments,
    ]
    with pytest.raises(SystemExit) as caught:
      serve_sampler.main(argv)
    return caught.value.code

  return ended


@pytest.fixture
def policy(tmp_path):
  path = tmp_path / 'policy'
  config = tiny_world.load(tmp_path)
  policy_files.save(path, tiny_world.random_policy(config))
  return f'--policy={path}'


def test_a_policy_is_needed(said):
  assert '--policy=DIRECTORY is needed' in said()


def test_a_missing_policy_is_named(said, tmp_path):
  message = said(f'--policy={tmp_path}/nowhere')
  assert message.startswith('serve_sampler.py: error: ')
  assert f'{tmp_path}/nowhere' in message


def test_addresses_that_leave_the_machine_are_refused(said, policy):
  message = said(policy, '--address=0.0.0.0:0')
  assert "'0.0.0.0:0'" in message
  assert 'not of this machine' in message


def test_files_of_tls_are_asked_for_by_flag(said, policy, tmp_path):
  files = {name: f'{tmp_path}/{name}' for name in ('ca', 'certificate', 'key')}
  words = [f'--tls_{name}={path}' for name, path in files.items()]
  message = said(policy, '--address=0.0.0.0:0', *words)
  assert f'ca ({tmp_path}/ca) cannot be read' in message
  assert 'all three or none' in said(policy, words[0])
  message = said(policy, f'--token_file={tmp_path}/token')
  assert f'token ({tmp_path}/token) cannot be read' in message


def test_insecure_service_is_asked_for_by_name(said, policy, tmp_path):
  # The token would go out in the clear, so even this is refused.
  flags = ('--allow_insecure', f'--token_file={tmp_path}/token')
  message = said(policy, '--address=0.0.0.0:0', *flags)
  assert 'in the clear' in message


def test_missing_games_are_named(said, policy, tmp_path):
  message = said(policy, f'--config.environment.path={tmp_path}/games')
  assert f'{tmp_path}/games' in message


def test_engines_that_cannot_be_used_are_named(said, policy):
  message = said(policy, '--engine=http://127.0.0.1:8000')
  assert 'vllm or sglang' in message
  with socket.create_server(('127.0.0.1', 0)) as listener:
    port = listener.getsockname()[1]
  message = said(policy, f'--engine=vllm:http://127.0.0.1:{port}')
  assert f'http://127.0.0.1:{port} cannot be reached' in message
