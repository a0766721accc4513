import jax
import numpy as np
import optax
import pytest

from spopp_jax import objectives
from spopp_jax.learner import footprint, forward, packing, update
from spopp_jax.models import dense, lora

# Products with parameters outweigh all else.
CONFIG = dense.DecoderConfig(
  vocab_size=64,
  hidden_size=128,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=2,
  head_dim=64,
  intermediate_size=512,
  tie_word_embeddings=False,
)
ROWS, ROW = 8, 16
# Two matrices of words, and in each layer four of attention, three of SwiGLU.
WORDS, LAYERS = 64 * 128, 2 * (4 * 128 * 128 + 3 * 128 * 512)
NORMS = 2 * (2 * 128 + 2 * 64) + 128


def learner(optimizer=None, microbatches=1, **settings):
  return update.Learner(
    CONFIG,
    objectives.make_objective('spopp', {}),
    optimizer or optax.sgd(0.1),
    settings=forward.Settings(**settings),
    microbatches=microbatches,
    minibatch_size=ROWS,
    row_length=ROW,
    row_buckets=(ROWS,),
  )


def measure(one, row=ROW, **options):
  batch = packing.padding((1, ROWS, row), ROWS, 0)
  return footprint.measure(one, batch, **options)


@pytest.fixture(scope='module')
def plain():
  return measure(learner())


def test_what_is_held_are_parameters_and_batch(plain):
  parameters = 4 * (2 * WORDS + LAYERS + NORMS)
  # Five int32 or float32 a token and the mask; 4 arrays a slot.
  batch = ROWS * ROW * (5 * 4 + 1)
  assert plain.trained == 2 * WORDS + LAYERS + NORMS
  assert plain.held_bytes == pytest.approx(parameters + batch, abs=2_000)
  assert plain.shape == (1, ROWS, ROW)
  assert plain.devices == 1


def test_adam_holds_two_moments_more_and_adapters_hold_few(plain):
  parameters = 4 * (2 * WORDS + LAYERS + NORMS)
  adam = measure(learner(optax.adam(0.1)))
  assert adam.held_bytes - plain.held_bytes == pytest.approx(
    2 * parameters, abs=2_000
  )
  adapters = lora.Config(rank=2, alpha=2.0, targets=('q_proj',))
  few = measure(learner(optax.adam(0.1), adapters=adapters))
  assert few.trained == 2 * (2 * 128 + 128 * 2)
  assert few.held_bytes - plain.held_bytes == pytest.approx(
    3 * 4 * few.trained, abs=2_000
  )


def test_operations_by_the_rule_and_as_counted(plain):
  tokens = ROWS * ROW
  assert plain.flops == 6 * tokens * (WORDS + LAYERS)
  assert 1.0 < plain.counted_flops / plain.flops < 1.25
  flops = lambda shape=(1, ROWS, ROW), **k: footprint.flops(learner(**k), shape)
  assert flops(remat='full') == 8 * tokens * (WORDS + LAYERS)
  assert flops(microbatches=2) == 8 * tokens * (WORDS + LAYERS)
  assert flops((2, ROWS, ROW)) == 2 * 8 * tokens * (WORDS + LAYERS)
  adapters = lora.Config(rank=2, alpha=2.0, targets=('q_proj',))
  own = 2 * (2 * 128 + 128 * 2)
  assert flops(adapters=adapters) == tokens * (4 * (WORDS + LAYERS) + 6 * own)


def test_microbatches_lower_what_works():
  like = {'compiler_options': footprint.LIKE_ACCELERATORS, 'row': 64}
  whole = measure(learner(), **like).working_bytes
  assert measure(learner(microbatches=4), **like).working_bytes < whole / 2


def test_a_step_that_does_not_fit_is_refused_with_advice(plain):
  small = plain._replace(
    held_bytes=30 * 2**30, working_bytes=8 * 2**30, available_bytes=16 * 2**30
  )
  with pytest.raises(footprint.TooLarge) as caught:
    footprint.check(small)
  text = str(caught.value)
  assert 'needs 38 GiB a device, has 16 GiB (30 GiB for parameters' in text
  for words in (
    'mesh.fsdp',
    'learner.microbatches',
    'learner.remat=full',
    'learner.compute_dtype=bfloat16',
    'learner.chunk_tokens',
    'lora.rank',
  ):
    assert words in text
  footprint.check(small._replace(available_bytes=38 * 2**30))
  footprint.check(small._replace(available_bytes=0))  # nobody knows


def test_advice_begins_with_what_weighs_most_and_names_nothing_done():
  slots = optax.chain(*(optax.trace(0.9) for _ in range(8)))
  heavy = measure(learner(slots), available_bytes=1)
  assert 'mesh.fsdp' in heavy.advice[0]
  done = measure(
    learner(
      remat='full',
      compute_dtype='bfloat16',
      microbatches=ROWS,
      adapters=lora.Config(rank=2, alpha=2.0, targets=('q_proj',)),
    ),
    available_bytes=1,
  )
  words = ' '.join(done.advice)
  for name in ('remat', 'compute_dtype', 'microbatches', 'lora'):
    assert name not in words
  with pytest.raises(footprint.TooLarge):
    footprint.check(done)


def test_a_cpu_has_what_its_host_has(plain):
  assert 2**28 < plain.available_bytes < 2**46
  footprint.check(plain)
  assert 'of ' + f'{plain.available_bytes / 2**30:.3g} GiB' in str(plain)


def test_the_measured_program_is_the_one_that_runs():
  one, other = learner(), learner()
  batch = packing.padding((1, ROWS, ROW), ROWS, 0)
  batch.action_mask[0, :, 2:5] = True
  batch.trajectory_ids[0] = np.arange(ROWS)[:, None]
  batch.rewards[:3] = 1
  batch.usable[:] = True
  rng = np.random.default_rng(0)
  params = {
    k: rng.normal(0, 0.1, v.shape).astype('f4')
    for k, v in sorted(one.shapes.items())
  }
  measure(one)
  states = [x.update(x.init(params), batch)[0] for x in (one, other)]
  assert one._update._cache_size() == 0
  assert other._update._cache_size() == 1
  for a, b in zip(*map(jax.tree.leaves, states), strict=True):
    np.testing.assert_array_equal(a, b)
  assert any((states[0].params[k] != params[k]).any() for k in params)
