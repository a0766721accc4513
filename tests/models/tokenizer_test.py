import json
import subprocess
import sys

import numpy as np
import pytest
import small_tokenizers

from spopp_jax.models import tokenizer, word_tokenizer

transformers = pytest.importorskip('transformers')

TEXT = 'You are  <think>\nZürich é 你好\n</think> , go . <|im_end|>\n\n \n'


@pytest.fixture
def directory(tmp_path):
  small_tokenizers.write(tmp_path, 'qwen')
  return tmp_path


def change(path, **fields):
  content = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps({**content, **fields}))


def test_text_comes_back_exactly(directory):
  got = tokenizer.load(directory)
  assert isinstance(got, tokenizer.PretrainedTokenizer)
  ids = got.encode(TEXT)
  assert ids.dtype == np.int32
  assert got.decode(ids) == TEXT
  assert got.encode('').shape == (0,)
  assert got.decode([]) == ''


def test_added_tokens_are_found_and_special_ones_are_not(directory):
  got = tokenizer.load(directory)
  built = small_tokenizers.build('qwen')
  assert got.vocab_size == built.get_vocab_size() == 372
  ids = got.encode('<think>x</think><|im_end|>').tolist()
  assert ids[0] == built.token_to_id('<think>')
  assert ids.count(built.token_to_id('<think>')) == 1
  assert built.token_to_id('</think>') in ids
  assert built.token_to_id('<|im_end|>') not in ids
  assert got.special_id('<|im_end|>') == built.token_to_id('<|im_end|>')
  with pytest.raises(ValueError, match=r'<think> is no special token.*im_end'):
    got.special_id('<think>')


def test_half_a_character_is_refused(directory):
  words = word_tokenizer.WordTokenizer.build(['go'])
  for kind in (tokenizer.load(directory), words):
    with pytest.raises(ValueError, match='half a character'):
      kind.encode('go \ud800')


def test_ids_without_a_token_have_no_text(directory):
  got = tokenizer.load(directory)
  ids = got.encode('go to')
  assert got.decode([*ids.tolist(), got.vocab_size, got.vocab_size + 9]) == (
    'go to'
  )


@pytest.mark.parametrize(
  'family, names',
  [
    ('qwen', ('<|endoftext|>', '<|im_end|>')),
    ('smollm2', ('<|endoftext|>', '<|im_end|>')),
    ('llama3', ('<|end_of_text|>', '<|eot_id|>', '<|eom_id|>')),
  ],
)
def test_stop_ids_of_a_family(tmp_path, family, names):
  built = small_tokenizers.write(tmp_path, family)
  expected = tuple(sorted(built.token_to_id(name) for name in names))
  assert tokenizer.load(tmp_path).stop_ids == expected


def test_an_end_of_sequence_of_its_own_is_a_stop_id(directory):
  change(directory / 'tokenizer_config.json', eos_token='<|im_start|>')
  built = small_tokenizers.build('qwen')
  assert built.token_to_id('<|im_start|>') in tokenizer.load(directory).stop_ids


@pytest.mark.parametrize(
  'said, expected', [([366, 40], (40, 366)), (364, (364,)), ([7, 7], (7,))]
)
def test_generation_config_says_the_stop_ids(tmp_path, said, expected):
  small_tokenizers.write(tmp_path, 'qwen', eos_token_id=said)
  assert tokenizer.load(tmp_path).stop_ids == expected


def test_a_generation_config_without_them_says_nothing(directory):
  before = tokenizer.load(directory).stop_ids
  for fields in ({'temperature': 0.6}, {'eos_token_id': None}):
    change(directory / 'generation_config.json', **fields)
    assert tokenizer.load(directory).stop_ids == before


@pytest.mark.parametrize('said', [372, -1, [], ['<|im_end|>'], True, [1, 2.0]])
def test_stop_ids_that_are_none_are_refused(tmp_path, said):
  small_tokenizers.write(tmp_path, 'qwen', eos_token_id=said)
  with pytest.raises(
    ValueError, match=r'eos_token_id \(.*\) of generation_config.json must be'
  ) as caught:
    tokenizer.load(tmp_path)
  assert str(tmp_path) in str(caught.value)
  (tmp_path / 'generation_config.json').write_text('{')
  with pytest.raises(ValueError, match='cannot read generation_config'):
    tokenizer.load(tmp_path)


def test_fingerprints_follow_vocabulary_and_splitting(directory):
  first = tokenizer.load(directory).fingerprint
  assert tokenizer.load(directory).fingerprint == first
  path = directory / 'tokenizer.json'
  content = json.loads(path.read_text())
  content['pre_tokenizer']['pretokenizers'][1]['add_prefix_space'] = True
  path.write_text(json.dumps(content))
  assert tokenizer.load(directory).fingerprint != first


def test_a_list_of_words_is_a_word_tokenizer(tmp_path):
  built = word_tokenizer.WordTokenizer.build(['go to desk 1, then look.'])
  for name, content in built.files.items():
    (tmp_path / name).write_bytes(content)
  got = tokenizer.load(tmp_path)
  assert isinstance(got, word_tokenizer.WordTokenizer)
  assert got.fingerprint == built.fingerprint
  assert got.files == built.files
  # transformers reads the same directory.
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  text = 'then go to desk 1, zebra.'
  assert theirs.encode(text) == built.encode(text).tolist()
  assert theirs.eos_token_id == built.end_id


@pytest.mark.parametrize(
  'harm, words',
  [
    (lambda d: (d / 'tokenizer.json').unlink(), r'cannot read .*json'),
    (lambda d: (d / 'tokenizer.json').write_text('{}'), 'is not a tokenizer'),
    (
      lambda d: (d / 'tokenizer_config.json').write_text('{'),
      'transformers cannot read the tokenizer in',
    ),
  ],
)
def test_a_broken_file_is_named(directory, harm, words):
  harm(directory)
  with pytest.raises(ValueError, match=words) as caught:
    tokenizer.load(directory)
  assert str(directory) in str(caught.value)


def test_the_missing_package_is_named(directory, monkeypatch):
  monkeypatch.setitem(sys.modules, 'transformers', None)
  with pytest.raises(
    ModuleNotFoundError, match=r'pip install spopp_jax\[models\]'
  ):
    tokenizer.load(directory)


def test_transformers_is_imported_when_it_is_needed():
  program = (
    'import sys; from spopp_jax.models import chat_template, policy_files; '
    'assert "transformers" not in sys.modules'
  )
  subprocess.run([sys.executable, '-c', program], check=True, timeout=100)
