import jax.numpy as jnp
import pytest


def test_no_test_relies_on_implicit_rank_promotion():
  with pytest.raises(ValueError, match='rank_promotion'):
    jnp.ones(2) + jnp.ones((2, 2))
