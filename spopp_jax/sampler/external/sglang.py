"""SGLang: its native /generate and the calls that update weights.

What is asked and read here is the contract of SGLang 0.5.23. Its log-probs
come after temperature and before truncation; for truncated sampling it tells
the sampling mask and the log-probs renormalised over it.
"""

from collections.abc import Sequence
from typing import Any

from spopp_jax import types
from spopp_jax.sampler import errors
from spopp_jax.sampler.external import calls, servers


class Sglang:
  """Implements `servers.Server`.

  A turn also ends at the end tokens of the model's own files: a server that is
  told to ignore them would ignore the stop ids of the request, too.
  """

  def __init__(self, address: calls.Address):
    """Asks nothing yet."""
    self._address = address
    self._most_kept = 0

  def facts(self) -> servers.Facts:
    """Returns what the server says, and remembers how many ids it can keep."""
    info = self._address.ask('GET', '/server_info')
    try:
      # A server that does not know the mask has no such setting.
      self._most_kept = int(info.get('sampling_mask_max_tokens') or 0)
      context = info.get('context_length') or info.get('max_req_input_len')
      return servers.Facts(
        max_context=int(context) if context else None,
        declared_kind=None,
        keeps_seeds=bool(info.get('enable_deterministic_inference')),
      )
    except (AttributeError, TypeError, ValueError) as error:
      raise errors.EngineRefused(
        f'{self._address.url}/server_info is not what SGLang says: '
        f'{errors.shown(info)}'
      ) from error

  def refusal(self, sampling: types.SamplingParams) -> str:
    """Says why kept sets of such sampling cannot be had, or ''."""
    if not sampling.truncated or not self._most_kept:
      return ''
    if 0 < sampling.top_k <= self._most_kept:
      return ''
    return (
      f'top_k ({sampling.top_k}) must be in [1, {self._most_kept}] to have '
      'the kept ids told: set it beside top_p, or start the server with a '
      'larger --sampling-mask-max-tokens'
    )

  def generation(
    self, prompt: servers.Prompt, *, deadline_s: float
  ) -> calls.Call:
    """Returns the call that generates a turn."""
    return self._generation(prompt, {}, deadline_s)

  def read(self, answer: Any, prompt: servers.Prompt) -> servers.Answer:
    """Reads ids, their log-probs, kept sets and the label of the weights."""
    try:
      meta = answer['meta_info']
      how = meta['finish_reason']
      if how['type'] not in ('stop', 'length'):
        raise errors.EngineRefused(
          f'the turn ended by {how["type"]!r}: {how.get("message", "")}'
        )
      entries = meta['output_token_logprobs']
      tokens = [int(token) for token in answer['output_ids']]
      if tokens != [entry[1] for entry in entries]:
        raise errors.EngineRefused(
          f'the server gave log-probs of other tokens than {tokens}'
        )
      logprobs = [entry[0] for entry in entries]
      kept = None
      if self._is_masked(prompt.sampling):
        kept = servers.kept_ids(meta['output_token_sampling_mask'])
        logprobs = meta['output_token_sampling_logprobs']
      spans = meta.get('weight_versions') or [
        {'version': meta['weight_version']}
      ]
      return servers.Answer(
        tokens,
        [float(value) for value in logprobs],
        kept,
        servers.one_label(spans),
      )
    except (
      *(AttributeError, IndexError, KeyError),
      *(OverflowError, TypeError, ValueError),
    ) as error:
      raise errors.EngineRefused(
        f'the answer is not what SGLang 0.5 gives ({error!r}): '
        f'{errors.shown(answer)}'
      ) from error

  def likeliest(self, prompt: servers.Prompt) -> Sequence[float]:
    """Returns the log-probs of the likeliest next tokens."""
    answer = self._generation(
      prompt, {'top_logprobs_num': 2}, calls.CONTROL_DEADLINE_S
    ).run()
    try:
      (top,) = answer['meta_info']['output_top_logprobs']
      return [float(entry[0]) for entry in top]
    except (IndexError, KeyError, TypeError, ValueError) as error:
      raise errors.EngineRefused(
        f'no log-probs for a token: {errors.shown(answer)}'
      ) from error

  def pause(self) -> None:
    """Aborts what is generated and generates nothing until `resume`."""
    self._address.ask('POST', '/pause_generation', {'mode': 'abort'})

  def update(self, directory: str, label: str, *, deadline_s: float) -> None:
    """Takes weights with their label, then drops the prefix cache."""
    answer = self._address.ask(
      'POST',
      '/update_weights_from_disk',
      {'model_path': directory, 'weight_version': label},
      deadline_s=deadline_s,
    )
    if not isinstance(answer, dict) or answer.get('success') is not True:
      raise errors.EngineRefused(f'no update: {errors.shown(answer)}')
    self._address.ask('POST', '/flush_cache')

  def resume(self) -> None:
    """Generates again."""
    self._address.ask('POST', '/continue_generation', {})

  def label(self) -> str:
    """Returns the label of the weights, 'default' before the first update."""
    answer = self._address.ask('GET', '/model_info')
    if not isinstance(answer, dict) or 'weight_version' not in answer:
      raise errors.EngineRefused(f'/model_info: {errors.shown(answer)}')
    return str(answer['weight_version'])

  def _is_masked(self, sampling: types.SamplingParams) -> bool:
    return sampling.truncated and self._most_kept > 0

  def _generation(
    self, prompt: servers.Prompt, more: dict[str, Any], deadline_s: float
  ) -> calls.Call:
    sampling = prompt.sampling
    body = {
      'input_ids': list(prompt.tokens),
      'extra_key': prompt.label,
      'return_logprob': True,
      'sampling_params': {
        'temperature': sampling.temperature,
        'top_p': sampling.top_p,
        'top_k': sampling.top_k or -1,
        'min_p': sampling.min_p,
        'sampling_seed': prompt.seed,
        'max_new_tokens': prompt.budget,
        'stop_token_ids': list(prompt.stop_ids),
        'no_stop_trim': True,
        'skip_special_tokens': False,
        # Or preferences of the server would apply.
        'frequency_penalty': 0.0,
        'presence_penalty': 0.0,
        'repetition_penalty': 1.0,
      },
      **more,
    }
    if self._is_masked(sampling):
      body['return_sampling_mask'] = True
    return calls.Call(
      self._address, 'POST', '/generate', body, deadline_s=deadline_s
    )
