"""Hugging Face's generate, and a padded learner step, in torch on the CPU.

Imported only where torch and transformers are installed.
"""

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers


def load(directory: pathlib.Path) -> transformers.PreTrainedModel:
  """Returns the exported policy in float32."""
  transformers.logging.disable_progress_bar()
  return transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32
  )


def describe() -> str:
  """Returns what was measured, in words."""
  return (
    f'torch {torch.__version__} (eager, on as many threads as are fastest), '
    f'transformers {transformers.__version__}'
  )


class OnFastestThreads:
  """Work on the number of threads that was fastest when it was first done.

  Small products take longer on two threads than on one, many times longer
  where other programs run too.
  """

  def __init__(self, work: Callable[[], Any]):
    self._work = work
    self.threads = 0

  def __call__(self) -> Any:
    """Returns what the work returns."""
    if self.threads == 0:
      self._work()
      numbers = range(1, os.cpu_count() + 1)
      self.threads = min(numbers, key=self._seconds)
    torch.set_num_threads(self.threads)
    return self._work()

  def _seconds(self, threads):
    torch.set_num_threads(threads)
    start = time.perf_counter()
    self._work()
    return time.perf_counter() - start


@torch.inference_mode()
def generate(
  model: transformers.PreTrainedModel,
  prompts: np.ndarray,
  *,
  num_tokens: int,
  temperature: float,
  unused_id: int,
) -> np.ndarray:
  """Returns [B, num_tokens] ids sampled after prompts [B, P]; none ends."""
  prompts = torch.as_tensor(prompts, dtype=torch.long)
  whole = model.generate(
    prompts,
    attention_mask=torch.ones_like(prompts),
    max_new_tokens=num_tokens,
    do_sample=True,
    temperature=temperature,
    top_k=0,
    top_p=1.0,
    eos_token_id=None,
    pad_token_id=unused_id,
  )
  return whole[:, prompts.shape[1] :].numpy()


class PaddedStep:
  """Forward and backward of a policy-gradient loss on padded sequences.

  Prompts are padded on the left and what follows on the right, and logits are
  made for all that follows, as TRL's GRPO trainer does.
  """

  def __init__(
    self,
    model: transformers.PreTrainedModel,
    prompts: np.ndarray,
    completions: np.ndarray,
    weights: np.ndarray,
    unused_id: int,
  ):
    """Holds [N, P] and [N, C] int, [N, C] float; see `__call__`."""
    self._model = model.train()
    self._tokens = torch.as_tensor(np.concatenate([prompts, completions], 1))
    self._mask = (self._tokens != unused_id).long()
    self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)
    self._completions = torch.as_tensor(completions, dtype=torch.long)
    self._weights = torch.as_tensor(weights)

  def __call__(self) -> tuple[float, np.ndarray, float]:
    """Returns -sum w log p, its gradient by the embedding, and the norm."""
    self._model.zero_grad(set_to_none=True)
    width = self._completions.shape[1]
    logits = self._model(
      self._tokens,
      attention_mask=self._mask,
      position_ids=self._positions,
      logits_to_keep=width + 1,
      use_cache=False,
    ).logits[:, :-1]
    chosen = logits.gather(2, self._completions[..., None])[..., 0]
    logprobs = chosen - logits.logsumexp(2)
    loss = -(self._weights * logprobs).sum()
    loss.backward()
    gradients = [p.grad for p in self._model.parameters()]
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    embedding = self._model.get_input_embeddings().weight.grad
    return loss.item(), embedding.numpy(), norm.item()
