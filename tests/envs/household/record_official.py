r"""Records what the official engine says in household games.

Runs where the `alfworld` extra is installed, in a process of its own: the
engine overwrites sys.argv and swaps sys.stdout. It imports nothing of
spopp_jax. The golden transcripts were made by

  python tests/envs/household/record_official.py \
    tests/golden/household/scenes.jsonl \
    tests/golden/household/transcripts.jsonl --steps=25 --seed=0

Input: one game a row, as load_games reads (id, task, walkthrough,
pddl_problem); a row that has `pddl_domain` and `grammar` keeps its own, others
take those of the alfworld package. Output: two walks a game, one row each,
or one that plays the row's `commands` if it has them:
  id, walk: 'walkthrough', 'mixed' or 'commands';
  steps: [command, observation, won, commands that became admissible, commands
  that no longer are]; entry 0 describes reset, its command is null.
"""

import argparse
import json
import os
import random
import sys

_VERBS = ('take', 'move', 'open', 'close', 'use', 'heat', 'cool', 'clean')
_NOISE = (
  '',
  'dance',
  'go to',
  'go to nowhere 1',
  'put {thing} in/on {place}',
  'move {thing} to {place}',
  'take {thing} from {place}',
  'Go to {place}',
  'go  to {place}',
  '  go to {place}  ',
  'go to {place}',
  'open {place}',
  'close {place}',
  'examine {place}',
  'examine {thing}',
  'use {thing}',
  'heat {thing} with {place}',
  'cool {thing} with {place}',
  'clean {thing} with {place}',
  'slice {thing} with {thing}',
  'look around',
)


def _start(row, directory):
  import textworld
  from alfworld.agents.environment import alfred_tw_env
  from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

  with open(ALFRED_PDDL_PATH) as file:
    domain = row.get('pddl_domain') or file.read()
  with open(ALFRED_TWL2_PATH) as file:
    grammar = row.get('grammar') or file.read().replace(
      'UNKNOWN GOAL.', row['task']
    )
  path = os.path.join(directory, 'game.tw-pddl')
  with open(path, 'w') as file:
    json.dump(
      {
        'pddl_domain': domain,
        'grammar': grammar,
        'pddl_problem': row['pddl_problem'],
        'solvable': True,
        'walkthrough': row['walkthrough'],
      },
      file,
    )
  infos = textworld.EnvInfos(won=True, admissible_commands=True)
  return path, infos, alfred_tw_env.AlfredDemangler, textworld


class _Recorder:
  def __init__(self, environment):
    self._environment = environment
    state = environment.reset()
    self.admissible = set()
    self.steps = []
    self._note(None, state)

  def play(self, command):
    state, _, _ = self._environment.step(command)
    self._note(command, state)

  def _note(self, command, state):
    now = set(state['admissible_commands'])
    self.steps.append(
      [
        command,
        state.feedback,
        bool(state['won']),
        sorted(now - self.admissible),
        sorted(self.admissible - now),
      ]
    )
    self.admissible = now


def _names(problem_commands):
  """Receptacle names; object names turn up in the commands as they are met."""
  return sorted(
    command.removeprefix('go to ')
    for command in problem_commands
    if command.startswith('go to ')
  )


def _choose(rng, recorder, places, things, planned):
  draw = rng.random()
  if planned and draw < 0.35:
    return planned.pop(0)
  if draw < 0.85:
    verbs = sorted({c.partition(' ')[0] for c in recorder.admissible})
    weights = [4 if verb in _VERBS else 1 for verb in verbs]
    verb = rng.choices(verbs, weights)[0]
    return rng.choice(
      sorted(c for c in recorder.admissible if c.partition(' ')[0] == verb)
    )
  return rng.choice(_NOISE).format(
    place=rng.choice(places), thing=rng.choice(things)
  )


def record(environment, row, num_steps, rng):
  """Yields the two walks of one game."""
  recorder = _Recorder(environment)
  places = _names(recorder.admissible)
  walk = 'commands' if 'commands' in row else 'walkthrough'
  for command in row[walk]:
    recorder.play(command)
  yield {'id': row['id'], 'walk': walk, 'steps': recorder.steps}
  if walk == 'commands':
    return
  recorder = _Recorder(environment)
  things = ['mug 1']
  planned = list(row['walkthrough'])
  for _ in range(num_steps):
    for command in sorted(recorder.admissible):
      if command.startswith('take '):
        thing = command.removeprefix('take ').partition(' from ')[0]
        if thing not in things:
          things.append(thing)
    recorder.play(_choose(rng, recorder, places, things, planned))
  yield {'id': row['id'], 'walk': 'mixed', 'steps': recorder.steps}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('games')
  parser.add_argument('transcripts')
  parser.add_argument('--steps', type=int, default=25)
  parser.add_argument('--seed', type=int, default=0)
  arguments = parser.parse_args()
  import tempfile

  with (
    open(arguments.games, encoding='utf-8') as games,
    open(arguments.transcripts, 'w', encoding='utf-8') as transcripts,
    tempfile.TemporaryDirectory() as directory,
  ):
    environment = None
    for line in games:
      row = json.loads(line)
      path, infos, demangler, textworld = _start(row, directory)
      # Loading again leaks less than starting a second environment.
      if environment is None:
        environment = textworld.start(path, infos, wrappers=[demangler()])
      else:
        environment.load(path)
      rng = random.Random(f'{arguments.seed} {row["id"]}')
      for walk in record(environment, row, arguments.steps, rng):
        transcripts.write(json.dumps(walk, separators=(',', ':')) + '\n')
      print(row['id'], file=sys.stderr, flush=True)


if __name__ == '__main__':
  main()
