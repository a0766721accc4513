"""Batches for objectives, laid out in rows in several ways."""

import functools

import jax
import numpy as np
import pytest

from spopp_jax import objectives, types

NUM = 6
GROUP_SIZE = 2
_PER_TOKEN = ('action_mask', 'behaviour', 'proximal', 'current')


class Episodes:
  """Six trajectories; number 2 has no action token.

  With the default seed clip, dual clip and truncation all bind, M2PO's mask
  leaves half of its trust region, and GSPO's clip leaves gradients.
  Groups are pairs: (0, 1), (2, 3), (4, 5).
  """

  def __init__(self, seed=8, scale=0.8):
    rng = np.random.default_rng(seed)
    self.lengths = [7, 4, 3, 9, 5, 6]
    self.action_mask = [rng.random(n) < 0.6 for n in self.lengths]
    for mask in self.action_mask:
      mask[0], mask[1] = False, True
    self.action_mask[2][:] = False
    draw = lambda scale: [rng.normal(0, scale, n) for n in self.lengths]
    self.behaviour = [x - 2 for x in draw(0.5)]
    self.proximal = [
      b + x for b, x in zip(self.behaviour, draw(scale), strict=True)
    ]
    self.current = [
      p + x for p, x in zip(self.proximal, draw(scale), strict=True)
    ]
    self.rewards = np.array([0, 1, 1, 0, 1, 0], np.float32)
    self.values = np.array([0.3, 0.6, 0.5, 0.2, 0.45, 0.7], np.float32)

  def pack(
    self, layout=((0, 1), (2, 3), (4, 5)), *, width=14, slots=NUM, fill=0.0
  ):
    """Returns a PackedBatch and its proximal and current log-probs [B, S].

    Args:
      layout: the trajectories of each row, in order.
      width: S.
      slots: N; slots beyond the six are not usable.
      fill: stands in every slot that is not an action token.
    """
    shape = (len(layout), width)
    ids = np.full(shape, slots, np.int32)
    columns = {name: np.full(shape, fill, np.float32) for name in _PER_TOKEN}
    columns['action_mask'] = np.zeros(shape, bool)
    positions = np.zeros(shape, np.int32)
    segment_ids = np.zeros(shape, np.int32)
    for row, members in enumerate(layout):
      start = 0
      for segment, i in enumerate(members, start=1):
        span = slice(start, start + self.lengths[i])
        mask = self.action_mask[i]
        ids[row, span] = i
        segment_ids[row, span] = segment
        positions[row, span] = np.arange(self.lengths[i])
        columns['action_mask'][row, span] = mask
        for name in _PER_TOKEN[1:]:
          columns[name][row, span] = np.where(
            mask, getattr(self, name)[i], fill
          )
        start = span.stop
    extra = slots - NUM
    batch = types.PackedBatch(
      tokens=np.zeros(shape, np.int32),
      positions=positions,
      segment_ids=segment_ids,
      trajectory_ids=ids,
      action_mask=columns['action_mask'],
      behaviour_logprobs=columns['behaviour'],
      kept_ids=np.zeros((*shape, 0), np.int32),
      rewards=np.append(self.rewards, np.full(extra, fill, np.float32)),
      values=np.append(self.values, np.full(extra, fill, np.float32)),
      usable=np.arange(slots) < NUM,
      group_ids=np.arange(slots, dtype=np.int32) // GROUP_SIZE,
    )
    return batch, columns['proximal'], columns['current']


def _make(name, *, axis_name=None, **overrides):
  if objectives.make_objective(name, {}).group_size > 1:
    overrides.setdefault('group_size', GROUP_SIZE)
  return objectives.make_objective(name, overrides, axis_name=axis_name)


@pytest.fixture(scope='session')
def objective_of():
  """`make_objective` with the group size of `Episodes`, one of a kind."""
  return functools.cache(_make)


@pytest.fixture(scope='session')
def make_jitted():
  """Like `objective_of`, with each function jitted."""

  @functools.cache
  def make_once(name, **overrides):
    objective = _make(name, **overrides)
    functions = {
      field: jax.jit(value)
      for field, value in objective._asdict().items()
      if callable(value)
    }
    return objective._replace(**functions)

  return make_once


@pytest.fixture
def episodes():
  return Episodes()


@pytest.fixture(scope='session')
def make_episodes():
  """Episodes of a seed, and of a size of their log-ratios in nats."""
  return Episodes


@pytest.fixture(scope='module', autouse=True)
def _quick_compilation():
  """Tiny programs run as fast, and compile in less time."""
  name = 'jax_disable_most_optimizations'
  before = jax.config.values[name]
  jax.config.update(name, True)
  yield
  jax.config.update(name, before)
