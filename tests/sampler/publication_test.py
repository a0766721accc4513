"""Versions in a directory: whole or not there, kept as long as leased."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import safetensors.numpy
import scripted

from spopp_jax.sampler import errors, publication, weights

PARAMS = scripted.params(1.0)
OTHER = scripted.params(2.0)


def files_of(directory):
  return sorted(
    path.relative_to(directory).as_posix()
    for path in directory.rglob('*')
    if path.is_file()
  )


def test_a_version_is_a_file_and_a_manifest_with_its_sha256(tmp_path):
  snapshot = publication.Store(tmp_path).write(PARAMS, 7)
  checksum = weights.checksum(weights.to_bytes(PARAMS))
  assert (snapshot.version, snapshot.checksum) == (7, checksum)
  assert snapshot.data is None
  assert snapshot.path.parent == tmp_path / '7'
  assert files_of(tmp_path) == [
    '7/manifest.json',
    f'7/params-{checksum[:16]}.safetensors',
  ]
  assert snapshot.size_bytes == snapshot.path.stat().st_size
  manifest = json.loads((tmp_path / '7' / 'manifest.json').read_text())
  assert manifest == {
    'version': 7,
    'checksum': checksum,
    'files': [
      {
        'name': snapshot.path.name,
        'size_bytes': snapshot.size_bytes,
        'sha256': checksum,
      }
    ],
  }
  # Other programs can read it.
  np.testing.assert_array_equal(
    safetensors.numpy.load_file(snapshot.path)['w'], PARAMS['w']
  )
  result = publication.read(tmp_path / '7', checksum)
  assert result.keys() == {'w'}
  np.testing.assert_array_equal(result['w'], PARAMS['w'])


def test_a_relative_directory_gives_absolute_paths(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  store = publication.Store('snapshots')
  assert store.write(PARAMS, 0).path.parent == tmp_path / 'snapshots' / '0'


def test_the_same_version_again_is_reused(tmp_path):
  before = publication.Store(tmp_path).write(PARAMS, 7)
  inode = before.path.stat().st_ino
  assert publication.Store(tmp_path).write(PARAMS, 7) == before
  assert before.path.stat().st_ino == inode


def test_the_same_version_with_other_parameters_is_replaced(tmp_path):
  store = publication.Store(tmp_path)
  before = store.write(PARAMS, 7)
  with before.open() as reading:
    after = publication.Store(tmp_path).write(OTHER, 7)
    # Who has it open reads on.
    assert weights.checksum(reading.read()) == before.checksum
  assert files_of(tmp_path) == ['7/manifest.json', f'7/{after.path.name}']
  result = publication.read(tmp_path / '7', after.checksum)
  np.testing.assert_array_equal(result['w'], OTHER['w'])
  with pytest.raises(errors.SnapshotUnseen, match=before.checksum):
    publication.read(tmp_path / '7', before.checksum)


def test_a_damaged_version_is_written_again(tmp_path):
  snapshot = publication.Store(tmp_path).write(PARAMS, 7)
  data = snapshot.path.read_bytes()
  snapshot.path.write_bytes(data[:-1] + b'\xff')
  publication.Store(tmp_path).write(PARAMS, 7)
  assert snapshot.path.read_bytes() == data


def test_while_a_version_is_replaced_it_is_always_there(tmp_path, monkeypatch):
  store = publication.Store(tmp_path)
  before = store.write(PARAMS, 7)
  seen = []
  replace = pathlib.Path.replace

  def look(path, target):
    # Just before each rename the old version must still be whole.
    publication.read(tmp_path / '7', before.checksum)
    seen.append(target.name)
    return replace(path, target)

  monkeypatch.setattr(pathlib.Path, 'replace', look)
  after = store.write(OTHER, 7)
  publication.read(tmp_path / '7', after.checksum)
  assert seen == [after.path.name, 'manifest.json']


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path, monkeypatch):
  store = publication.Store(tmp_path)
  before = store.write(PARAMS, 7)

  def full(handle):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', full)
  for version in (7, 8):
    with pytest.raises(errors.PublicationError, match='No space left'):
      store.write(OTHER, version)
  assert store.versions() == [7]
  publication.read(tmp_path / '7', before.checksum)
  assert files_of(tmp_path) == ['7/manifest.json', f'7/{before.path.name}']


def test_leftovers_are_cleared_at_the_start(tmp_path):
  snapshot = publication.Store(tmp_path).write(PARAMS, 7)
  (tmp_path / '8').mkdir()
  (tmp_path / '8' / 'params-0.safetensors.partial').write_bytes(b'half')
  (tmp_path / '9').mkdir()
  (tmp_path / '9' / 'params-0.safetensors').write_bytes(b'no manifest yet')
  (tmp_path / '7' / 'params-1.safetensors.partial').write_bytes(b'half')
  (tmp_path / '7' / 'manifest.json.partial').write_bytes(b'{')
  (tmp_path / 'notes').mkdir()
  (tmp_path / 'notes' / 'mine').write_bytes(b'not of the store')
  store = publication.Store(tmp_path)
  assert store.versions() == [7]
  assert files_of(tmp_path) == [
    '7/manifest.json',
    f'7/{snapshot.path.name}',
    'notes/mine',
  ]
  assert not (tmp_path / '8').exists()
  assert not (tmp_path / '9').exists()


WRITER = """
import sys
import numpy as np
from spopp_jax.sampler import publication
store = publication.Store(sys.argv[1])
for version in range(1000):
  params = {'w': np.full(500_000, version, np.float32)}
  store.write(params, version % 3)
  print(version, flush=True)
