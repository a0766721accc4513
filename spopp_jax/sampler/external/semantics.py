"""Measures what the log-probs of a server speak of, before they are believed.

Let a and b be the two likeliest next tokens of a prompt, l_T their log-probs
as the server reports them at temperature T without truncation:

  l_T(a) - l_T(b) = [l_1(a) - l_1(b)] / T    after temperature
                  =  l_1(a) - l_1(b)         before temperature

With top_k = 1 one token is left: its log-prob is 0 after truncation, and that
of a among all tokens before it.
"""

import math
from typing import NamedTuple

from spopp_jax import types
from spopp_jax.sampler import errors
from spopp_jax.sampler.external import calls, servers

_TEMPERATURE = 2.0
_NUM_PROMPTS = 64
_ENOUGH = 3
# Nats. Below, bfloat16 rounds too much of the ratio; above, a alone is nearly
# certain and truncation changes nothing that could be seen.
_TELLING_GAP = (0.5, 5.0)
# Of 1/2 or of 1; and nats of a probability of 1.
_RATIO_TOLERANCE = 0.1
_CERTAIN = 1e-3


class Semantics(NamedTuple):
  """What was measured.

  Attributes:
    kind: what log-probs of truncated sampling speak of.
    after_temperature: whether log-probs come after temperature.
  """

  kind: types.LogprobKind
  after_temperature: bool


def measure(server: servers.Server, *, vocab_size: int) -> Semantics:
  """Generates single tokens after short prompts.

  Raises:
    EngineRefused: its log-probs are none of the two kinds, or its weights are
      such that the kinds do not differ.
    EngineLost: it cannot be reached.
  """
  ratios, certain = [], []
  label = server.label()
  for number in range(_NUM_PROMPTS):
    tokens = [(7 * number + 1) % vocab_size, number % vocab_size]
    gap = _leading_gap(server, tokens, label, 1.0)
    if not _TELLING_GAP[0] < gap < _TELLING_GAP[1]:
      continue
    cooled = _leading_gap(server, tokens, label, _TEMPERATURE)
    ratios.append(cooled / gap)
    certain.append(_alone(server, tokens, label))
    if len(ratios) == _ENOUGH:
      break
  if not ratios:
    raise errors.EngineRefused(
      f'after {_NUM_PROMPTS} prompts the next token is certain or any, so that '
      'the meaning of log-probs cannot be measured: start the server on the '
      'weights of a policy'
    )
  after = _all_near(ratios, 1 / _TEMPERATURE)
  if not (after or _all_near(ratios, 1.0)):
    raise errors.EngineRefused(
      f'at temperature {_TEMPERATURE} log-probs of two tokens are {ratios} '
      'times as far apart as at 1; allowed: 0.5 (after temperature) or 1 '
      '(before it)'
    )
  if all(certain) != any(certain):
    raise errors.EngineRefused(
      f'with top_k 1 the log-prob is 0 for some prompts only: {certain}'
    )
  kind = types.LogprobKind.PROCESSED if certain[0] else types.LogprobKind.RAW
  return Semantics(kind, after)


def _leading_gap(
  server: servers.Server, tokens: list[int], label: str, temperature: float
) -> float:
  """Returns how much likelier the likeliest token is than the second; nats."""
  sampling = types.SamplingParams(temperature=temperature)
  found = server.likeliest(_one_token(tokens, label, sampling))
  if len(found) < 2:
    raise errors.EngineRefused(f'no two log-probs for a token: {list(found)}')
  first, second, *_ = sorted(found, reverse=True)
  return first - second


def _one_token(
  tokens: list[int], label: str, sampling: types.SamplingParams
) -> servers.Prompt:
  return servers.Prompt(
    tokens=tokens,
    seed=0,
    sampling=sampling,
    budget=1,
    stop_ids=(),
    label=label,
  )


def _alone(server: servers.Server, tokens: list[int], label: str) -> bool:
  """Returns whether the one token that top_k = 1 leaves has log-prob 0."""
  prompt = _one_token(tokens, label, types.SamplingParams(top_k=1))
  call = server.generation(prompt, deadline_s=calls.CONTROL_DEADLINE_S)
  answer = server.read(call.run(), prompt)
  return math.isclose(answer.logprobs[0], 0.0, abs_tol=_CERTAIN)


def _all_near(ratios: list[float], expected: float) -> bool:
  return all(abs(ratio - expected) < _RATIO_TOLERANCE for ratio in ratios)
