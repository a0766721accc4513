"""An episode as text a person reads."""

import itertools

import numpy as np

from spopp_jax import types
from spopp_jax.models import tokenizer as tokenizer_lib


def render(
  trajectory: types.Trajectory, tokenizer: tokenizer_lib.Tokenizer
) -> str:
  """Returns the episode with one paragraph a turn; actions begin with `> `.

  It is decoded from the ids that were trained on, so it shows exactly what
  the policy saw and said.
  """
  outcome = 'success' if trajectory.reward > 0 else 'failure'
  lines = [
    f'task {trajectory.task_id}: {outcome}, reward {trajectory.reward:g}, '
    f'{trajectory.num_turns} turns, {trajectory.num_actions} action tokens, '
    f'policy version {trajectory.policy_version}',
    '',
  ]
  start = 0
  for is_action, run in itertools.groupby(trajectory.action_mask):
    stop = start + len(list(run))
    text = tokenizer.decode(np.asarray(trajectory.tokens[start:stop]))
    lines.append(f'> {text}' if is_action else f'{text}\n')
    start = stop
  return '\n'.join(lines) + '\n'
