"""The committed code belongs to the committed contract."""

import itertools
import pathlib

import pytest
from google.protobuf import descriptor_pb2

import spopp_jax
from spopp_jax import types
from spopp_jax.sampler import sampler_pb2

_ROOT = pathlib.Path(spopp_jax.__file__).parents[1]
_PROTO = 'spopp_jax/sampler/sampler.proto'


def test_generated_code_matches_the_proto(tmp_path):
  protoc = pytest.importorskip('grpc_tools.protoc')
  out = tmp_path / 'descriptors'
  code = protoc.main(
    ['protoc', f'-I{_ROOT}', f'--descriptor_set_out={out}', _PROTO]
  )
  assert code == 0
  (expected,) = descriptor_pb2.FileDescriptorSet.FromString(
    out.read_bytes()
  ).file
  committed = descriptor_pb2.FileDescriptorProto()
  sampler_pb2.DESCRIPTOR.CopyToProto(committed)
  for message in expected.message_type:
    for field in message.field:
      field.ClearField('json_name')
  assert committed == expected, 'run `make proto`'


def test_closed_sets_are_those_of_the_records():
  wire = {
    name.removeprefix('STATUS_'): number
    for name, number in sampler_pb2.Status.items()
    if number
  }
  assert wire == {status.name: int(status) for status in types.Status}
  wire = {
    name.removeprefix('LOGPROB_KIND_'): number
    for name, number in sampler_pb2.LogprobKind.items()
    if number
  }
  assert wire == {kind.name: int(kind) for kind in types.LogprobKind}


def test_every_message_field_and_rpc_is_explained():
  lines = (_ROOT / _PROTO).read_text('utf-8').splitlines()
  for before, line in itertools.pairwise(lines):
    text = line.strip()
    if text.startswith(('rpc ', 'message ', 'enum ', 'service ')) or (
      ' = ' in text and text.endswith(';') and not text.startswith('syntax')
    ):
      assert before.strip().startswith('//'), line
