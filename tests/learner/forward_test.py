import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spopp_jax import objectives
from spopp_jax.learner import forward, packing, update
from spopp_jax.models import parameters


def rows(tiny):
  trajectories = tiny.make_trajectories()
  return packing.pack(
    trajectories,
    [0.5] * len(trajectories),
    num_slots=6,
    minibatches=1,
    row_length=tiny.row_length,
    row_buckets=(4,),
  )


def logprobs(tiny, **settings):
  """Returns the function of parameters and one minibatch's rows."""
  graphdef, _ = parameters.graph(tiny.config)
  chosen = forward.Settings(**settings)
  batch = jax.tree.map(lambda x: x[0] if x.ndim >= 3 else x, rows(tiny))
  return lambda params: forward.packed_logprobs(graphdef, chosen, params, batch)


def test_bfloat16_stays_within_its_resolution_of_float32(tiny):
  params = tiny.make_parameters()
  exact = jax.jit(logprobs(tiny))(params)
  coarse = jax.jit(logprobs(tiny, compute_dtype='bfloat16'))(params)
  assert coarse.dtype == jnp.float32
  gap = np.abs(coarse - exact).max()
  # 2^-8 is bfloat16's relative rounding; log-probs here reach -10 nats.
  assert 1e-4 < gap < 0.1, gap
  # The head's sums are float32: they are no multiples of bfloat16's steps.
  assert (coarse != coarse.astype(jnp.bfloat16).astype(jnp.float32)).any()


def test_what_is_cast_are_the_matrices(tiny):
  # Vectors, the norms' weights, keep all their digits: 1 + 2^-12 is no
  # bfloat16, and only a cast of the matrices leaves a trace.
  params = tiny.make_parameters()
  nudged = {k: v * (1 + 2.0**-12) for k, v in params.items()}
  coarse = jax.jit(logprobs(tiny, compute_dtype='bfloat16'))
  vectors = {k: v for k, v in nudged.items() if v.ndim == 1}
  assert (coarse({**params, **vectors}) != coarse(params)).any()
  rounded = {
    k: np.asarray(jnp.asarray(v, jnp.bfloat16), np.float32) if v.ndim > 1 else v
    for k, v in params.items()
  }
  np.testing.assert_array_equal(coarse(rounded), coarse(params))


def test_gradients_of_bfloat16_are_float32_and_alike(tiny):
  params = tiny.make_parameters()
  exact = jax.jit(jax.grad(lambda p: logprobs(tiny)(p).sum()))(params)
  coarse = jax.jit(
    jax.grad(lambda p: logprobs(tiny, compute_dtype='bfloat16')(p).sum())
  )(params)
  for name, gradient in coarse.items():
    assert gradient.dtype == jnp.float32
    scale = np.abs(exact[name]).max()
    assert np.abs(gradient - exact[name]).max() < 0.1 * scale, name


@pytest.mark.parametrize('microbatches', [1, 2])
def test_an_update_below_bfloat16s_resolution_is_not_lost(tiny, microbatches):
  learner = update.Learner(
    tiny.config,
    objectives.make_objective('spopp', {}),
    # Each parameter moves by the rate, whatever its gradient's size.
    optax.chain(optax.scale_by_sign(), optax.scale(-1e-4)),
    settings=forward.Settings(compute_dtype='bfloat16'),
    microbatches=microbatches,
    minibatch_size=6,
    row_length=tiny.row_length,
    row_buckets=(4,),
  )
  params = tiny.make_parameters()
  state = learner.init(params)
  for _ in range(3):
    state, _ = learner.update(state, rows(tiny))
  norm = 'model.norm.weight'
  assert state.params[norm].dtype == jnp.float32
  moved = np.abs(state.params[norm] - params[norm])
  np.testing.assert_allclose(moved[moved > 2e-4], 3e-4, rtol=1e-2)
  assert (moved > 2e-4).sum() > 8
  # In bfloat16 a step of 1e-4 from 1 is none.
  assert jnp.bfloat16(1) - jnp.bfloat16(1e-4) == 1


@pytest.mark.parametrize('remat', ['full', 'dots'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_rematerialization_changes_no_gradient(tiny, remat, dtype):
  params = tiny.make_parameters()
  gradient = lambda **settings: jax.jit(
    jax.grad(lambda p: logprobs(tiny, compute_dtype=dtype, **settings)(p).sum())
  )(params)
  want = gradient()
  for name, value in gradient(remat=remat).items():
    scale = np.abs(want[name]).max()
    np.testing.assert_allclose(
      value / scale, want[name] / scale, rtol=0, atol=1e-6, err_msg=name
    )


@pytest.mark.parametrize(
  'field, value', [('compute_dtype', 'float16'), ('remat', 'some')]
)
def test_settings_that_there_are_not_are_refused(field, value):
  with pytest.raises(ValueError, match=f"{field} ..{value}'. must be one of"):
    dataclasses.replace(forward.Settings(), **{field: value})
