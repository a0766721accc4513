import argparse

import option_types
import pytest


@pytest.mark.parametrize(
  'kind, right, wrong',
  [
    (option_types.positive_int, ['1', '20'], ['0', '-5', '1.5', 'x', '']),
    (
      option_types.positive_float,
      ['1e-9', '3'],
      ['0', '-1', 'nan', 'inf', 'x'],
    ),
    (option_types.not_negative_float, ['0', '2.5'], ['-1e-9', 'nan', 'x']),
    (option_types.share, ['1', '.25'], ['0', '1.01', 'nan', '-1']),
  ],
)
def test_what_is_allowed_is_read_and_nothing_else(kind, right, wrong):
  assert [kind(text) for text in right] == [float(text) for text in right]
  for text in wrong:
    with pytest.raises(argparse.ArgumentTypeError, match=repr(text)):
      kind(text)
