"""tunix's sampler and policy gradient; a program of its own environment.

  PYTHON experiments/benchmark_tunix.py DESCRIPTOR

It answers requests that come through the descriptor: ('name', arguments) gets
('ok', value). See `REQUESTS`; `benchmark_worker` is the other end.
"""

import json
import pathlib
import sys
from multiprocessing import connection

import jax
import jax.numpy as jnp
import numpy as np
import tunix
from flax import nnx
from tunix.generate import sampler as sampler_lib
from tunix.models.qwen3 import model as model_lib
from tunix.models.qwen3 import params as params_lib
from tunix.rl import common


class _Ids:
  """A tokenizer whose texts are ids with blanks between."""

  def __init__(self, unused_id):
    self._unused_id = unused_id

  def encode(self, text):
    return [int(word) for word in text.split()]

  def decode(self, ids):
    del ids
    return ''

  def bos_id(self):
    return None

  def eos_id(self):
    return self._unused_id

  def pad_id(self):
    return self._unused_id

  def dedup_bos_ids(self, ids):
    return ids


class _Tunix:
  """The policy of a directory, and the last result."""

  def load(self, directory):
    fields = json.loads((pathlib.Path(directory) / 'config.json').read_text())
    self._config = model_lib.ModelConfig(
      num_layers=fields['num_hidden_layers'],
      vocab_size=fields['vocab_size'],
      embed_dim=fields['hidden_size'],
      hidden_dim=fields['intermediate_size'],
      num_heads=fields['num_attention_heads'],
      head_dim=fields['head_dim'],
      num_kv_heads=fields['num_key_value_heads'],
      rope_theta=int(fields['rope_theta']),
      norm_eps=fields['rms_norm_eps'],
      use_tied_embedding=fields['tie_word_embeddings'],
    )
    self._unused_id = fields['vocab_size'] - 1
    self._model = params_lib.create_model_from_safe_tensors(
      str(directory), self._config, dtype=jnp.float32
    )
    return f'tunix {tunix.__version__} (jax {jax.__version__})'

  def hold_prompts(self, prompts, num_tokens, temperature):
    config = self._config
    self._sampler = sampler_lib.Sampler(
      self._model,
      _Ids(self._unused_id),
      sampler_lib.CacheConfig(
        cache_size=len(prompts[0]) + num_tokens,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
      ),
    )
    self._texts = [' '.join(map(str, prompt)) for prompt in prompts]
    self._sampling = {
      'max_generation_steps': num_tokens,
      'max_prompt_length': len(prompts[0]),
      'temperature': temperature,
      'top_p': 1.0,
      'return_logprobs': True,
    }

  def generate(self):
    output = self._sampler(self._texts, **self._sampling)
    self._result = (np.array(output.tokens),)

  def hold_episodes(self, prompts, completions, weights):
    prompts, completions = np.array(prompts), np.array(completions)
    graphdef, state = nnx.split(self._model)

    def loss(state, prompts, completions, weights):
      logprobs = common.compute_per_token_logps(
        graphdef,
        state,
        prompts,
        completions,
        pad_id=self._unused_id,
        eos_id=self._unused_id,
        stop_gradient=False,
      )
      return -(weights * logprobs).sum()

    gradient = jax.jit(jax.value_and_grad(loss))
    held = [jnp.asarray(x) for x in (prompts, completions)]
    held.append(jnp.asarray(weights, jnp.float32))
    self._step = lambda: jax.block_until_ready(gradient(state, *held))

  def learn(self):
    loss, gradient = self._step()
    leaves = jax.tree.leaves(gradient)
    embedding = gradient['embedder']['input_embedding'].get_value()
    norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in leaves))
    self._result = (loss, embedding, norm)

  def result(self):
    arrays = [np.asarray(value) for value in self._result]
    return [(a.tobytes(), a.dtype.str, a.shape) for a in arrays]


REQUESTS = (
  *('load', 'hold_prompts', 'generate', 'hold_episodes', 'learn', 'result'),
)


def main(argv):
  """Answers until the other end hangs up."""
  requests = connection.Connection(int(argv[1]))
  served = _Tunix()
  while True:
    try:
      name, arguments = requests.recv()
    except EOFError:
      return
    if name not in REQUESTS:
      raise ValueError(f'request {name!r} must be one of {REQUESTS}')
    requests.send(('ok', getattr(served, name)(*arguments)))


if __name__ == '__main__':
  main(sys.argv)
