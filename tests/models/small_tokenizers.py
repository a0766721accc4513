"""Byte-pair tokenizers of a few hundred ids with each family's own tokens."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

WORDS = (
  'You are a helpful assistant. What is the weather in Zürich? The weather is '
  'rain and the answer is 12. user\n system\n assistant\n tool response '
  'Question: how many apples? Answer: Hello there, Bye. go to desk 1'
) * 3 + 'You\n\n\n' * 9
# Special tokens, then tokens that are added but are not special.
FAMILIES = {
  'qwen': (
    ('<|endoftext|>', '<|im_start|>', '<|im_end|>'),
    ('<think>', '</think>', '<tool_call>', '</tool_call>', '<tool_response>'),
  ),
  'smollm2': (('<|endoftext|>', '<|im_start|>', '<|im_end|>'), ()),
  'llama3': (
    (
      *('<|begin_of_text|>', '<|end_of_text|>', '<|start_header_id|>'),
      *('<|end_header_id|>', '<|eot_id|>', '<|eom_id|>'),
    ),
    (),
  ),
}
ENDS = {
  'qwen': '<|im_end|>',
  'smollm2': '<|im_end|>',
  'llama3': '<|eot_id|>',
}
TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
  '<|im_end|>\n{% endfor %}'
)


def build(family):
  """Returns a byte-level tokenizer; merges are learnt, ids deterministic."""
  special, added = FAMILIES[family]
  built = tokenizers.Tokenizer(models.BPE())
  # As in the families: line ends in a row are one piece, whatever follows.
  built.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(r'[\r\n]+'), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  built.decoder = decoders.ByteLevel()
  built.train_from_iterator(
    [WORDS],
    trainers.BpeTrainer(
      vocab_size=364,
      show_progress=False,
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    ),
  )
  built.add_special_tokens(list(special))
  built.add_tokens(list(added))
  return built


def write(directory, family, *, template=TEMPLATE, **generation):
  """Writes the files of a tokenizer; returns what tokenizers itself makes."""
  directory.mkdir(parents=True, exist_ok=True)
  built = build(family)
  built.save(str(directory / 'tokenizer.json'))
  settings = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'eos_token': ENDS[family],
    'clean_up_tokenization_spaces': True,
    # Without this transformers does not clean up after byte pairs.
    'clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output': (
      True
    ),
  }
  (directory / 'tokenizer_config.json').write_text(json.dumps(settings))
  (directory / 'chat_template.jinja').write_text(template)
  if generation:
    path = directory / 'generation_config.json'
    path.write_text(json.dumps(generation))
  return built
