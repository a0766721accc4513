import json

from spopp_jax.runner import pauses


class World:
  """A clock and the reports of one object."""

  def __init__(self, path=None):
    self.now = 0.0
    self.asked = 0
    self.pauses = pauses.Pauses(
      path,
      report_every_s=30.0,
      clock=lambda: self.now,
      wall_clock=lambda: 1000.0 + self.now,
    )

  def waiting_at(self, now):
    self.now = now
    self.pauses.waiting(self._reason, 'an answer')

  def _reason(self):
    self.asked += 1
    return f'reason {self.asked}'


def test_a_lasting_pause_is_reported_again_and_again(tmp_path, caplog):
  path = tmp_path / 'pauses.jsonl'
  world = World(path)
  for now in (5.0, 34.0, 35.0, 36.0, 64.0, 65.5):
    world.waiting_at(now)
  world.now = 70.0
  world.pauses.over()
  world.pauses.over()
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert lines == [
    {
      'since': 1005.0,
      'seconds': seconds,
      'over': over,
      'reason': f'reason {number}',
      'lifted_by': 'an answer',
    }
    for number, seconds, over in (
      (1, 30.0, False),
      (2, 60.5, False),
      (2, 65.0, True),
    )
  ]
  assert 'waiting for 30 s: reason 1. Lifted by: an answer' in caplog.text


def test_short_pauses_are_not_reported(caplog):
  world = World()
  for now in (5.0, 34.0):
    world.waiting_at(now)
  world.pauses.over()
  for now in (36.0, 65.0):
    world.waiting_at(now)
  assert world.asked == 0
  assert caplog.text == ''


def test_half_a_line_of_a_killed_process_spoils_no_other(tmp_path):
  path = tmp_path / 'pauses.jsonl'
  path.write_text('{"since": 1.0, "seco')
  world = World(path)
  for now in (5.0, 35.0, 65.0):
    world.waiting_at(now)
  first, *others = path.read_text().splitlines()
  assert first == '{"since": 1.0, "seco'
  assert [json.loads(line)['seconds'] for line in others] == [30.0, 60.0]
