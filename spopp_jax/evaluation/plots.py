"""Pictures of reward curves, written as PNG without a display."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from spopp_jax.evaluation import curves

if TYPE_CHECKING:
  from matplotlib import axes, figure

_WINDOW = 5


def reward_curve(
  path: str | os.PathLike[str],
  *,
  collected: npt.ArrayLike,
  dispatched: npt.ArrayLike,
) -> figure.Figure:
  """Draws one run: each step pale, its trailing mean of five steps dark.

  Args:
    path: where the PNG goes.
    collected: [T] mean reward of the trained batches.
    dispatched: [T] mean reward of everything dispatched, which no
      first-finished rule flatters.

  Returns:
    The figure that was saved.

  Raises:
    ValueError: a curve is empty or not finite.
  """
  image, ax = _new_figure()
  # Dashed on top: where nothing is over-dispatched the two coincide.
  for label, color, style, rewards in (
    ('collected batch', 'C0', '-', collected),
    ('all dispatched (unbiased)', 'C1', '--', dispatched),
  ):
    smooth = curves.trailing_mean(rewards, _WINDOW)
    steps = np.arange(smooth.size)
    ax.plot(steps, np.asarray(rewards), color=color, alpha=0.3, linewidth=1)
    ax.plot(
      steps, smooth, color=color, linestyle=style, linewidth=2, label=label
    )
  ax.set_title(f'mean reward, {_WINDOW}-step trailing mean')
  return _save(image, ax, path)


def comparison(
  path: str | os.PathLike[str],
  replicates: Mapping[str, Sequence[npt.ArrayLike]],
) -> figure.Figure:
  """Draws several methods: replicates thin, their mean thick.

  Args:
    path: where the PNG goes.
    replicates: method -> its reward curves [T]; the mean stops where the
      shortest of them does.

  Returns:
    The figure that was saved.

  Raises:
    ValueError: a method has no curve, or a curve is empty or not finite.
  """
  image, ax = _new_figure()
  for number, (method, runs) in enumerate(replicates.items()):
    if not runs:
      raise ValueError(f'{method} has no replicates')
    color = f'C{number}'
    smooth = [curves.trailing_mean(run, _WINDOW) for run in runs]
    for run in smooth:
      ax.plot(np.arange(run.size), run, color=color, alpha=0.4, linewidth=0.8)
    steps = min(run.size for run in smooth)
    mean = np.mean([run[:steps] for run in smooth], axis=0)
    ax.plot(np.arange(steps), mean, color=color, linewidth=2.5, label=method)
  ax.set_title(f'{_WINDOW}-step trailing mean: runs thin, mean thick')
  return _save(image, ax, path)


def _new_figure() -> tuple[figure.Figure, axes.Axes]:
  # Imported here: it takes a second and only the end of a run draws.
  from matplotlib import figure

  image = figure.Figure(figsize=(7, 4.2), layout='constrained')
  return image, image.add_subplot()


def _save(
  image: figure.Figure, ax: axes.Axes, path: str | os.PathLike[str]
) -> figure.Figure:
  ax.set_xlabel('learner step')
  ax.set_ylabel('reward')
  ax.set_ylim(0, 1)
  ax.grid(alpha=0.3)
  ax.legend(loc='lower right')
  image.savefig(path, dpi=120, format='png')
  return image
