import functools
import os

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
  edit(path, '', 2 * 10**18)
  assert names() == []


def test_another_machine_may_be_added_as_the_run_allows(tmp_path, caplog):
  tls = functools.partial(
    credentials.check_address, credentials=credentials.Credentials(*'123')
  )
  for check, added in ((credentials.check_address, []), (tls, ['10.1.2.3:1'])):
    names = sampler_list.SamplerList(tmp_path, ('local',), check)
    edit(tmp_path / 'samplers.txt', '10.1.2.3:1\n', 10**18)
    assert names() == added
  assert caplog.text.count('without TLS') == 1


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path, caplog):
  names = sampler_list.SamplerList(tmp_path, ('local',))
  (tmp_path / 'samplers.txt').unlink()
  assert names() == ['local-0']
  assert 'the samplers stay' in caplog.text


def test_logs_are_named_by_number():
  assert sampler_list.log_name('local-3') == 'sampler-3.log'
