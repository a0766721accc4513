import json

import numpy as np
import pytest

from spopp_jax.envs import household
from spopp_jax.models import word_tokenizer

SPECIAL = ('<pad>', '<unk>', '<begin>', '<turn>', '<end>')


def words(text):
  """The words of a text, in order."""
  built = word_tokenizer.WordTokenizer.build([text])
  return [built.decode([i]) for i in built.encode(text)]


def played(size, seed):
  """Every text and every admissible command along some walkthroughs."""
  texts, commands = [], set()
  for game in household.generate_games(num_games=6, seed=seed, size=size):
    environment = household.HouseholdEnvironment(game)
    texts.append(environment.reset())
    for command in game.walkthrough:
      commands.update(environment.admissible_commands)
      texts.append(environment.step(command).observation)
  return texts, sorted(commands)


@pytest.mark.parametrize('size', ['small', 'medium', 'large'])
def test_every_admissible_command_comes_back(size):
  texts, commands = played(size, seed=3)
  assert len(commands) > 50
  built = word_tokenizer.WordTokenizer.build([*texts, *commands])
  for command in commands:
    ids = built.action(command)
    assert ids[-1] == built.end_id
    assert built.action_text(ids) == command
    # An entity is one token, so a command is short whatever its numbers.
    assert len(ids) <= 6, command


def test_no_word_of_an_observation_is_swallowed_or_unknown():
  for size in ('small', 'large'):
    texts, _ = played(size, seed=4)
    built = word_tokenizer.WordTokenizer.build(texts)
    for text in texts:
      got = built.decode(built.encode(text))
      assert ''.join(got.split()) == ''.join(text.split())


@pytest.mark.parametrize(
  'text, expected',
  [
    ('go to mug 12', ['go to', 'mug 12']),
    ('go together', ['go', 'together']),
    ('take mug 1 from desk 2', ['take', 'mug 1', 'from', 'desk 2']),
    ('from the desk 1', ['from the', 'desk 1']),
    ('from there', ['from', 'there']),
    ('a bed 1, and a cup 2.', ['a', 'bed 1', ', and a', 'cup 2', '.']),
    ('bed 1, an egg 1', ['bed 1', ', an', 'egg 1']),
    # 'a' and 'an' inside a longer word are no articles.
    ('bed 1, and armchair 1', ['bed 1', ',', 'and', 'armchair 1']),
    ('bed 1, apple 1', ['bed 1', ',', 'apple 1']),
    ('bed 1, another', ['bed 1', ',', 'another']),
    # A new line is white space like any other.
    ('look.\nOn the desk 1', ['look', '.', 'On', 'the', 'desk 1']),
    ('go\nto', ['go', 'to']),
    ('3 mugs, 2go', ['3', 'mugs', ',', '2', 'go']),
    ("what's (this)?", ['what', "'", 's', '(', 'this', ')', '?']),
  ],
)
def test_words_and_phrases(text, expected):
  assert words(text) == expected


def test_the_first_observation_in_words():
  text = (
    '-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. '
    'Looking quickly around you, you see a bed 1, and an armchair 1.\n\n'
    'Your task is to: put some mug on desk.'
  )
  assert words(text) == [
    '-= Welcome to TextWorld, ALFRED! =-',
    'You are in the middle of a room. Looking quickly around you, you see a',
    'bed 1',
    ', and an',
    'armchair 1',
    '.\n\nYour task is to:',
    'put',
    'some',
    'mug',
    'on',
    'desk',
    '.',
  ]


def test_the_text_of_a_special_token_gives_none():
  text = ' '.join(SPECIAL) + '<end><turn>'
  built = word_tokenizer.WordTokenizer.build([text, 'go to bed 1'])
  special = [built.begin_id, built.turn_id, built.end_id, 0, 1]
  assert sorted(special) == [0, 1, 2, 3, 4]
  assert not set(built.encode(text).tolist()) & set(special)
  # Text that was not built upon is unknown, not special.
  other = word_tokenizer.WordTokenizer.build(['go to bed 1'])
  assert set(other.encode(text).tolist()) == {1}


