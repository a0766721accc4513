"""A sampler service that answers at once, for measuring what is around it.

  python experiments/simulated_service.py --tokens=1000

It speaks the whole contract of sampler.proto but has no engine: every request
gets the same trajectory under its own id. One JSON line on standard output
says where it listens.
"""

import argparse
import concurrent.futures
import queue
import sys
import threading
import time
import zlib
from typing import Any

import grpc
import numpy as np
import option_types

from spopp_jax import types
from spopp_jax.sampler import (
  codec,
  handshake,
  lifeline,
  options,
  sampler_pb2,
  sampler_pb2_grpc,
)

VOCABULARY = 32_000
_JOINED_TOKENS = 100_000  # of the answers in one message
_PACED = 8  # answers in one message when they are paced
_PATIENCE_S = 0.1
EXPECTED = handshake.Expectation(
  tokenizer_fingerprint='simulated',
  model_fingerprint='simulated',
  tasks_fingerprint='simulated',
  max_context_tokens=2**16,
  vocab_size=VOCABULARY,
)


def message(
  num_tokens: int, sampling: types.SamplingParams
) -> sampler_pb2.Trajectory:
  """Returns an answer with random tokens, of which four fifths are actions."""
  rng = np.random.default_rng(0)
  mask = np.arange(num_tokens) >= num_tokens // 5
  return codec.encode_trajectory(
    types.Trajectory(
      request_id='',
      task_id='',
      status=types.Status.OK,
      reward=1.0,
      policy_version=0,
      weights_checksum='',
      tokens=rng.integers(VOCABULARY, size=num_tokens).astype(np.int32),
      action_mask=mask,
      behaviour_logprobs=np.where(mask, -rng.random(num_tokens), 0).astype(
        np.float32
      ),
      num_turns=1,
      sampling=sampling,
    )
  )


class Servicer(sampler_pb2_grpc.SamplerServicer):
  """Answers every call of sampler.proto."""

  def __init__(self, num_tokens: int, max_pending: int, rate: float):
    self._num_tokens = num_tokens
    self._rate = rate
    self._max_pending = max_pending
    self._version = -1
    self._checksums = {-1: ''}
    self._last: sampler_pb2.Trajectory | None = None
    self._joined = max(1, _JOINED_TOKENS // num_tokens)
    if rate:
      self._joined = min(self._joined, _PACED)

  def Handshake(self, request: Any, context: Any) -> Any:  # noqa: N802
    """Describes the service."""
    del request, context
    return handshake.reply(
      handshake.Description(
        tokenizer_fingerprint='simulated',
        model_fingerprint='simulated',
        tasks_fingerprint='simulated',
        num_tasks=1,
        max_context_tokens=self._num_tokens,
        num_slots=self._max_pending,
        max_pending=self._max_pending,
        active_policy_version=self._version,
        active_weights_checksum=self._checksums[self._version],
      ),
      options.ChannelLimits(),
    )

  def Publish(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
    """Takes any snapshot."""
    del context
    header = next(request_iterator).header
    return sampler_pb2.PublishReply(
      policy_version=header.policy_version,
      weights_checksum=header.weights_checksum,
    )

  def Resume(self, request: Any, context: Any) -> Any:  # noqa: N802
    """Says that every snapshot is there."""
    del context
    return sampler_pb2.ResumeReply(held_bytes=request.size_bytes)

  def Activate(self, request: Any, context: Any) -> Any:  # noqa: N802
    """Switches at once."""
    del context
    self._checksums[request.policy_version] = request.weights_checksum
    self._version = request.policy_version
    return sampler_pb2.ActivateReply(
      policy_version=self._version, weights_checksum=request.weights_checksum
    )

  def Rollout(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
    """Answers in the order of the requests."""
    del context
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
      try:
        for one in request_iterator:
          asked.put(one.requests.requests)
      except grpc.RpcError:
        pass  # the caller went away
      asked.put(None)

    threading.Thread(target=read, daemon=True).start()
    due_s = time.monotonic()
    while (requests := asked.get()) is not None:
      for start in range(0, len(requests), self._joined):
        some = requests[start : start + self._joined]
        if self._rate:
          # No large debt is made up for: what is late stays late.
          due_s = max(due_s, time.monotonic() - _PATIENCE_S)
          due_s += len(some) / self._rate
          time.sleep(max(0.0, due_s - time.monotonic()))
        yield sampler_pb2.RolloutReply(trajectories=map(self._answer, some))

  def _answer(self, request: Any) -> sampler_pb2.Trajectory:
    if self._last is None:
      sampling = codec.decode_request(request).sampling
      self._last = message(self._num_tokens, sampling)
    answer = self._last
    answer.request_id, answer.task_id = request.request_id, request.task_id
    answer.policy_version = request.policy_version
    answer.weights_checksum = self._checksums[request.policy_version]
    # A task wins or loses by its name, so that values differ.
    answer.reward = float(zlib.crc32(request.task_id.encode()) % 2)
    return answer


def main(argv: list[str]) -> None:
  """Serves until its parent ends."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--tokens', type=option_types.positive_int, default=1000)
  parser.add_argument(
    '--max_pending', type=option_types.positive_int, default=20_000
  )
  parser.add_argument(
    '--rate',
    type=option_types.not_negative_float,
    default=0.0,
    help='answers a second at most; 0 is any number',
  )
  arguments = parser.parse_args(argv[1:])
  limits = options.ChannelLimits()
  server = grpc.server(
    concurrent.futures.ThreadPoolExecutor(8), options=limits.server_options()
  )
  sampler_pb2_grpc.add_SamplerServicer_to_server(
    Servicer(arguments.tokens, arguments.max_pending, arguments.rate), server
  )
  port = server.add_insecure_port('127.0.0.1:0')
  server.start()
  sys.stdout.write(lifeline.ready_line(f'127.0.0.1:{port}') + '\n')
  sys.stdout.flush()
  sys.stdin.read()  # ends with the parent
  server.stop(0)


if __name__ == '__main__':
  main(sys.argv)
