"""vLLM: its server for token ids, with the calls of its development mode.

What is asked and read here was recorded with vLLM 0.32.0. The server has to
run with VLLM_SERVER_DEV_MODE=1 in its environment, which opens the calls that
update weights, and with --enable-scale-out, which opens generation from ids.
"""

import math
from collections.abc import Sequence
from typing import Any

from spopp_jax import types
from spopp_jax.models import dense
from spopp_jax.sampler import errors
from spopp_jax.sampler.external import calls, servers

_KINDS = {
  'processed_logprobs': types.LogprobKind.PROCESSED,
  'raw_logprobs': types.LogprobKind.RAW,
}
# What the server writes for minus infinity.
_FLOOR = -9999.0
# More log-probs than top-k keeps: tokens that tie at the edge are kept too.
_TIES = 16
_WHOLE_MASS = 1 - 1e-4


class Vllm:
  """Implements `servers.Server`.

  Kept sets come from the server's sampling mask (--return-sampling-mask), or
  else from its processed log-probs: ids at minus infinity were cut off.
  """

  def __init__(self, address: calls.Address, config: dense.DecoderConfig):
    """Asks nothing yet."""
    self._address = address
    self._vocab_size = config.vocab_size
    self._is_tied = config.tie_word_embeddings
    self._kind = types.LogprobKind.RAW
    self._has_mask = False
    self._max_logprobs = 0

  def facts(self) -> servers.Facts:
    """Returns what the server says, and remembers how it reports sampling."""
    info = self._address.ask('GET', '/server_info?config_format=json')
    try:
      model = info['vllm_config']['model_config']
      device = info['vllm_config']['device_config']['device']
      mode = model['logprobs_mode']
      self._has_mask = bool(model['return_sampling_mask'])
      most = int(model['max_logprobs'])
      max_context = int(model['max_model_len'])
    except (KeyError, TypeError, ValueError) as error:
      raise errors.EngineRefused(
        f'{self._address.url}/server_info lacks {error}; it must be a vLLM '
        'server with VLLM_SERVER_DEV_MODE=1 in its environment'
      ) from error
    if mode not in _KINDS:
      raise errors.EngineRefused(
        f'{self._address.url} runs with --logprobs-mode {mode}; allowed: '
        f'{", ".join(_KINDS)}'
      )
    if device == 'cpu' and self._is_tied:
      # It repacks the output matrix at the start and not when it reloads the
      # embedding that this is tied to: new weights, old output, no error.
      raise errors.EngineRefused(
        f'{self._address.url} runs on a CPU, where vLLM does not update the '
        'output matrix of a model with tie_word_embeddings; export one without'
      )
    self._kind = _KINDS[mode]
    self._max_logprobs = (
      self._vocab_size if most < 0 else min(most, self._vocab_size)
    )
    return servers.Facts(max_context, self._kind, keeps_seeds=True)

  def refusal(self, sampling: types.SamplingParams) -> str:
    """Says why kept sets of such sampling cannot be had, or ''."""
    if (
      not sampling.truncated
      or self._has_mask
      or self._kind is types.LogprobKind.RAW
    ):
      return ''
    needed = sampling.top_k or self._vocab_size
    if min(needed, self._vocab_size) <= self._max_logprobs:
      return ''
    what = f'top_k ({sampling.top_k})'
    if not sampling.top_k:
      what = f'top_p ({sampling.top_p}), min_p ({sampling.min_p}), no top_k'
    return (
      f'{what} may keep {needed} ids and the server tells at most '
      f'{self._max_logprobs}: start it with --max-logprobs {needed} or '
      '--return-sampling-mask'
    )

  def generation(
    self, prompt: servers.Prompt, *, deadline_s: float
  ) -> calls.Call:
    """Returns the call that generates a turn."""
    return self._generation(
      prompt, self._num_logprobs(prompt.sampling), deadline_s
    )

  def read(self, answer: Any, prompt: servers.Prompt) -> servers.Answer:
    """Reads ids, their log-probs, kept sets and the label of the weights."""
    try:
      (choice,) = answer['choices']
      if choice['finish_reason'] not in ('stop', 'length'):
        raise errors.EngineRefused(
          f'the turn ended by {choice["finish_reason"]!r}'
        )
      entries = choice['logprobs']['content']
      tokens = [int(token) for token in choice['token_ids']]
      if tokens != [entry['token_id'] for entry in entries]:
        raise errors.EngineRefused(
          f'the server gave log-probs of other tokens than {tokens}'
        )
      kept = None
      if prompt.sampling.truncated and self._has_mask:
        kept = servers.kept_ids(choice['sampling_mask'])
      elif (
        prompt.sampling.truncated and self._kind is types.LogprobKind.PROCESSED
      ):
        kept = servers.kept_ids([self._kept(entry) for entry in entries])
      return servers.Answer(
        tokens,
        [float(entry['logprob']) for entry in entries],
        kept,
        servers.one_label(choice['weight_versions']),
      )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
      raise errors.EngineRefused(
        f'the answer is not what vLLM 0.32 gives ({error!r}): '
        f'{errors.shown(answer)}'
      ) from error

  def likeliest(self, prompt: servers.Prompt) -> Sequence[float]:
    """Returns the log-probs of the likeliest next tokens."""
    # The sampled token comes first and takes the place of the last one asked.
    answer = self._generation(prompt, 3, calls.CONTROL_DEADLINE_S).run()
    try:
      (entry,) = answer['choices'][0]['logprobs']['content']
      return [float(top['logprob']) for top in entry['top_logprobs']]
    except (KeyError, TypeError, ValueError, IndexError) as error:
      raise errors.EngineRefused(
        f'no log-probs for a token: {errors.shown(answer)}'
      ) from error

  def pause(self) -> None:
    """Aborts what is generated and generates nothing until `resume`."""
    self._address.ask('POST', '/pause?mode=abort')

  def update(self, directory: str, label: str, *, deadline_s: float) -> None:
    """Reloads in place, drops the prefix cache, then sets the label."""
    self._address.ask(
      'POST',
      '/collective_rpc',
      {'method': 'reload_weights', 'kwargs': {'weights_path': directory}},
      deadline_s=deadline_s,
    )
    answer = self._address.ask('POST', '/reset_prefix_cache')
    if not isinstance(answer, dict) or answer.get('success') is not True:
      raise errors.EngineRefused(f'the prefix cache was not dropped: {answer}')
    self._address.ask('POST', '/update_weight_version', {'new_version': label})

  def resume(self) -> None:
    """Generates again."""
    self._address.ask('POST', '/resume')

  def label(self) -> str:
    """Returns the label of the weights, 'default' before the first update."""
    answer = self._address.ask('GET', '/weight_info')
    if not isinstance(answer, dict) or 'weight_version' not in answer:
      raise errors.EngineRefused(f'/weight_info: {errors.shown(answer)}')
    return str(answer['weight_version'])

  def _num_logprobs(self, sampling: types.SamplingParams) -> int:
    """Returns how many log-probs a token are asked beside the sampled one's."""
    if (
      not sampling.truncated
      or self._has_mask
      or self._kind is types.LogprobKind.RAW
    ):
      return 0
    most = sampling.top_k + _TIES if sampling.top_k else self._vocab_size
    return min(most, self._max_logprobs)

  def _generation(
    self, prompt: servers.Prompt, num_logprobs: int, deadline_s: float
  ) -> calls.Call:
    body: dict[str, Any] = {
      'token_ids': list(prompt.tokens),
      'cache_salt': prompt.label,
      'sampling_params': {
        'temperature': prompt.sampling.temperature,
        'top_p': prompt.sampling.top_p,
        'top_k': prompt.sampling.top_k,
        'seed': prompt.seed,
        'max_tokens': prompt.budget,
        'stop_token_ids': list(prompt.stop_ids),
        # Or the end token of the model's files would end turns, too.
        'ignore_eos': True,
        'logprobs': num_logprobs,
        'detokenize': False,
      },
    }
    if prompt.sampling.min_p:
      body['sampling_params']['min_p'] = prompt.sampling.min_p
    return calls.Call(
      self._address,
      'POST',
      '/inference/v1/generate',
      body,
      deadline_s=deadline_s,
    )

  def _kept(self, entry: Any) -> list[int]:
    """Returns the ids that one token was drawn from."""
    # The sampled token may come twice, at first and by its rank.
    told = {
      int(top['token_id']): float(top['logprob'])
      for top in entry['top_logprobs']
    }
    kept = {token: value for token, value in told.items() if value > _FLOOR}
    mass = math.fsum(map(math.exp, kept.values()))
    everything = len(kept) < len(told) or len(told) >= self._vocab_size
    if not everything and mass < _WHOLE_MASS:
      raise errors.EngineRefused(
        f'the {len(told)} log-probs told of a token have a mass of {mass:.6f}: '
        'more ids were kept (start the server with a larger --max-logprobs or '
        'with --return-sampling-mask), or they are not what its mode says'
      )
    return sorted(kept)
