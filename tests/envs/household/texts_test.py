import pytest

from spopp_jax.envs.household import texts


@pytest.mark.parametrize(
  'names, expected',
  [
    ([], 'nothing'),
    (['mug 1'], 'a mug 1'),
    (['mug 1', 'pen 2'], 'a mug 1, and a pen 2'),
    (['mug 1', 'pen 2', 'cd 1'], 'a mug 1, a pen 2, and a cd 1'),
  ],
)
def test_enumerate_names(names, expected):
  assert texts.enumerate_names(names) == expected


def test_enumerate_names_without_article():
  assert texts.enumerate_names(['a 1', 'b 2'], article='') == 'a 1, and b 2'


def _describe(flags='', contents=None):
  return texts.describe_object(
    'apple 1',
    contents=contents,
    clean='c' in flags,
    hot='h' in flags,
    cool='k' in flags,
    sliced='s' in flags,
    switched_on='o' in flags,
  )


@pytest.mark.parametrize(
  'flags, expected',
  [
    ('', "There's nothing special about apple 1."),
    ('c', 'This is a clean apple 1.'),
    ('h', 'This is a hot apple 1.'),
    ('k', 'This is a cold apple 1.'),
    ('s', 'This is a sliced apple 1.'),
    ('ch', 'This is a hot and clean apple 1.'),
    ('ck', 'This is a cool and clean apple 1.'),
    ('cs', 'This is a clean sliced apple 1.'),
    ('hs', 'This is a hot sliced apple 1.'),
    ('ks', 'This is a cool sliced apple 1.'),
    ('chs', 'This is a hot and clean sliced apple 1.'),
    ('cks', 'This is a cool and clean sliced apple 1.'),
    ('o', 'This apple 1 is on.'),
    ('os', 'This apple 1 is on.'),
    ('oc', 'This is a clean apple 1.'),
  ],
)
def test_describe_object(flags, expected):
  assert _describe(flags) == expected


def test_vessels_show_their_contents_only():
  assert _describe('ch', contents=['spoon 1']) == (
    'This is a normal apple 1. In it, you see a spoon 1.'
  )
  assert _describe(contents=[]).endswith('In it, you see nothing.')
