"""Kernels never rely on implicit rank promotion."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _no_rank_promotion():
  with jax.numpy_rank_promotion('raise'):
    yield
