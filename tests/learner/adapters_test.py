"""A learner that trains LoRA adapters alone."""

import jax
import numpy as np
import optax
import pytest

from spopp_jax import objectives
from spopp_jax.learner import forward, packing, update
from spopp_jax.models import lora

ADAPTERS = lora.Config(rank=2, alpha=4.0, targets=('q_proj', 'up_proj'))


def make(tiny, dtype='float32', adapters=ADAPTERS):
  return update.Learner(
    tiny.config,
    objectives.make_objective('spopp', {}),
    optax.sgd(1.0, momentum=0.9),
    settings=forward.Settings(adapters=adapters, compute_dtype=dtype),
    minibatch_size=6,
    row_length=tiny.row_length,
    row_buckets=(4,),
  )


def pack(tiny):
  trajectories = tiny.make_trajectories()
  return packing.pack(
    trajectories,
    [0.2, 0.6, 0.45, 0.8, 0.3, 0.5],
    num_slots=6,
    minibatches=1,
    row_length=tiny.row_length,
    row_buckets=(4,),
  )


def test_new_adapters_score_as_the_base_does(tiny):
  params, trajectories = tiny.make_parameters(), tiny.make_trajectories()
  adapted, plain = make(tiny), make(tiny, adapters=None)
  state = adapted.init(params)
  got = adapted.score(state.params, trajectories)
  want = plain.score(plain.init(params).params, trajectories)
  for one, other in zip(got, want, strict=True):
    np.testing.assert_array_equal(one, other)
  for name, value in adapted.policy(state).items():
    np.testing.assert_array_equal(value, params[name])


@pytest.mark.parametrize('dtype, bound', [('float32', 1e-5), ('bfloat16', 0.1)])
def test_only_adapters_are_trained_and_the_policy_holds_them(
  tiny, dtype, bound
):
  params, trajectories = tiny.make_parameters(), tiny.make_trajectories()
  adapted, plain = make(tiny, dtype), make(tiny, adapters=None)
  state = adapted.init(params)
  start = jax.tree.map(np.asarray, state.params)
  for _ in range(2):  # A has no gradient before B has moved
    state, _ = adapted.update(state, pack(tiny))
  names = lora.shapes(ADAPTERS, params).keys()
  assert state.params.keys() == names
  assert {x.dtype for x in state.params.values()} == {np.dtype('float32')}
  # The optimizer's state: one momentum for each, and nothing of the base.
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert sorted(x.shape for x in moments) == sorted(
    x.shape for x in start.values()
  )
  assert all((state.params[name] != start[name]).any() for name in names)

  policy = adapted.policy(state)
  merged = lora.merge(ADAPTERS, params, jax.tree.map(np.asarray, state.params))
  changed = set()
  for name, value in policy.items():
    np.testing.assert_array_equal(value, merged[name])
    changed |= {name.split('.')[-2]} if (value != params[name]).any() else set()
  assert changed == set(ADAPTERS.targets)
  got = adapted.score(state.params, trajectories)
  want = plain.score(policy, trajectories)
  for one, other in zip(got, want, strict=True):
    np.testing.assert_allclose(one, other, atol=bound)


def test_adapters_move_by_the_chain_rule_of_the_whole_gradient(tiny):
  # dL/dB = (alpha / rank) dL/dW A^T, at B = 0 where W is the base.
  params = tiny.make_parameters()
  adapted, plain = make(tiny), make(tiny, adapters=None)
  state, whole = adapted.init(params), plain.init(params)
  down = np.asarray(
    state.params['model.layers.0.self_attn.q_proj.lora_A.weight']
  )
  state, _ = adapted.update(state, pack(tiny))
  whole, _ = plain.update(whole, pack(tiny))
  name = 'model.layers.0.self_attn.q_proj'
  gradient = params[f'{name}.weight'] - whole.params[f'{name}.weight']
  np.testing.assert_allclose(
    -state.params[f'{name}.lora_B.weight'],
    2.0 * gradient @ down.T,
    rtol=1e-3,
    atol=1e-5,
  )
