"""Which prompts to dispatch next: uncertain ones more often (SPO, SPO++)."""

import numpy as np


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


def sample_prompts(
  values: np.ndarray,
  available: np.ndarray,
  count: int,
  *,
  rng: np.random.Generator,
  floor: float = 0.05,
  mass: np.ndarray | None = None,
  gamma: float = 0.0,
) -> np.ndarray:
  """Draws prompts one after another, in proportion to the weights left.

  Args:
    values: [P] float64; v-hat in [0, 1].
    available: [P] bool; False for prompts that must not be drawn, such as
      those with a request in flight.
    count: prompts to draw, without replacement.
    rng: the run's generator; advanced by the draw.
    floor: as in `prompt_weights`.
    mass: as in `prompt_weights`.
    gamma: as in `prompt_weights`.

  Returns:
    [count] int64 indices, in the order drawn.

  Raises:
    ValueError: count exceeds the number of available prompts, or an argument
      that `prompt_weights` refuses.
  """
  weights = prompt_weights(values, floor=floor, mass=mass, gamma=gamma)
  candidates = np.flatnonzero(available)
  if not 0 <= count <= len(candidates):
    raise ValueError(
      f'{count} prompts asked for, {len(candidates)} are available; lower the '
      'requests in flight or add tasks'
    )
  if count == 0:
    return candidates[:0]
  chances = weights[candidates]
  return rng.choice(
    candidates, size=count, replace=False, p=chances / chances.sum()
  )
