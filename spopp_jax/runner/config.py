"""Configuration files and command lines, refused early and with the reason.

A configuration file has `get_config(arg='')`; `configs/common.py` is the schema
of them all. `load_config` (notebooks) and `parse_command_line` (experiments)
are one path, whose overrides are read by ml_collections' config_flags.
"""

import ast
import contextlib
import difflib
import importlib
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from spopp_jax.runner import config_rules

# The checkout: configuration files import each other as `configs.NAME`.
_ROOT = pathlib.Path(__file__).resolve().parents[2]

_RIGHT_FORM = {
  int: 'a whole number written out, such as 1000 and not 1e3',
  float: 'a number such as 0.5 or 3e-4',
  bool: 'true or false',
  str: 'text',
  tuple: 'a tuple, quoted for the shell, such as "(4, 8)"',
}

ConfigError = config_rules.ConfigError
# What a configuration file with a mistake may raise.
_FAULTS = (
  ArithmeticError,
  AttributeError,
  ImportError,
  LookupError,
  NameError,
  SyntaxError,
  TypeError,
  ValueError,
)


def load_config(
  path: str | os.PathLike[str],
  overrides: Sequence[str] | Mapping[str, Any] = (),
) -> ml_collections.ConfigDict:
  """Returns the validated configuration that a command line would give.

  Args:
    path: a configuration file, or `FILE:arg` to pass `arg` to its
      `get_config`.
    overrides: `name=value` by dotted name, as in `objective.name=spo`; the
      command line's own form `--config.objective.name=spo` is taken too. Or
      values by name.

  Returns:
    A locked configuration with the leaves and types of configs/common.py.

  Raises:
    ConfigError: no such file, an unknown name (the nearest one is given), a
      value of the wrong type, or settings that exclude each other.
  """
  if isinstance(overrides, Mapping):
    overrides = [f'{name}={value}' for name, value in overrides.items()]
  if isinstance(overrides, str) or not all(
    isinstance(text, str) for text in overrides
  ):
    raise ConfigError(
      f"overrides ({overrides!r}) must be a list such as ['run.steps=3'], or "
      "a dict such as {'run.steps': 3}"
    )
  flag_texts = [_as_flag(text) for text in overrides]
  return _load(os.fspath(path), flag_texts, None)


def parse_command_line(
  argv: Sequence[str], flag_values: flags.FlagValues | None = None
) -> ml_collections.ConfigDict:
  """Returns the configuration of `PROGRAM --config=FILE --config.a.b=value`.

  Like argparse it ends the process itself: with status 0 after `--help`, with
  status 2 and one sentence on stderr when the command line is refused.

  Args:
    argv: program name and arguments, as in `sys.argv`.
    flag_values: further flags of the program; they are parsed along.

  Returns:
    As `load_config`.
  """
  path, rest = _split_path(argv[1:])
  try:
    if any(re.fullmatch('-{1,2}(h|help)', text) for text in rest):
      sys.stdout.write(_help(argv[0], path, flag_values))
      raise SystemExit(0)
    if not path:
      raise ConfigError(
        '--config=FILE is needed, such as --config=configs/quickstart.py'
      )
    return _load(path, rest, flag_values)
  except ConfigError as error:
    sys.stderr.write(f'{pathlib.Path(argv[0]).name}: error: {error}\n')
    raise SystemExit(2) from None


def validate_config(config: ml_collections.ConfigDict) -> None:
  """Refuses a configuration that no run could honour.

  Names and types are held against configs/common.py, then the rules of
  config_rules are applied. No device is touched.

  Args:
    config: a tree of settings.

  Raises:
    ConfigError: naming the setting, its value and what is allowed.
  """
  _check_schema(config)
  config_rules.check_rules(config, leaf_values(config))


