"""Joins an agent's model calls into rows of ids, where they continue exactly.

For agents that write their own prompts: each call has a prompt in ids and what
was sampled after it. Prompts may have been written anew, and then differ from
what was shown and sampled before (a template that drops old thinking). Such a
call starts a row of its own: every row is what the policy saw and sampled, and
only what it sampled is an action.
"""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import numpy as np


class Call(NamedTuple):
  """One call of a model.

  Attributes:
    prompt: [P] int32; all that was shown.
    tokens: [T] int32; what was sampled after it.
    logprobs: [T] float32 nats; of the sampled ids.
  """

  prompt: np.ndarray
  tokens: np.ndarray
  logprobs: np.ndarray


class Row(NamedTuple):
  """Calls that continue each other.

  Attributes:
    tokens: [S] int32.
    action_mask: [S] bool; True for sampled ids.
    behaviour_logprobs: [S] float32 nats; 0 elsewhere.
    num_calls: how many it holds.
  """

  tokens: np.ndarray
  action_mask: np.ndarray
  behaviour_logprobs: np.ndarray
  num_calls: int


class PrefixMismatch(ValueError):
  """A prompt does not begin with what was shown and sampled before it."""


def first_mismatch(earlier: np.ndarray, prompt: np.ndarray) -> int | None:
  """Returns where a prompt departs from the ids before it, or None.

  Args:
    earlier: [n] int32; the previous prompt and what was sampled after it.
    prompt: [P] int32; the next prompt. One that ends early departs at P.
  """
  length = min(len(earlier), len(prompt))
  (differing,) = np.nonzero(
    np.asarray(earlier[:length]) != np.asarray(prompt[:length])
  )
  if len(differing):
    return int(differing[0])
  return None if length == len(earlier) else length


def turn_length(tokens: np.ndarray, stop_ids: Collection[int]) -> int:
  """Returns how many ids a turn has: the first stop id included, no more.

  Args:
    tokens: [n] int32; one turn, and what may follow it as padding.
    stop_ids: the ids that end a turn; without any of them all n count.
  """
  (stops,) = np.nonzero(np.isin(tokens, list(stop_ids)))
  return int(stops[0]) + 1 if len(stops) else len(tokens)


def join(
  calls: Sequence[Call],
  *,
  on_mismatch: Literal['split', 'refuse'] = 'split',
) -> tuple[list[Row], int]:
  """Joins the calls of one conversation, in their order.

  Args:
    calls: one or more.
    on_mismatch: split starts a new row at a call whose prompt does not begin
      with the ids before it; refuse raises.

  Returns:
    The rows and the number of mismatches, one less than rows.

  Raises:
    PrefixMismatch: naming the call and the first differing position.
    ValueError: no calls; a call without tokens, or with another number of
      log-probs.
  """
  if on_mismatch not in ('split', 'refuse'):
    raise ValueError(f'on_mismatch ({on_mismatch!r}) must be split or refuse')
  if not calls:
    raise ValueError('there must be at least one call')
  groups: list[list[Call]] = []
  earlier = np.zeros(0, np.int32)
  for number, call in enumerate(calls):
    if len(call.tokens) == 0 or len(call.tokens) != len(call.logprobs):
      raise ValueError(
        f'call {number} has {len(call.tokens)} tokens and '
        f'{len(call.logprobs)} log-probs: equal numbers, at least one'
      )
    position = first_mismatch(earlier, call.prompt)
    if position is not None and on_mismatch == 'refuse':
      raise PrefixMismatch(
        f'the prompt of call {number} departs at position {position} from what '
        'was shown and sampled before'
      )
    if position is not None or not groups:
      groups.append([])
    groups[-1].append(call)
    earlier = np.concatenate([call.prompt, call.tokens])
  return [_row(group) for group in groups], len(groups) - 1


def _row(calls: Sequence[Call]) -> Row:
  tokens = np.zeros(0, np.int32)
  mask = np.zeros(0, bool)
  logprobs = np.zeros(0, np.float32)
  for call in calls:
    shown = np.asarray(call.prompt[len(tokens) :], np.int32)
    tokens = np.concatenate([tokens, shown, call.tokens]).astype(np.int32)
    mask = np.concatenate(
      [mask, np.zeros(len(shown), bool), np.ones(len(call.tokens), bool)]
    )
    logprobs = np.concatenate(
      [logprobs, np.zeros(len(shown)), call.logprobs]
    ).astype(np.float32)
  return Row(tokens, mask, logprobs, len(calls))
