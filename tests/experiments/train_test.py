"""What a user reads when a run cannot start or go on."""

import pytest
import tiny_world
import train

from spopp_jax.models import policy_files
from spopp_jax.runner import experiment


@pytest.fixture
def said(tmp_path, capsys, jax_settings):
  """Returns the one sentence that training ends with."""

  def ended(*settings):
    words = [*tiny_world.SETTINGS, f'run.directory={tmp_path / "runs"}']
    argv = [
      'train.py',
      f'--config={tiny_world.ROOT / "configs" / "common.py"}',
      *(f'--config.{word}' for word in (*words, *settings)),
    ]
    with pytest.raises(SystemExit) as caught:
      train.main(argv)
    assert capsys.readouterr().out == ''
    assert isinstance(caught.value.code, str)  # status 1, said on stderr
    return caught.value.code

  return ended


def test_a_missing_policy_is_named_with_what_makes_one(said, tmp_path):
  message = said(f'cold_start.policy={tmp_path}/nowhere')
  assert not list((tmp_path / 'runs').glob('*'))  # nothing takes the name
  assert message.startswith('train.py: error: ')
  assert f'{tmp_path}/nowhere is not a directory' in message
  assert 'experiments/cold_start.py' in message


@pytest.mark.parametrize(
  'name', ['config.json', 'model.safetensors', 'tokenizer.json']
)
def test_a_cut_policy_file_is_named(said, tmp_path, name):
  config = tiny_world.load(tmp_path)
  policy_files.save(tmp_path / 'policy', tiny_world.random_policy(config))
  path = tmp_path / 'policy' / name
  path.write_bytes(path.read_bytes()[:-5])
  assert str(path) in said(f'cold_start.policy={tmp_path}/policy')


def test_missing_games_are_named(said, tmp_path):
  assert f'{tmp_path}/games' in said(f'environment.path={tmp_path}/games')


def test_a_run_that_is_not_there_cannot_be_resumed(said, tmp_path):
  message = said('run.resume=True', 'run.name=gone')
  assert f'no run to resume at {tmp_path}/runs/gone' in message
  assert not (tmp_path / 'runs' / 'gone').exists()


def test_interruption_says_how_to_go_on(said, monkeypatch):
  def interrupted(config, stop, lead):
    del config, stop, lead
    raise KeyboardInterrupt

  monkeypatch.setattr(experiment, 'run', interrupted)
  message = said()
  assert 'interrupted' in message
  assert '--config.run.resume=True' in message


def test_a_bug_is_not_disguised_as_a_mistake_of_the_user(said, monkeypatch):
  def broken(config, stop, lead):
    del config, stop, lead
    raise ZeroDivisionError

  monkeypatch.setattr(experiment, 'run', broken)
  with pytest.raises(ZeroDivisionError):
    train.main(
      ['train.py', f'--config={tiny_world.ROOT / "configs" / "common.py"}']
    )


def test_help_names_the_settings(capsys):
  with pytest.raises(SystemExit) as caught:
    train.main(['train.py', '--help'])
  assert caught.value.code == 0
  assert '--config.run.resume' in capsys.readouterr().out