def test_unknown_words_keep_their_place():
  built = word_tokenizer.WordTokenizer.build(['go to bed 1'])
  ids = built.encode('go to zebra 1 bed 1')
  assert built.decode(ids) == 'go to <unk> bed 1'
  assert built.decode([built.vocab_size + 5]) == '<unk>'
  assert ids.dtype == np.int32
  assert built.encode('').shape == (0,)


def test_ids_follow_the_words_not_their_order():
  built = word_tokenizer.WordTokenizer.build(['look', 'go to bed 1'])
  again = word_tokenizer.WordTokenizer.build(['go to bed 1 look look'])
  assert built.fingerprint == again.fingerprint
  assert built.vocab_size == 5 + 3
  more = word_tokenizer.WordTokenizer.build(['look', 'go to bed 2'])
  assert more.fingerprint != built.fingerprint


def test_the_template_of_an_episode():
  built = word_tokenizer.WordTokenizer.build(['go to bed 1 you see a cup 1'])
  inside = built.encode('you see a cup 1')
  begin, turn, end = built.begin_id, built.turn_id, built.end_id
  prompt = built.prompt('you see a cup 1')
  np.testing.assert_array_equal(prompt, [begin, *inside, turn])
  observation = built.observation('you see a cup 1', np.array([end], np.int32))
  np.testing.assert_array_equal(observation, [*inside, turn])
  action = built.action('go to bed 1')
  np.testing.assert_array_equal(action, [*built.encode('go to bed 1'), end])
  assert {x.dtype for x in (prompt, observation, action)} == {np.dtype('int32')}


def test_a_cut_turn_and_a_sampled_special_token_are_text():
  built = word_tokenizer.WordTokenizer.build(['go to bed 1'])
  go, bed = built.encode('go to bed 1')
  assert built.action_text(np.array([go])) == 'go to'
  assert built.action_text(np.array([], np.int32)) == ''
  assert built.action_text(np.array([go, built.turn_id, bed])) == (
    'go to <turn> bed 1'
  )


def test_saved_and_loaded_is_the_same(tmp_path):
  built = word_tokenizer.WordTokenizer.build(['go to bed 1, and a cup 2.'])
  path = tmp_path / 'tokenizer.json'
  path.write_bytes(built.files['tokenizer.json'])
  loaded = word_tokenizer.WordTokenizer.load(path)
  assert loaded.fingerprint == built.fingerprint
  assert loaded.vocab_size == built.vocab_size
  text = 'go to cup 2, and a zebra 3'
  np.testing.assert_array_equal(loaded.encode(text), built.encode(text))
  assert loaded.end_id == built.end_id


def test_other_splitting_rules_are_another_fingerprint(tmp_path):
  built = word_tokenizer.WordTokenizer.build(['go to bed 1'])
  path = tmp_path / 'tokenizer.json'
  path.write_bytes(built.files['tokenizer.json'])
  content = json.loads(path.read_text())
  pattern = content['pre_tokenizer']['pattern']
  pattern['Regex'] = pattern['Regex'].replace('go to', 'go up')
  path.write_text(json.dumps(content))
  loaded = word_tokenizer.WordTokenizer.load(path)
  assert loaded.fingerprint != built.fingerprint


def test_a_tokenizer_without_special_tokens_is_refused(tmp_path):
  built = word_tokenizer.WordTokenizer.build(['go to bed 1'])
  path = tmp_path / 'tokenizer.json'
  path.write_bytes(built.files['tokenizer.json'])
  content = json.loads(path.read_text())
  vocabulary = content['model']['vocab']
  vocabulary['stop'] = vocabulary.pop('<end>')
  path.write_text(json.dumps(content))
  with pytest.raises(ValueError, match=r'tokenizer\.json.*lacks <end>'):
    word_tokenizer.WordTokenizer.load(path)
