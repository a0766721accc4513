"""Small real HTTP servers that answer as vLLM 0.32 and SGLang 0.5 do.

Their model is one matrix: the logits after a token t are 2 E E[t], E the
embedding among whatever weights they were told to load.
"""

import contextlib
import http.server
import json
import pathlib
import select
import socket
import threading
import time
import urllib.parse

import numpy as np
import safetensors.numpy

from spopp_jax.models import dense, parameters
from spopp_jax.sampler.external import engine

CONFIG = dense.DecoderConfig(
  vocab_size=200,
  hidden_size=8,
  num_hidden_layers=1,
  num_attention_heads=1,
  num_key_value_heads=1,
  head_dim=8,
  intermediate_size=8,
  tie_word_embeddings=False,
)
CONTEXT = 100
TURN = 4
END = 99
WAIT_S = 20.0
EMBEDDING = 'model.embed_tokens.weight'


def make_parameters(seed):
  """Returns weights; those of a seed differ from those of another."""
  rng = np.random.default_rng(seed)
  _, shapes = parameters.graph(CONFIG)
  return {
    name: rng.normal(0, 0.5, value.shape).astype('f4')
    for name, value in sorted(shapes.items())
  }


def log_softmax(logits):
  shifted = logits - logits.max()
  return shifted - np.log(np.exp(shifted).sum())


def log_distribution(
  params, last, *, temperature, top_k=0, top_p=1.0, min_p=0.0
):
  """Returns [V] log-probs after the token `last`; -inf for what is cut off."""
  embedding = params[EMBEDDING].astype(np.float64)
  logits = 2 * embedding @ embedding[last] / temperature
  if top_k > 0:
    logits[logits < np.sort(logits)[-top_k]] = -np.inf
  order = np.argsort(-logits)
  reached = np.cumsum(np.exp(log_softmax(logits))[order])
  if top_p < 1:
    logits[order[1:][reached[:-1] >= top_p]] = -np.inf
  if min_p > 0:
    logits[logits < logits.max() + np.log(min_p)] = -np.inf
  return log_softmax(logits)


class Status(Exception):
  """Answer with a status that is not 200."""

  def __init__(self, status, text):
    super().__init__(text)
    self.status = status


class HalfAnswer(Exception):
  """Break off in the middle of the answer."""


class Silence(Exception):
  """Answer nothing until the caller goes away or the server closes."""


