import numpy as np
import scripted_sampler

from spopp_jax.models import word_tokenizer
from spopp_jax.runner import transcript

FIRST = 'You are in a room. Your task is to: go to desk 1.'
OBSERVATION = 'You arrive at desk 1.'
TOKENIZER = word_tokenizer.WordTokenizer.build(
  [FIRST, OBSERVATION, 'look', 'go to desk 1']
)


def episode(**changes):
  pieces = [
    (TOKENIZER.prompt(FIRST), False),
    (TOKENIZER.action('look'), True),
    (TOKENIZER.observation(OBSERVATION, TOKENIZER.action('look')), False),
    (TOKENIZER.action('go to desk 1'), True),
  ]
  return scripted_sampler.trajectory(
    task_id='put-1',
    tokens=np.concatenate([tokens for tokens, _ in pieces]),
    actions=np.concatenate([np.full(len(t), a) for t, a in pieces]),
    num_turns=2,
    version=7,
    **changes,
  )


def test_every_turn_reads_as_it_was_seen_and_said():
  text = transcript.render(episode(), TOKENIZER)
  head, empty, *paragraphs = text.splitlines()
  assert head == (
    'task put-1: success, reward 1, 2 turns, 5 action tokens, policy version 7'
  )
  assert empty == ''
  assert paragraphs == [
    '<begin> You are in a room . Your task is to: go to desk 1 . <turn>',
    '',
    '> look <end>',
    'You arrive at desk 1 . <turn>',
    '',
    '> go to desk 1 <end>',
  ]


def test_failure_is_called_failure():
  text = transcript.render(episode(reward=0.0), TOKENIZER)
  assert text.startswith('task put-1: failure, reward 0, ')


def test_nothing_is_left_out():
  item = episode()
  shown = transcript.render(item, TOKENIZER).split('\n\n', 1)[1]
  words = shown.replace('\n> ', ' ').split()
  assert words == TOKENIZER.decode(item.tokens).split()
