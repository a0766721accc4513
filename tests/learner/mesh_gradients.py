"""Compares steps on meshes of 8 forced CPU devices with one device's.

Prints, for each decoder and mesh, the largest relative difference of a
parameter's gradient, of the moved parameters and of scores, the share of a
device in the state's bytes, how far a checkpoint of the one device differs when
it comes back on the mesh, and how far attention's own kernel does.
"""

import json
import tempfile

import jax
import numpy as np
import optax

from spopp_jax import objectives, types
from spopp_jax.learner import checkpoint, packing, update
from spopp_jax.models import attention, dense, mesh, parameters

ROW = 32
TRAJECTORIES = 16
MESHES = {'4x2': mesh.Sizes(4, 2), '2x2x2': mesh.Sizes(2, 2, 2)}


def decoder(tied):
  return dense.DecoderConfig(
    vocab_size=23 if tied else 24,  # 23: nothing divides it
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    tie_word_embeddings=tied,
    qk_norm=tied,
  )


def trajectories(rng):
  made = []
  for i in range(TRAJECTORIES):
    length = int(rng.integers(5, ROW))
    mask = rng.random(length) < 0.6
    mask[:2] = False, True
    made.append(
      types.Trajectory(
        request_id=f'r{i}',
        task_id='t',
        status=types.Status.OK,
        reward=float(i % 3 == 0),
        policy_version=0,
        weights_checksum='',
        tokens=rng.integers(0, 23, length).astype(np.int32),
        action_mask=mask,
        behaviour_logprobs=np.where(mask, -3.0, 0).astype(np.float32),
        num_turns=1,
        sampling=types.SamplingParams(),
      )
    )
  return made


def learner(config, sizes, microbatches):
  return update.Learner(
    config,
    objectives.make_objective('spopp', {}),
    # Keeps the gradient itself in its state, by name.
    optax.chain(optax.trace(0.0), optax.scale(-1.0)),
    minibatch_size=TRAJECTORIES,
    microbatches=microbatches,
    row_length=ROW,
    row_buckets=(16,),
    mesh=mesh.DeviceMesh(sizes),
  )


def relative(got, want):
  """Largest difference of a tree's array, relative to that array's scale."""
  return max(
    float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  )


def step(config, sizes, microbatches):
  """Returns learner, gradients, moved parameters and scores."""
  rng = np.random.default_rng(0)
  params = jax.tree.map(np.asarray, parameters.initial(config, 1))
  episodes = trajectories(rng)
  one = learner(config, sizes, microbatches)
  batch = packing.pack(
    episodes,
    rng.random(TRAJECTORIES),
    num_slots=TRAJECTORIES,
    minibatches=1,
    row_length=ROW,
    row_buckets=(16,),
    row_multiple=microbatches * one.row_parts,
  )
  assert batch.tokens.shape == (1, 16, ROW), batch.tokens.shape
  state, metrics = one.update(one.init(params), batch)
  assert metrics['skipped_update'] == 0
  gradients = state.opt_state[0].trace
  for name, gradient in gradients.items():
    assert gradient.sharding.is_equivalent_to(
      state.params[name].sharding, gradient.ndim
    ), name
  return one, state, gradients, one.score(state.params, episodes)


def share(state):
  """Bytes of the state on the fullest device, over those of all of it."""
  held = {}
  for leaf in jax.tree.leaves(state):
    for shard in leaf.addressable_shards:
      held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
  return max(held.values()) / sum(x.nbytes for x in jax.tree.leaves(state))


def kernel_difference(sizes):
  """How far a TPU's kernel, interpreted on a mesh, is from one device's."""
  rng = np.random.default_rng(0)
  states = [
    rng.normal(size=(8, 128, heads, 8)).astype('f4') for heads in (4, 2, 2)
  ]
  ids = np.sort(rng.integers(0, 3, (8, 128)), axis=1).astype('i4')
  want = attention.attend(*states, attention.within_segments(ids))
  with jax.set_mesh(mesh.DeviceMesh(sizes).mesh):
    spread = jax.jit(attention._splash, static_argnames='interpret')
    got = spread(*states, ids, interpret=True)
    assert len(got.sharding.device_set) == 8
  return relative(got, want)


def main():
  assert jax.device_count() == 8
  found = {}
  for tied in (True, False):
    config, microbatches = decoder(tied), 1 if tied else 2
    _, state, gradients, scores = step(config, mesh.Sizes(), microbatches)
    want = jax.tree.map(np.asarray, (gradients, state.params, scores))
    with tempfile.TemporaryDirectory() as directory:
      store = checkpoint.CheckpointStore(directory)
      store.save(1, {'state': state}, {})
      for name, sizes in MESHES.items():
        one, state, gradients, scores = step(config, sizes, microbatches)
        saved = store.restore({'state': state}, 1).arrays['state']
        again = one.place(saved)
        assert jax.tree.map(lambda x: x.sharding, again) == jax.tree.map(
          lambda x: x.sharding, saved
        )
        found[f'{"tied" if tied else "untied"} {name}'] = {
          'differences': [
            relative(got, reference)
            for got, reference in zip(
              (gradients, state.params, scores), want, strict=True
            )
          ],
          'share': share(state),
          'restored': relative(saved.params, want[1]),
          'kernel': kernel_difference(sizes),
        }
  print(json.dumps(found))


if __name__ == '__main__':
  main()
