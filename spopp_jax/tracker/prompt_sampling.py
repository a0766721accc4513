"""Which prompts to dispatch next: uncertain ones more often (SPO, SPO++)."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt


def prompt_weights(
  values: np.ndarray,
  *,
  floor: float = 0.05,
  mass: np.ndarray | None = None,
  gamma: float = 0.0,
) -> np.ndarray:
  """Returns sqrt(v (1 - v)) / mass**gamma + floor, the weight of each prompt.

  Example: values [0, .5, 1] give [.05, .55, .05].

  Args:
    values: [P] float64; v-hat in [0, 1].
    floor: > 0; keeps solved and hopeless prompts alive.
    mass: [P] float64 > 0; success + failure; needed with gamma.
    gamma: >= 0; 0 is the published recipe, more prefers little-known prompts.

  Returns:
    [P] float64, positive, not normalised.

  Raises:
    ValueError: naming the argument that is out of range.
  """
  values = np.asarray(values, np.float64)
  wrong = np.flatnonzero(~((values >= 0) & (values <= 1)))
  if wrong.size:
    raise ValueError(
      f'value {values[wrong[0]]} of prompt {wrong[0]} must lie in [0, 1]'
    )
  if not (np.isfinite(floor) and floor > 0):
    raise ValueError(f'floor ({floor}) must be positive and finite')
  if not (np.isfinite(gamma) and gamma >= 0):
    raise ValueError(f'gamma ({gamma}) must be at least 0 and finite')
  spread = np.sqrt(values * (1 - values))
  if gamma:
    if mass is None or not (np.asarray(mass) > 0).all():
      raise ValueError(
        f'gamma ({gamma}) needs the positive mass of each prompt'
      )
    spread = spread / np.asarray(mass, np.float64) ** gamma
  return spread + floor


class PromptSampler:
  """Draws among P rows in proportion to weights, in O(log P) a draw.

  The weights are the leaves of a binary tree whose other nodes hold the sum of
  their two children. After a change the sums above it are taken anew from the
  children, so that the tree is a function of the present weights: no rounding
  is carried along, and a tree built afresh draws the same rows.
  """

  def __init__(self, weights: npt.ArrayLike):
    """Builds the tree in O(P).

    Args:
      weights: [P] float64, at least 0; P >= 1.

    Raises:
      ValueError: no weights, or one that is negative or not finite.
    """
    weights = _checked_weights(weights)
    if weights.ndim != 1 or not weights.size:
      raise ValueError(f'weights of shape {weights.shape} must be [P], P >= 1')
    self._size = len(weights)
    # Node i has the children 2i and 2i + 1; the leaves are the last P nodes.
    self._tree = np.zeros(2 * self._size)
    self._tree[self._size :] = weights
    # Those from _deep on lie one level below the others.
    self._full_levels = self._size.bit_length() - 1
    self._deep = 2 << self._full_levels
    for level in reversed(range(self._full_levels + 1)):
      self._sum_level(level)

  @property
  def weights(self) -> np.ndarray:
    """The present weights, a copy [P] float64."""
    return self._tree[self._size :].copy()

  def update(self, rows: np.ndarray, weights: npt.ArrayLike) -> None:
    """Replaces the weights of some rows, in O(n log P).

    Args:
      rows: [n] int64, distinct, in [0, P).
      weights: [n] float64, at least 0.

    Raises:
      ValueError: a weight that is negative or not finite.
    """
    weights = _checked_weights(weights)
    nodes = self._size + rows
    self._tree[nodes] = weights
    deep = nodes >= self._deep
    self._sum(nodes[deep] >> 1)
    nodes = np.where(deep, nodes >> 1, nodes)
    for level in reversed(range(self._full_levels)):
      if len(nodes) > 1 << level:
        self._sum_level(level)
      else:
        nodes = nodes >> 1
        self._sum(nodes)

  def sample(
    self,
    count: int,
    *,
    rng: np.random.Generator,
    slots: Callable[[int], int] | None = None,
  ) -> np.ndarray:
    """Draws rows one after another, each in proportion to the weights left.

    A row leaves once its slots are taken. With one slot each this is sampling
    without replacement: P(i, j) = w_i / W * w_j / (W - w_i). A draw of a row
    that has left is repeated, which is the same as drawing among the others.

    Draws are made in rounds of as many as are missing. When fewer than half of
    a round count, the rows that left are taken out of the tree, until the
    return: the rounds are few unless a few rows hold nearly all the weight.

    Args:
      count: rows to draw.
      rng: the run's generator; advanced.
      slots: how often the row may be drawn, 0 for never; asked of drawn rows
        alone. None is once each.

    Returns:
      [count] int64 rows in the order drawn.

    Raises:
      ValueError: fewer slots of positive weight than count.
    """
    drawn: list[int] = []
    left: dict[int, int] = {}
    full: list[int] = []
    removed: list[tuple[np.ndarray, np.ndarray]] = []
    try:
      while len(drawn) < count:
        if not self._tree[1] > 0:
          raise ValueError(
            f'{count} draws asked for, {len(drawn)} are available among '
            f'{self._size} rows'
          )
        missing = count - len(drawn)
        for row in self._descend(_uniforms(rng, missing)):
          if row not in left:
            left[row] = 1 if slots is None else slots(row)
          elif left[row] <= 0:
            continue
          if left[row] > 0:
            drawn.append(row)
            left[row] -= 1
          if left[row] <= 0:
            full.append(row)
        if 2 * (count - len(drawn)) > missing:
          rows = np.array(full, np.int64)
          removed.append((rows, self._tree[self._size + rows]))
          self.update(rows, np.zeros(len(rows)))
          full = []
    finally:
      for rows, weights in removed:
        self.update(rows, weights)
    return np.array(drawn, np.int64)

  def _descend(self, uniforms: np.ndarray) -> list[int]:
    """Rows [n] drawn with replacement; one uniform number [0, 1) each."""
    nodes = np.ones(len(uniforms), np.int64)
    rest = uniforms * self._tree[1]
    for _ in range(self._full_levels):
      nodes, rest = self._step(nodes, rest)
    inner = nodes < self._size
    nodes[inner], _ = self._step(nodes[inner], rest[inner])
    return (nodes - self._size).tolist()

  def _step(
    self, nodes: np.ndarray, rest: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Goes from nodes to the children in which `rest` of their sums lies."""
    left = 2 * nodes
    below = self._tree[left]
    # Rounding must not lead to a leaf of weight 0, which has no chance.
    turn = (rest >= below) & (self._tree[left + 1] > 0)
    return left + turn, np.where(turn, rest - below, rest)

  def _sum_level(self, level: int) -> None:
    low, high = 1 << level, min(2 << level, self._size)
    children = self._tree[2 * low : 2 * high]
    self._tree[low:high] = children[::2] + children[1::2]

  def _sum(self, nodes: np.ndarray) -> None:
    left = 2 * nodes
    self._tree[nodes] = self._tree[left] + self._tree[left + 1]


def _uniforms(rng: np.random.Generator, count: int) -> np.ndarray:
  """Returns what `rng.random(count)` does, with a 64-bit generator.

  numpy's own gives the interpreter's lock away meanwhile, and a dispatch that
  has lost it waits for every other thread.
  """
  return (rng.bit_generator.random_raw(count) >> np.uint64(11)) * 2.0**-53


def _checked_weights(weights: npt.ArrayLike) -> np.ndarray:
  weights = np.asarray(weights, np.float64)
  wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
  if wrong.size:
    raise ValueError(
      f'weight {weights[wrong[0]]} must be finite and at least 0'
    )
  return weights
