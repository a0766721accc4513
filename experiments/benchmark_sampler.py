"""Decoded tokens a second beside Hugging Face's generate and tunix's sampler.

First table: prompts are fed and as many tokens sampled after each, by all
libraries in turn on the same random policy. Second table: episodes of many
turns, whose cache the engine keeps, beside feeding the whole history at every
turn, by the same engine and by generate.

All sample; the temperature is so low that chance decides nothing, and times
are printed only if all libraries have given the same tokens.
"""

import argparse
import functools
from collections.abc import Mapping

import benchmark_libraries
import benchmark_policies as policies
import benchmark_report as report
import numpy as np

from spopp_jax import types
from spopp_jax.sampler import engine as engine_lib

HUGGING_FACE = benchmark_libraries.HUGGING_FACE
TUNIX = benchmark_libraries.TUNIX
FED_AGAIN = 'fed again'
LIBRARIES = (HUGGING_FACE, TUNIX)
SLOTS = (64, 256)
# Slots -> library -> how many times faster than it the engine should be.
TARGETS: Mapping[int, Mapping[str, float]] = {
  64: {HUGGING_FACE: 2.0, TUNIX: 1.0},
  256: {TUNIX: 1.0},
}
FED_AGAIN_TARGET = 5.0
PROMPT_TOKENS = 16
NEW_TOKENS = 64
# Like long household games: a task and a scene, then short actions.
TURNS = 20
TURN_SLOTS = 16
FIRST_TOKENS = 100
OBSERVATION_TOKENS = 20
ACTION_TOKENS = 5
TEMPERATURE = 1e-7


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the options of this sub-command."""
  benchmark_libraries.add_arguments(parser, repeats=7, scaled='slots and turns')


def run(arguments: argparse.Namespace) -> str:
  """Returns the report of this sub-command.

  Raises:
    Disagreement: a library samples other tokens than ours.
    WorkerError: tunix's process ended.
  """
  decoded, episodes, machine = [], [], ''
  for name, config in policies.SIZES.items():
    with benchmark_libraries.loaded(name, config, arguments.tunix) as libraries:
      for slots in SLOTS:
        decoded.append(_decoding(libraries, slots, arguments))
      episodes.append(_turns(libraries, arguments))
      machine = libraries.describe(arguments.repeats)
  header = ('what', 'sizes', 'ours tokens/s')
  beside = [(f'{name} tokens/s', f'ours / {name}') for name in LIBRARIES]
  turns = [(f'{n} tokens/s', f'kept / {n}') for n in (FED_AGAIN, HUGGING_FACE)]
  return '\n\n'.join(
    [
      machine,
      report.table((*header, *sum(beside, ()), 'target'), decoded),
      report.table((*header, *sum(turns, ()), 'target'), episodes),
    ]
  )


def decoding(
  libraries: benchmark_libraries.Libraries, slots: int
) -> dict[str, benchmark_libraries.Version]:
  """Returns the versions of sampling after prompts."""
  rng = np.random.default_rng(benchmark_libraries.SEED)
  config = libraries.config
  prompts = _ids(rng, config, slots, PROMPT_TOKENS)
  engine = _engine(libraries, slots, PROMPT_TOKENS + NEW_TOKENS, NEW_TOKENS)
  versions = {
    report.OURS: _tokens(lambda: _sample_once(engine, prompts, NEW_TOKENS))
  }
  if libraries.model is not None:
    work = functools.partial(_generate, libraries, prompts, NEW_TOKENS)
    on_threads = libraries.transformers.OnFastestThreads
    versions[HUGGING_FACE] = _tokens(on_threads(work))
  if libraries.tunix is not None:
    ask = libraries.tunix.ask
    ask('hold_prompts', prompts.tolist(), NEW_TOKENS, TEMPERATURE)
    versions[TUNIX] = benchmark_libraries.Version(
      functools.partial(ask, 'generate'),
      libraries.tunix.result,
    )
  return versions


def turns(
  libraries: benchmark_libraries.Libraries, slots: int, number: int
) -> dict[str, benchmark_libraries.Version]:
  """Returns the versions of episodes of `number` turns."""
  rng = np.random.default_rng(benchmark_libraries.SEED)
  config = libraries.config
  widths = [FIRST_TOKENS, *[OBSERVATION_TOKENS] * (number - 1)]
  texts = [_ids(rng, config, slots, width) for width in widths]
  length = sum(widths) + number * ACTION_TOKENS
  engine = _engine(libraries, slots, length, ACTION_TOKENS)
  versions = {
    report.OURS: _tokens(lambda: _keeping(engine, texts)),
    FED_AGAIN: _tokens(
      lambda: _feeding_again(
        lambda fed: _sample_once(engine, fed, ACTION_TOKENS), texts
      )
    ),
  }
  if libraries.model is not None:
    generate = lambda p: _generate(libraries, p, ACTION_TOKENS)
    on_threads = libraries.transformers.OnFastestThreads
    versions[HUGGING_FACE] = _tokens(
      on_threads(lambda: _feeding_again(generate, texts))
    )
  return versions


def _decoding(libraries, slots, arguments):
  slots = max(2, round(slots * arguments.scale))
  sizes = f'{libraries.words()}, {slots} slots'
  targets = {name: TARGETS.get(slots, {}).get(name, 1.0) for name in LIBRARIES}
  return _row(
    f'{PROMPT_TOKENS} fed, {NEW_TOKENS} sampled',
    sizes,
    decoding(libraries, slots),
    slots * NEW_TOKENS,
    targets,
    arguments.repeats,
  )


def _turns(libraries, arguments):
  slots = max(2, round(TURN_SLOTS * arguments.scale))
  number = max(2, round(TURNS * arguments.scale))
  sizes = f'{libraries.words()}, {slots} slots'
  return _row(
    f'{number} turns of {ACTION_TOKENS} tokens',
    sizes,
    turns(libraries, slots, number),
    slots * number * ACTION_TOKENS,
    {FED_AGAIN: FED_AGAIN_TARGET, HUGGING_FACE: None},
    arguments.repeats,
  )


def _row(what, sizes, versions, num_tokens, targets, repeats):
  """Returns a table row: checks that versions agree, then times them."""
  report.say(f'{what}, {sizes}')
  check(f'{what}, {sizes}', versions)
  works = {name: version.work for name, version in versions.items()}
  timings = report.timed(works, repeats, {})
  ours = timings[report.OURS]
  cells = [f'{1e3 * num_tokens / ours.milliseconds:,.0f}']
  verdicts = []
  for name, target in targets.items():
    timing = timings.get(name)
    if timing is None:
      cells += ['not measured', '-']
    else:
      speed = 1e3 * num_tokens / timing.milliseconds
      cells += [f'{speed:,.0f}', f'{timing.ratio:.2f}']
    if target is not None:
      verdict = (
        'not measured'
        if timing is None
        else report.passed(timing.ratio >= target)
      )
      verdicts.append(f'{name} >= {target:g}: {verdict}')
  row = [what, sizes, *cells, '; '.join(verdicts)]
  report.say(' | '.join(row))
  return row


def check(
  what: str, versions: Mapping[str, benchmark_libraries.Version]
) -> None:
  """Runs all versions once.

  Raises:
    Disagreement: one has sampled other tokens than ours.
  """
  found = {}
  for name, version in versions.items():
    version.work()
    (found[name],) = version.result()
  ours = found.pop(report.OURS)
  for name, theirs in found.items():
    if theirs.shape != ours.shape or (theirs != ours).any():
      where = 'their number'
      if theirs.shape == ours.shape:
        where = f'{(theirs != ours).any(axis=1).sum()} of {len(ours)} slots'
      raise report.Disagreement(
        f'{what}: {name} samples other tokens, in {where}; no time is worth '
        'printing'
      )


def _tokens(work):
  """The version of work that returns sampled ids."""
  return benchmark_libraries.returning(lambda: (work(),))


def _ids(rng, config, slots, width):
  return rng.integers(0, policies.unused_id(config), (slots, width))


def _engine(libraries, slots, length, turn_tokens):
  engine = engine_lib.DecodeEngine(
    libraries.config,
    num_slots=slots,
    max_context=length,
    max_turn_tokens=turn_tokens,
    stop_ids=(policies.unused_id(libraries.config),),
    # Nothing is taken over from the round before.
    min_shared=length,
  )
  engine.load(libraries.params, version=0, checksum='')
  return engine


def _open(engine, turn_tokens):
  sampling = types.SamplingParams(
    temperature=TEMPERATURE, max_turn_tokens=turn_tokens
  )
  for slot in range(engine.num_slots):
    engine.open(slot, seed=slot, sampling=sampling)


def _close(engine):
  for slot in range(engine.num_slots):
    engine.close(slot)


def _turn(engine, tokens):
  """Feeds [B, P] and returns the turns that follow, [B, new]."""
  for slot, fed in enumerate(tokens):
    engine.append(slot, fed)
  ended = {}
  while len(ended) < len(tokens):
    ended |= {turn.slot: turn.tokens for turn in engine.step()}
  return np.stack([ended[slot] for slot in range(len(tokens))])


def _sample_once(engine, prompts, turn_tokens):
  _open(engine, turn_tokens)
  tokens = _turn(engine, prompts)
  _close(engine)
  return tokens


def _keeping(engine, texts):
  _open(engine, ACTION_TOKENS)
  actions = [_turn(engine, text) for text in texts]
  _close(engine)
  return np.concatenate(actions, axis=1)


def _feeding_again(sample, texts):
  """Samples after ever longer histories; `sample` maps [B, P] to [B, new]."""
  actions, history = [], []
  for text in texts:
    history.append(text)
    actions.append(sample(np.concatenate(history, axis=1)))
    history.append(actions[-1])
  return np.concatenate(actions, axis=1)


def _generate(libraries, prompts, num_tokens):
  return libraries.transformers.generate(
    libraries.model,
    prompts,
    num_tokens=num_tokens,
    temperature=TEMPERATURE,
    unused_id=policies.unused_id(libraries.config),
  )