"""


def test_a_writer_killed_anywhere_leaves_whole_versions(tmp_path):
  for count in (1, 2, 3, 4, 5, 6):
    writer = subprocess.Popen(
      [sys.executable, '-c', WRITER, str(tmp_path)],
      stdout=subprocess.PIPE,
      text=True,
    )
    with writer:
      for _ in range(count):
        writer.stdout.readline()
      # Between two lines it writes, so this is in the middle of a write.
      threading.Event().wait(0.001 * count)
      os.kill(writer.pid, signal.SIGKILL)
    for path in tmp_path.glob('*/manifest.json'):
      checksum = json.loads(path.read_text())['checksum']
      params = publication.read(path.parent, checksum)
      assert params['w'].shape == (500_000,)
      assert len(set(params['w'].tolist())) == 1
    store = publication.Store(tmp_path)
    assert len(files_of(tmp_path)) == 2 * len(store.versions())
    assert store.versions()


def damage_manifest(change):
  def damage(path):
    file = path / 'manifest.json'
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))

  return damage


def data_file(path):
  (file,) = path.glob('*.safetensors')
  return file


def append_byte(path):
  with data_file(path).open('ab') as file:
    file.write(b'x')


def flip_byte(path):
  data = data_file(path).read_bytes()
  data_file(path).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def set_entry(**fields):
  return damage_manifest(lambda manifest: manifest['files'][0].update(fields))


@pytest.mark.parametrize(
  'damage, words',
  [
    (append_byte, 'bytes, its manifest says'),
    (flip_byte, 'the sha256 of .*, its manifest says'),
    (lambda path: data_file(path).unlink(), 'cannot read .*No such file'),
    (set_entry(name='../8/params'), 'is no manifest'),
    (set_entry(name='/etc/hostname'), 'is no manifest'),
    (set_entry(name='..'), 'is no manifest'),
    (set_entry(size_bytes='many'), 'is no manifest'),
    (damage_manifest(lambda manifest: manifest.pop('files')), 'no manifest'),
    (damage_manifest(lambda manifest: manifest['files'].clear()), 'no manif'),
    (lambda path: (path / 'manifest.json').write_text('[]'), 'is no manifest'),
    (lambda path: (path / 'manifest.json').write_bytes(b'\xff{'), 'no manif'),
  ],
)
def test_damage_is_refused(tmp_path, damage, words):
  snapshot = publication.Store(tmp_path).write(PARAMS, 7)
  damage(tmp_path / '7')
  with pytest.raises(errors.PublicationError, match=words) as caught:
    publication.read(tmp_path / '7', snapshot.checksum)
  assert not isinstance(caught.value, errors.SnapshotUnseen)


def test_a_manifest_that_agrees_with_a_forged_file_is_refused(tmp_path):
  snapshot = publication.Store(tmp_path).write(PARAMS, 7)
  forged = weights.to_bytes(OTHER)
  data_file(tmp_path / '7').write_bytes(forged)
  set_entry(sha256=weights.checksum(forged))(tmp_path / '7')
  with pytest.raises(errors.PublicationError, match='of all files'):
    publication.read(tmp_path / '7', snapshot.checksum)


def test_several_files_are_one_snapshot(tmp_path):
  pieces = [weights.to_bytes({name: PARAMS['w']}) for name in ('a', 'b')]
  entries = []
  for number, data in enumerate(pieces):
    (tmp_path / f'{number}').write_bytes(data)
    entries.append(
      {
        'name': f'{number}',
        'size_bytes': len(data),
        'sha256': weights.checksum(data),
      }
    )
  checksum = weights.checksum(b''.join(pieces))
  (tmp_path / 'manifest.json').write_text(
    json.dumps({'version': 1, 'checksum': checksum, 'files': entries})
  )
  assert publication.read(tmp_path, checksum).keys() == {'a', 'b'}


def test_what_is_not_there_is_unseen(tmp_path):
  with pytest.raises(errors.SnapshotUnseen, match='cannot read'):
    publication.read(tmp_path / '7', '0' * 64)


def test_only_the_newest_and_the_leased_survive_collection(tmp_path):
  store = publication.Store(tmp_path)
  for version in range(5):
    store.write(scripted.params(version), version)
  store.lease(1, 'a')
  store.lease(1, 'a')
  store.lease(1, 'b')
  store.lease(2, 'a')
  assert store.collect() == [0, 3]
  store.release(1, 'a')
  store.release(2, 'a')
  store.release(3, 'nobody')
  assert store.collect() == [2]
  store.release(1, 'b')
  assert store.collect() == [1]
  assert store.collect() == []
  assert store.versions() == [4]
  assert not (tmp_path / '1').exists()


def test_a_resumed_run_keeps_what_it_wrote_not_what_is_highest(tmp_path):
  store = publication.Store(tmp_path)
  for version in (8, 9, 10):
    store.write(PARAMS, version)
  resumed = publication.Store(tmp_path)
  resumed.lease(9, 'a')
  resumed.write(OTHER, 8)
  assert resumed.collect() == [10]
  assert resumed.versions() == [8, 9]


def test_after_a_restart_the_highest_is_the_newest(tmp_path):
  store = publication.Store(tmp_path)
  for version in (8, 9):
    store.write(PARAMS, version)
    store.lease(version, 'a')
  assert publication.Store(tmp_path).collect() == [8]


def test_a_version_that_is_being_written_is_not_collected(
  tmp_path, monkeypatch
):
  store = publication.Store(tmp_path)
  store.write(PARAMS, 8)
  store.write(PARAMS, 9)
  replace = pathlib.Path.replace

  def collect_first(path, target):
    assert store.collect() == []
    return replace(path, target)

  monkeypatch.setattr(pathlib.Path, 'replace', collect_first)
  store.write(OTHER, 8)
  assert store.collect() == [9]


def test_what_is_not_there_cannot_be_leased(tmp_path):
  store = publication.Store(tmp_path)
  store.write(PARAMS, 7)
  with pytest.raises(errors.PublicationError, match=r'which holds \[7\]'):
    store.lease(6, 'a')


def test_negative_versions_are_refused(tmp_path):
  with pytest.raises(ValueError, match=r'version \(-1\)'):
    publication.Store(tmp_path).write(PARAMS, -1)


def test_a_directory_that_vanished_is_made_again(tmp_path):
  store = publication.Store(tmp_path / 'weights')
  store.write(scripted.params(1.0), 1)
  shutil.rmtree(tmp_path / 'weights')
  snapshot = store.write(scripted.params(2.0), 2)
  read = publication.read(tmp_path / 'weights' / '2', snapshot.checksum)
  assert read.keys() == scripted.params(2.0).keys()
  assert store.versions() == [2]


def test_a_directory_that_cannot_be_is_refused_by_name(tmp_path):
  (tmp_path / 'weights').write_text('a file')
  with pytest.raises(errors.PublicationError, match='transport=grpc'):
    publication.Store(tmp_path / 'weights')
