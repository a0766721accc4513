"""The Python of README runs as it stands there."""

import pathlib
import re

import pytest

_README = pathlib.Path(__file__).resolve().parents[1] / 'README.md'
_EXAMPLES = re.findall(
  '```python\n(.*?)```', _README.read_text(encoding='utf-8'), re.S
)


def test_there_are_examples():
  assert len(_EXAMPLES) >= 3


@pytest.mark.parametrize('example', _EXAMPLES)
def test_an_example_runs(example, capsys):
  exec(example, {})
