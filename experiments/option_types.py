"""Types of command-line options; argparse says what it got in their place."""

import argparse
import math


def positive_int(text: str) -> int:
  """Returns a whole number of at least 1.

  Raises:
    ArgumentTypeError: it is something else.
  """
  try:
    value = int(text)
  except ValueError:
    value = 0
  if value < 1:
    raise argparse.ArgumentTypeError(f'{text!r} must be a whole number above 0')
  return value


def positive_float(text: str) -> float:
  """Returns a finite number above 0.

  Raises:
    ArgumentTypeError: it is something else.
  """
  value = not_negative_float(text)
  if not value:
    raise argparse.ArgumentTypeError(f'{text!r} must be above 0')
  return value


def not_negative_float(text: str) -> float:
  """Returns a finite number of at least 0.

  Raises:
    ArgumentTypeError: it is something else.
  """
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if not (math.isfinite(value) and value >= 0):
    raise argparse.ArgumentTypeError(
      f'{text!r} must be a finite number, at least 0'
    )
  return value


def share(text: str) -> float:
  """Returns a number in (0, 1].

  Raises:
    ArgumentTypeError: it is something else.
  """
  value = positive_float(text)
  if value > 1:
    raise argparse.ArgumentTypeError(f'{text!r} must be in (0, 1]')
  return value
