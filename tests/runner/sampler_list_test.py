import functools
import os

import pytest

from spopp_jax.runner import sampler_list
from spopp_jax.sampler import credentials


def edit(path, text, at_ns):
  """Writes the file as if some time had passed."""
  path.write_text(text)
  os.utime(path, ns=(at_ns, at_ns))


def test_local_services_are_numbered_and_all_stand_in_the_file(tmp_path):
  names = sampler_list.SamplerList(
    tmp_path, ('local', '127.0.0.1:5000', 'local')
  )
  expected = ['local-0', '127.0.0.1:5000', 'local-1']
  assert names() == expected
  text = (tmp_path / 'samplers.txt').read_text()
  assert [s for s in text.splitlines() if not s.startswith('#')] == expected


def test_an_edited_file_counts_without_its_mistakes(tmp_path, caplog):
  names = sampler_list.SamplerList(tmp_path, ('local',))
  path = tmp_path / 'samplers.txt'
  edit(path, '# mine\n\n 127.0.0.1:1 \nnowhere\nlocal-0\nlocal-0\n', 10**18)
  assert names() == ['127.0.0.1:1', 'local-0']
  assert "'nowhere'" in caplog.text
  edit(path, '127.0.0.1:2 # the new one\nlocal\nlocal-0\nlocal', 2 * 10**18)
  assert names() == ['127.0.0.1:2', 'local-1', 'local-0', 'local-2']


@pytest.mark.parametrize(
  'data, words',
  [
    (b'', 'names no sampler'),
    (b'# 127.0.0.1:1\nnowhere\n', 'names no sampler'),
    (b'127.0.0.1:1\n\x00\xff\xfe', 'utf-8'),
  ],
)
def test_a_file_of_no_use_changes_nothing_and_is_said_once(
  tmp_path, caplog, data, words
):
  names = sampler_list.SamplerList(tmp_path, ('local',))
  path = tmp_path / 'samplers.txt'
  path.write_bytes(data)
  os.utime(path, ns=(10**18, 10**18))
  assert [names() for _ in range(3)] == [['local-0']] * 3
  assert caplog.text.count('the samplers stay') == 1
  assert words in caplog.text
  edit(path, '127.0.0.1:1', 2 * 10**18)
  assert names() == ['127.0.0.1:1']


def test_only_numbered_names_are_services_of_the_runs_own(tmp_path, caplog):
  assert sampler_list.is_own('local-12')
  for name in ('local', 'localhost:5000', 'local-1:5000', 'local-gpu1:5000'):
    assert not sampler_list.is_own(name)
  names = sampler_list.SamplerList(tmp_path, ('localhost:5000',))
  edit(tmp_path / 'samplers.txt', 'localhost:5001\nlocal-gpu1:1\n', 10**18)
  assert names() == ['localhost:5001']
  assert "('local-gpu1:1') is not of this machine" in caplog.text


def test_another_machine_may_be_added_as_the_run_allows(tmp_path, caplog):
  tls = functools.partial(
    credentials.check_address, credentials=credentials.Credentials(*'123')
  )
  for check, added in (
    (credentials.check_address, []),
    (tls, ['10.1.2.3:1']),
  ):
    names = sampler_list.SamplerList(tmp_path, ('local',), check)
    edit(tmp_path / 'samplers.txt', '10.1.2.3:1\nlocal\n', 10**18)
    assert names() == [*added, 'local-0']
  assert caplog.text.count('without TLS') == 1


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path, caplog):
  names = sampler_list.SamplerList(tmp_path, ('local',))
  (tmp_path / 'samplers.txt').unlink()
  assert names() == ['local-0']
  assert 'the samplers stay' in caplog.text


def test_logs_are_named_by_number():
  assert sampler_list.log_name('local-3') == 'sampler-3.log'
