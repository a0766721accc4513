"""Speeds and biases of runs whose course is known."""

import dataclasses

import numpy as np
import pytest

from spopp_jax.runner import collection_speed, simulation
from spopp_jax.runner import simulated_services as services

EVEN = simulation.Setting(
  max_lag=0,
  batch_size=8,
  in_flight=8,
  steps=5,
  update_s=1.0,
  site=services.Site(install_s=0.0, durations=lambda _: 3.0),
)


def test_synchronous_steps_take_an_episode_and_an_update():
  speed = collection_speed.measure(EVEN, range(2))
  assert speed.steps_per_s == pytest.approx(1 / 4)
  assert speed.trajectories_per_s == pytest.approx(8 / 4)
  assert speed.length_bias == 0


def test_first_finished_trains_the_short_ones():
  # Seeds are even: half of the episodes take 1 s, half take 5.
  site = dataclasses.replace(
    EVEN.site, durations=lambda request: 1.0 + 4.0 * (request.seed % 2)
  )
  setting = dataclasses.replace(EVEN, in_flight=32, site=site)
  biased = collection_speed.measure(setting, [0])
  # All 1 s long, where 3 s are dispatched in the mean.
  assert biased.length_bias == pytest.approx(1 / 3 - 1, abs=0.08)
  fair = collection_speed.measure(
    dataclasses.replace(setting, in_flight=8), [0]
  )
  assert abs(fair.length_bias) < 0.08


def test_the_first_batch_of_groups_waits_for_its_slowest():
  durations = np.array([[1.0, 9.0, 2.0, 3.0, 4.0, 8.0]])
  # Alone: 1, 2, 3, 4. Groups of two end at 9, 3 and 8: the second at 8.
  assert collection_speed.first_batch_ratio(
    durations, batch_size=4, group_size=2
  ) == pytest.approx(8 / 4)
  assert (
    collection_speed.first_batch_ratio(durations, batch_size=6, group_size=2)
    == 1
  )
  with pytest.raises(ValueError, match=r'group_size \(4\) must divide'):
    collection_speed.first_batch_ratio(durations, batch_size=4, group_size=4)