def leaf_values(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns every setting by its dotted name, such as 'run.steps'."""
  return {name: block[key] for name, block, key in _leaves(config)}


def describe_config(config: ml_collections.ConfigDict) -> str:
  """Returns one line a setting: name, type, value and what it means."""
  comments = _leaf_comments()
  types = _leaf_types(_schema())
  lines = []
  for name, value in leaf_values(config).items():
    lines.append(f'  --config.{name} ({types[name].__name__}: {value!r})')
    lines.append(f'      {comments[name]}')
  return '\n'.join(lines) + '\n'


def _load(
  path: str, arguments: Sequence[str], flag_values: flags.FlagValues | None
) -> ml_collections.ConfigDict:
  config = _call_get_config(path)
  _check_schema(config)
  types = _leaf_types(config)
  names = [_flag_name(text) for text in arguments if _is_override(text)]
  for name in names:
    if name not in types:
      raise ConfigError(_unknown_name(name, types))

  parsed = flag_values if flag_values is not None else flags.FlagValues()
  try:
    program = ['program', *arguments]
    config_flags.DEFINE_config_dict(
      'config', config, flag_values=parsed, sys_argv=program
    )
    leftover = parsed(program)[1:]
  except flags.UnrecognizedFlagError as error:
    raise ConfigError(_unknown_name(error.flagname, types)) from None
  except flags.Error as error:
    raise ConfigError(_explain(error, names, types)) from None
  if leftover:
    raise ConfigError(
      f'{leftover[0]!r} is not understood; settings are given as '
      '--config.NAME=VALUE'
    )
  validate_config(config)
  return config


def _call_get_config(path: str) -> ml_collections.ConfigDict:
  """Runs the file's `get_config`, given what stands after a colon."""
  file, _, arg = path.partition(':')
  if not pathlib.Path(file).is_file():
    raise ConfigError(
      f'there is no configuration file {file!r} in {pathlib.Path.cwd()}; '
      'configs/ of the checkout holds them'
    )
  spec = importlib.util.spec_from_file_location('_experiment', file)
  if spec is None or spec.loader is None:
    raise ConfigError(f'{file!r} is not a Python file')
  module = importlib.util.module_from_spec(spec)
  with _importable_configs():
    try:
      spec.loader.exec_module(module)
      config = module.get_config(*([arg] if arg else []))
    except _FAULTS as error:
      raise ConfigError(f'{file}: {type(error).__name__}: {error}') from error
  if not isinstance(config, ml_collections.ConfigDict):
    raise ConfigError(
      f'get_config of {file} must return a ConfigDict, got '
      f'{type(config).__name__}'
    )
  return config.lock()


@contextlib.contextmanager
def _importable_configs() -> Iterator[None]:
  """Makes `from configs import common` work from any directory."""
  sys.path.insert(0, str(_ROOT))
  try:
    yield
  finally:
    sys.path.remove(str(_ROOT))


def _schema() -> ml_collections.ConfigDict:
  with _importable_configs():
    return importlib.import_module('configs.common').get_config()


def _check_schema(config: ml_collections.ConfigDict) -> None:
  schema = _schema()
  types = _leaf_types(schema)
  defaults = leaf_values(schema)
  values = leaf_values(config)
  for name in values:
    if name not in types:
      raise ConfigError(_unknown_name(name, types))
  for name, expected in types.items():
    if name not in values:
      raise ConfigError(f'{name} is missing; configs/common.py has it')
    value = values[name]
    if value is None and defaults[name] is None:
      continue
    # Exact types: True is no int and 1 is no float.
    if type(value) is not expected:
      raise ConfigError(f'{name} ({value!r}) must be {_RIGHT_FORM[expected]}')
    if isinstance(value, tuple):
      _check_items(name, value, type(defaults[name][0]))


def _check_items(name: str, value: tuple[Any, ...], expected: type) -> None:
  if not value:
    raise ConfigError(f'{name} must not be empty')
  for item in value:
    if type(item) is not expected:
      raise ConfigError(
        f'{name} ({value!r}): {item!r} must be {_RIGHT_FORM[expected]}'
      )


def _leaves(
  block: ml_collections.ConfigDict, prefix: str = ''
) -> Iterator[tuple[str, ml_collections.ConfigDict, str]]:
  """Yields (dotted name, block, key) of every leaf."""
  for key in block:
    if isinstance(block[key], ml_collections.ConfigDict):
      yield from _leaves(block[key], f'{prefix}{key}.')
    else:
      yield f'{prefix}{key}', block, key


def _leaf_types(config: ml_collections.ConfigDict) -> dict[str, type]:
  return {name: block.get_type(key) for name, block, key in _leaves(config)}


def _leaf_comments() -> dict[str, str]:
  """Returns the comment above every leaf of configs/common.py."""
  source = (_ROOT / 'configs' / 'common.py').read_text(encoding='utf-8')
  lines = source.splitlines()
  comments = {}
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
      block = ast.unparse(node.targets[0]).removeprefix('config').lstrip('.')
      for keyword in node.value.keywords:
        above: list[str] = []
        line = keyword.lineno - 2
        while lines[line].lstrip().startswith('#'):
          above.insert(0, lines[line].strip(' #'))
          line -= 1
        comments['.'.join(filter(None, (block, str(keyword.arg))))] = ' '.join(
          above
        )
  return comments


def _split_path(arguments: Sequence[str]) -> tuple[str, list[str]]:
  """Takes `--config=FILE` or `--config FILE` out of the arguments."""
  path, rest = '', []
  remaining = iter(arguments)
  for text in remaining:
    if re.fullmatch('-{1,2}config', text):
      path = next(remaining, '')
    elif match := re.fullmatch('-{1,2}config=(.*)', text):
      path = match[1]
    else:
      rest.append(text)
  return path, rest


def _is_override(text: str) -> bool:
  return re.match(r'-{1,2}(no)?config\.', text) is not None


def _flag_name(text: str) -> str:
  """Returns 'run.steps' of '--config.run.steps=3'."""
  return text.split('=', 1)[0].split('.', 1)[1]


def _as_flag(text: str) -> str:
  if text.startswith('-'):
    return text
  return '--config.' + text.removeprefix('config.')


def _unknown_name(name: str, known: Iterable[str]) -> str:
  def likeness(candidate: str) -> float:
    ends = (name.split('.')[-1], candidate.split('.')[-1])
    return (
      difflib.SequenceMatcher(None, name, candidate).ratio()
      + difflib.SequenceMatcher(None, *ends).ratio()
    )

  known = list(known)
  inside = [other for other in known if other.startswith(name + '.')]
  if inside:
    return f'{name} is a group of settings; set one of {", ".join(inside)}'
  return f'unknown setting {name!r}; did you mean {max(known, key=likeness)!r}?'


def _explain(
  error: flags.Error, names: Iterable[str], types: Mapping[str, type]
) -> str:
  """Adds to a parser's message what the setting takes."""
  text = str(error)
  for name in sorted(names, key=len, reverse=True):
    if f'config.{name}' in text:
      return f'{name} takes {_RIGHT_FORM[types[name]]} ({text})'
  return text


def _help(program: str, path: str, flag_values: flags.FlagValues | None) -> str:
  config = _call_get_config(path) if path else _schema()
  _check_schema(config)
  own = flag_values.get_help() + '\n' if flag_values is not None else ''
  return (
    f'usage: {program} --config=FILE [--config.NAME=VALUE ...]\n\n{own}'
    f'settings and the values of {path or "configs/common.py"}:\n'
    f'{describe_config(config)}'
  )
