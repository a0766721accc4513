"""Sentences of the official household engine."""

from collections.abc import Sequence

NOTHING_HAPPENS = 'Nothing happens.'

WELCOME = '-= Welcome to TextWorld, ALFRED! =-'

HELP = """\
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""


def enumerate_names(names: Sequence[str], article: str = 'a ') -> str:
  """Lists names the official way: 'a mug 1, and a pen 2', or 'nothing'."""
  if not names:
    return 'nothing'
  words = [article + name for name in names]
  if len(words) == 1:
    return words[0]
  return f'{", ".join(words[:-1])}, and {words[-1]}'


def describe_object(
  name: str,
  *,
  contents: Sequence[str] | None,
  clean: bool,
  hot: bool,
  cool: bool,
  sliced: bool,
  switched_on: bool,
) -> str:
  """Describes a held object.

  Args:
    name: name of the object.
    contents: names of what lies in it; None when it is not a vessel. A vessel
      shows its contents only, never its state.
    clean: it has been cleaned.
    hot: it is hot.
    cool: it is cool.
    sliced: it has been sliced.
    switched_on: it can be used and has been; shown when nothing but `sliced`
      is to tell.

  Returns:
    One or two sentences.
  """
  if contents is not None:
    inside = enumerate_names(contents)
    return f'This is a normal {name}. In it, you see {inside}.'
  if switched_on and not (clean or hot or cool):
    return f'This {name} is on.'
  temperature = 'hot' if hot else 'cool' if cool else ''
  if not (clean or temperature or sliced):
    return f"There's nothing special about {name}."
  if temperature == 'cool' and not (clean or sliced):
    temperature = 'cold'
  state = ' and '.join(filter(None, (temperature, 'clean' if clean else '')))
  words = filter(None, (state, 'sliced' if sliced else '', name))
  return f'This is a {" ".join(words)}.'