class Fake:
  """A server; `hooks` maps a path to a function that changes its answers.

  Attributes:
    asked: (path, body) of every call in order.
    hooks: path -> function of the answer; it may raise Status, HalfAnswer or
      Silence.
    abandoned: paths of calls whose caller went away.
    label: of the weights.
    paused: whether it generates nothing.
  """

  def __init__(self, params):
    self.params = params
    self.asked = []
    self.hooks = {}
    self.abandoned = []
    self.label = 'default'
    self.paused = False
    self._closing = threading.Event()
    fake = self

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_GET(self):
        fake._handle(self)

      def do_POST(self):
        fake._handle(self)

      def log_message(self, format, *args):
        pass

    class Server(http.server.ThreadingHTTPServer):
      daemon_threads = True

      def handle_error(self, request, client_address):
        pass  # a caller that went away

    self._server = Server(('127.0.0.1', 0), Handler)
    self._thread = threading.Thread(
      target=self._server.serve_forever, args=(0.02,), daemon=True
    )
    self._thread.start()

  @property
  def url(self):
    return f'http://127.0.0.1:{self._server.server_port}'

  @property
  def address(self):
    return f'{self.kind}:{self.url}'

  def paths(self):
    return [path for path, _ in self.asked]

  def close(self):
    self._closing.set()
    self._server.shutdown()
    self._server.server_close()
    self._thread.join(WAIT_S)

  def _handle(self, handler):
    length = int(handler.headers.get('Content-Length') or 0)
    body = json.loads(handler.rfile.read(length) or b'null')
    path = urllib.parse.urlsplit(handler.path).path
    self.asked.append((handler.path, body))
    try:
      if path not in self.routes:
        raise Status(404, json.dumps({'detail': 'Not Found'}))
      answer = self.routes[path](body)
      answer = self.hooks.get(path, lambda same: same)(answer)
      self._send(handler, 200, json.dumps(answer))
    except Status as status:
      self._send(handler, status.status, str(status))
    except HalfAnswer:
      text = json.dumps(answer)
      self._send(handler, 200, text[: len(text) // 2], length=len(text))
      handler.connection.shutdown(socket.SHUT_RDWR)
    except Silence:
      self._wait_for_the_end(handler, path)

  def _send(self, handler, status, text, length=None):
    handler.send_response(status)
    handler.send_header('Content-Type', 'application/json')
    handler.send_header('Content-Length', str(length or len(text)))
    handler.end_headers()
    handler.wfile.write(text.encode())

  def _wait_for_the_end(self, handler, path):
    while not self._closing.is_set():
      ready, _, _ = select.select([handler.connection], [], [], 0.01)
      if ready and not handler.connection.recv(1, socket.MSG_PEEK):
        self.abandoned.append(path)
        return

  def _load(self, directory):
    path = pathlib.Path(directory) / 'model.safetensors'
    json.loads((path.parent / 'config.json').read_text())
    self.params = safetensors.numpy.load_file(path)

  def _sample(
    self, tokens, *, temperature, top_k, top_p, min_p, seed, most, stops
  ):
    """Returns ids, and of each both log-distributions it came from."""
    deadline = time.monotonic() + WAIT_S
    while self.paused:
      assert time.monotonic() < deadline
      time.sleep(0.005)
    rng = np.random.default_rng(seed)
    sampled, before, after = [], [], []
    while len(sampled) < most and not (sampled and sampled[-1] in stops):
      last = (list(tokens) + sampled)[-1]
      before.append(
        log_distribution(self.params, last, temperature=temperature)
      )
      after.append(
        log_distribution(
          self.params,
          last,
          temperature=temperature,
          top_k=top_k,
          top_p=top_p,
          min_p=min_p,
        )
      )
      sampled.append(int(rng.choice(len(after[-1]), p=np.exp(after[-1]))))
    return sampled, before, after


class FakeVllm(Fake):
  """Answers as recorded in golden/vllm_0_32.json."""

  kind = 'vllm'

  def __init__(
    self,
    params,
    *,
    mode='processed_logprobs',
    declared=None,
    mask=False,
    max_logprobs=-1,
    device='cuda',
  ):
    self._mode = mode
    self._declared = declared or mode
    self._mask = mask
    self._max_logprobs = max_logprobs
    self._device = device
    self.routes = {
      '/server_info': self._server_info,
      '/inference/v1/generate': self._generate,
      '/pause': self._pause,
      '/resume': self._resume,
      '/collective_rpc': self._rpc,
      '/reset_prefix_cache': lambda _: {'success': True},
      '/update_weight_version': self._set_label,
      '/weight_info': lambda _: {'weight_version': self.label},
    }
    super().__init__(params)

  def _server_info(self, _):
    model = {
      'logprobs_mode': self._declared,
      'return_sampling_mask': self._mask,
      'max_logprobs': self._max_logprobs,
      'max_model_len': 256,
    }
    return {
      'vllm_config': {
        'model_config': model,
        'device_config': {'device': self._device},
      }
    }

  def _generate(self, body):
    wanted = body['sampling_params']
    tokens, before, after = self._sample(
      body['token_ids'],
      temperature=wanted['temperature'],
      top_k=wanted['top_k'],
      top_p=wanted['top_p'],
      min_p=wanted.get('min_p', 0.0),
      seed=wanted['seed'],
      most=wanted['max_tokens'],
      stops=wanted['stop_token_ids'],
    )
    if self._mode == 'raw_logprobs':
      told = [log_softmax(row * wanted['temperature']) for row in before]
    else:
      told = after
    stopped = tokens[-1] in wanted['stop_token_ids']
    return {
      'request_id': 'generate-tokens-1',
      'choices': [
        {
          'index': 0,
          'finish_reason': 'stop' if stopped else 'length',
          'stop_reason': tokens[-1] if stopped else None,
          'token_ids': tokens,
          'sampling_mask': [
            np.flatnonzero(np.isfinite(row)).tolist() for row in after
          ]
          if self._mask
          else None,
          'weight_versions': [
            {'version': self.label, 'start': 0, 'end': len(tokens)}
          ],
          'logprobs': {
            'content': [
              self._content(row, token, wanted['logprobs'])
              for row, token in zip(told, tokens, strict=True)
            ]
          },
        }
      ],
    }

  def _content(self, row, token, count):
    ranked = np.argsort(-row, kind='stable')
    ids = [token, *(i for i in ranked[:count].tolist() if i != token)]
    tops = [
      {
        'token_id': int(i),
        'logprob': max(float(row[i]), -9999.0),
        'rank': int(np.flatnonzero(ranked == i)[0]) + 1,
      }
      for i in ids
    ]
    return {**tops[0], 'top_logprobs': tops[: max(count, 1)]}

  def _pause(self, _):
    self.paused = True
    return {'status': 'paused'}

  def _resume(self, _):
    self.paused = False
    return {'status': 'resumed'}

  def _rpc(self, body):
    assert self.paused
    assert body['method'] == 'reload_weights'
    self._load(body['kwargs']['weights_path'])
    return {'results': [None]}

  def _set_label(self, body):
    self.label = body['new_version']
    return {'success': True, 'new_version': self.label}

  generate_path = '/inference/v1/generate'
  update_path = '/collective_rpc'


class FakeSglang(Fake):
  """Answers as the native calls of SGLang do; no mask when `most_kept` is 0."""

  kind = 'sglang'

  def __init__(self, params, *, most_kept=64, original=False, seeds=True):
    self._info = {
      'context_length': 256,
      'enable_deterministic_inference': seeds,
    }
    if most_kept:
      self._info['sampling_mask_max_tokens'] = most_kept
    self._original = original
    self.routes = {
      '/server_info': lambda _: self._info,
      '/generate': self._generate,
      '/pause_generation': self._pause,
      '/continue_generation': self._resume,
      '/update_weights_from_disk': self._update,
      '/flush_cache': lambda _: 'Cache flushed.',
      '/model_info': lambda _: {'weight_version': self.label},
    }
    super().__init__(params)

  def _generate(self, body):
    wanted = body['sampling_params']
    tokens, before, after = self._sample(
      body['input_ids'],
      temperature=wanted['temperature'],
      top_k=wanted['top_k'],
      top_p=wanted['top_p'],
      min_p=wanted['min_p'],
      seed=wanted['sampling_seed'],
      most=wanted['max_new_tokens'],
      stops=wanted['stop_token_ids'],
    )
    if self._original:
      before = [log_softmax(row * wanted['temperature']) for row in before]
    stopped = tokens[-1] in wanted['stop_token_ids']
    meta = {
      'finish_reason': {'type': 'stop', 'matched': tokens[-1]}
      if stopped
      else {'type': 'length', 'length': len(tokens)},
      'weight_version': self.label,
      'completion_tokens': len(tokens),
      'output_token_logprobs': [
        [float(row[token]), token, None]
        for row, token in zip(before, tokens, strict=True)
      ],
    }
    count = body.get('top_logprobs_num', 0)
    if count:
      meta['output_top_logprobs'] = [
        [[float(row[i]), int(i), None] for i in np.argsort(-row)[:count]]
        for row in before
      ]
    if body.get('return_sampling_mask') and self._info.get(
      'sampling_mask_max_tokens'
    ):
      meta['output_token_sampling_mask'] = [
        np.flatnonzero(np.isfinite(row)).tolist() for row in after
      ]
      meta['output_token_sampling_logprobs'] = [
        float(row[token]) for row, token in zip(after, tokens, strict=True)
      ]
    return {'text': '', 'output_ids': tokens, 'meta_info': meta}

  def _pause(self, body):
    assert body == {'mode': 'abort'}
    self.paused = True
    return {'status': 'ok'}

  def _resume(self, _):
    self.paused = False
    return {'status': 'ok'}

  def _update(self, body):
    assert self.paused
    try:
      self._load(body['model_path'])
    except (OSError, ValueError) as error:
      text = json.dumps({'success': False, 'message': str(error)})
      raise Status(400, text) from error
    self.label = body['weight_version']
    return {'success': True, 'message': 'Succeeded to update model weights.'}

  generate_path = '/generate'
  update_path = '/update_weights_from_disk'


KINDS = (FakeVllm, FakeSglang)


@contextlib.contextmanager
def running(kind, **options):
  """Runs a server with weights of its own."""
  fake = kind(make_parameters(seed=100), **options)
  try:
    yield fake
  finally:
    fake.close()


def connect(fake, directory, **limits):
  """Returns an engine in front of a fake."""
  return engine.connect(
    fake.address,
    CONFIG,
    **{
      'num_slots': 2,
      'max_context': CONTEXT,
      'max_turn_tokens': TURN,
      'stop_ids': (END, 98),
      'directory': directory,
      'turn_deadline_s': WAIT_S,
      **limits,
    },
  )


def load(decoder, version=0, seed=None):
  """Publishes weights of a seed, that of the version unless given."""
  params = make_parameters(version if seed is None else seed)
  decoder.load(params, version=version, checksum=f'{version:064x}')
  return params


def turns(decoder, count):
  """Steps until `count` turns have ended."""
  deadline = time.monotonic() + WAIT_S
  ended = []
  while len(ended) < count:
    assert time.monotonic() < deadline
    ended.extend(decoder.step())
  return ended


def wait_until(condition):
  deadline = time.monotonic() + WAIT_S
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.005)
