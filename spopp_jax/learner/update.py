"""The learner: scoring and updating, jitted over the devices of a mesh."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from spopp_jax import types
from spopp_jax.learner import forward, packing, step
from spopp_jax.learner import state as state_lib
from spopp_jax.models import dense, lora, parameters
from spopp_jax.models import mesh as mesh_lib
from spopp_jax.objectives import base as objectives

_SETTINGS = forward.Settings()
Announce = Callable[[str, dict[str, Any]], None]


def silent(call: str, arrays: dict[str, Any]) -> None:
  """Announces nothing: for a host that is told by another."""
  del call, arrays


def make_optimizer(
  *,
  learning_rate: float,
  b2: float,
  weight_decay: float,
  max_grad_norm: float,
  warmup_steps: int,
) -> optax.GradientTransformation:
  """Returns AdamW after global-norm clipping, with a linear warm-up.

  Args:
    learning_rate: reached after the warm-up.
    b2: decay of the second moment.
    weight_decay: decoupled, per update and learning rate.
    max_grad_norm: global norm that gradients are clipped to.
    warmup_steps: optimizer updates from 1/warmup_steps of the rate to all
      of it; 0 is none.
  """
  if warmup_steps:
    schedule = optax.linear_schedule(
      learning_rate / warmup_steps, learning_rate, warmup_steps - 1
    )
  else:
    schedule = optax.constant_schedule(learning_rate)
  return optax.chain(
    optax.clip_by_global_norm(max_grad_norm),
    optax.adamw(schedule, b2=b2, weight_decay=weight_decay),
  )


class Learner:
  """Scores and updates a decoder under an objective.

  A batch is a PackedBatch whose per-token arrays are [M, B, S]: M optimizer
  minibatches of B rows (`packing.pack`).

  Attributes:
    objective: gives advantages, weights and loss.
    settings: how log-probs are computed.
    microbatches: parts that a minibatch's gradient is computed in.
    row_parts: what the rows of a batch are cut into, over the devices.
    shapes: of the trained parameters, by name.
    model_shapes: of the policy's parameters, by name.
    mesh: of the devices.
  """

  def __init__(
    self,
    config: dense.DecoderConfig,
    objective: objectives.Objective,
    optimizer: optax.GradientTransformation,
    *,
    settings: forward.Settings = _SETTINGS,
    microbatches: int = 1,
    minibatch_size: int,
    row_length: int,
    row_buckets: Sequence[int],
    mesh: mesh_lib.DeviceMesh | None = None,
    announce: Announce | None = None,
  ):
    """Compiles nothing yet.

    Args:
      config: the decoder.
      objective: gives advantages, weights and loss.
      optimizer: applied to every minibatch.
      settings: how log-probs are computed.
      microbatches: parts that a minibatch's gradient is computed in; they
        save memory and change nothing else. Rows must divide by it.
      minibatch_size: trajectories that are scored at a time.
      row_length: S, tokens of a packed row.
      row_buckets: allowed numbers of rows.
      mesh: the devices, over which rows, parameters and optimizer state are
        cut; rows must divide by its `row_parts`. None is one device.
      announce: makes every host take part: called with the name of each call
        below and its arrays before it computes, so that the other hosts can
        make the same call. None is this host alone.

    Raises:
      ValueError: no sharding rule knows one of the decoder's parameters, or
        an adapter's target is none of its layers.
    """
    self._mesh = mesh or mesh_lib.DeviceMesh()
    self.mesh = self._mesh.mesh
    self.settings = settings
    self.microbatches = microbatches
    self._announce = announce or silent
    self.objective = objective
    self.row_parts = self._mesh.row_parts
    self._minibatch_size = minibatch_size
    self._optimizer = optimizer
    self._row_length = row_length
    self._row_buckets = tuple(row_buckets)
    graphdef, self.model_shapes = parameters.graph(config)
    self.shapes = self.model_shapes
    self._frozen_shapes: dict[str, Any] = {}
    if settings.adapters is not None:
      self.shapes = lora.shapes(settings.adapters, self.model_shapes)
      self._frozen_shapes = jax.eval_shape(
        lambda base: forward.cast(base, settings.compute_dtype),
        self.model_shapes,
      )
    self._frozen: dict[str, jax.Array] = {}
    self._base: dict[str, np.ndarray] = {}
    self._shardings = self._state_shardings()
    self._frozen_shardings = self._mesh.parameters(self._frozen_shapes)
    self._programs: dict[Any, jax.stages.Compiled] = {}
    logprobs = functools.partial(forward.packed_logprobs, graphdef, settings)
    self._make_programs(logprobs)

  def _make_programs(self, logprobs: Callable) -> None:
    everywhere = self._mesh.everywhere

    def with_frozen(frozen, params, rows):
      if self.mesh.size > 1:
        # Lays the gradient out likewise: each device sums its part alone.
        params = jax.lax.with_sharding_constraint(
          params, self._shardings.params
        )
      return logprobs({**frozen, **params}, rows)

    def score(frozen, params, batch):
      of = functools.partial(with_frozen, frozen)
      return step.map_rows(of, params, batch)

    def update(frozen, state, batch):
      of = functools.partial(with_frozen, frozen)
      return step.update(
        of,
        self.objective,
        self._optimizer,
        self.microbatches,
        state,
        batch,
      )

    self._score = jax.jit(score, out_shardings=everywhere)
    self._update = jax.jit(
      update, donate_argnums=1, out_shardings=(self._shardings, everywhere)
    )
    self._gather = jax.jit(lambda array: array, out_shardings=everywhere)

  def parameter_shardings(self) -> dict[str, jax.sharding.NamedSharding]:
    """Returns how each parameter of the policy lies on the devices."""
    return self._mesh.parameters(self.model_shapes)

  def _state_shapes(self) -> Any:
    return jax.eval_shape(
      functools.partial(state_lib.initial, optimizer=self._optimizer),
      self.shapes,
    )

  def _state_shardings(self) -> Any:
    """Returns the shardings of parameters and their optimizer state."""
    return self._mesh.like_parameters(
      self._state_shapes(), self._mesh.parameters(self.shapes)
    )

  def compile(
    self,
    batch: types.PackedBatch,
    compiler_options: dict[str, str | bool] | None = None,
  ) -> jax.stages.Compiled:
    """Compiles an update of batches shaped like this one, without a state.

    Args:
      batch: numpy arrays or jax.ShapeDtypeStruct; no value is looked at.
      compiler_options: of XLA. Without any, `update` runs this program instead
        of compiling its own.

    Returns:
      The program, which says what memory and operations it needs.
    """
    if compiler_options is None:
      self._announce('compile', batch._asdict())

    def abstract(shape, sharding):
      return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    arguments = jax.tree.map(
      abstract,
      (self._frozen_shapes, self._state_shapes(), batch),
      (self._frozen_shardings, self._shardings, self._mesh.rows(batch)),
    )
    with jax.set_mesh(self.mesh):
      program = self._update.lower(*arguments).compile(compiler_options)
    if compiler_options is None:
      self._programs[_shapes(batch)] = program
    return program

  def init(self, params: Mapping[str, Any]) -> state_lib.LearnerState:
    """Returns the state before the first update; copies the parameters.

    With adapters the parameters are kept as they are, frozen, and the state is
    that of the adapters.
    """
    self._announce('init', {k: np.asarray(v) for k, v in params.items()})
    trained = params
    if self.settings.adapters is not None:
      self._base = {k: np.asarray(v, np.float32) for k, v in params.items()}
      self._frozen = mesh_lib.place(
        forward.cast(self._base, self.settings.compute_dtype),
        self._frozen_shardings,
      )
      trained = lora.initial(self.settings.adapters, self.model_shapes)
    copies = {k: np.array(v, np.float32) for k, v in trained.items()}
    placed = mesh_lib.place(copies, self._shardings.params)
    return jax.jit(
      functools.partial(state_lib.initial, optimizer=self._optimizer),
      donate_argnums=0,
      out_shardings=self._shardings,
    )(placed)

  def place(self, state: state_lib.LearnerState) -> state_lib.LearnerState:
    """Returns a state that was saved, laid out for the updates to come."""
    leaves = jax.tree.leaves(state)
    self._announce(
      'place', {str(i): np.asarray(x) for i, x in enumerate(leaves)}
    )
    return mesh_lib.place(state, self._shardings)

  def trained(self, state: state_lib.LearnerState) -> dict[str, np.ndarray]:
    """Returns the trained parameters on the host: all, or the adapters."""
    return jax.tree.map(np.asarray, self._whole('trained', state.params))

  def policy(self, state: state_lib.LearnerState) -> dict[str, np.ndarray]:
    """Returns the policy's parameters as the sampler takes them, on the host.

    Adapters are merged into the parameters that they belong to.
    """
    trained = self.trained(state)
    if self.settings.adapters is None:
      return trained
    return lora.merge(self.settings.adapters, self._base, trained)

  def to_save(self, state: state_lib.LearnerState) -> state_lib.LearnerState:
    """Returns the state as this host can save it.

    What lies in part on other hosts comes back as numpy arrays; all else stays
    on the devices.
    """
    return self._whole('to_save', state)

  def _whole(self, call: str, tree: Any) -> Any:
    """Gathers arrays that no host holds whole, one after another."""
    in_parts = lambda x: not (x.is_fully_addressable or x.is_fully_replicated)
    if not any(map(in_parts, jax.tree.leaves(tree))):
      return tree
    self._announce(call, {})
    return jax.tree.map(
      lambda x: np.asarray(self._gather(x)) if in_parts(x) else x, tree
    )

  def update(
    self, state: state_lib.LearnerState, batch: types.PackedBatch
  ) -> tuple[state_lib.LearnerState, dict[str, jax.Array]]:
    """Takes M optimizer steps; donates `state`. Metrics are scalars."""
    self._announce('update', batch._asdict())
    with jax.set_mesh(self.mesh):
      program = self._programs.get(_shapes(batch), self._update)
      return program(self._frozen, state, self._spread(batch))

  def score(
    self,
    params: parameters.Parameters,
    trajectories: Sequence[types.Trajectory],
  ) -> list[np.ndarray]:
    """Returns each trajectory's log-probs [T] float32 nats, no gradient.

    Every token but the first is scored, observations included; the first has
    no predecessor and gets 0.
    """
    logprobs: list[np.ndarray] = []
    for start in range(0, len(trajectories), self._minibatch_size):
      group = trajectories[start : start + self._minibatch_size]
      logprobs += self._score_group(params, group)
    return logprobs

  def _score_group(
    self,
    params: parameters.Parameters,
    trajectories: Sequence[types.Trajectory],
  ) -> list[np.ndarray]:
    batch = packing.pack(
      trajectories,
      [0.0] * len(trajectories),
      num_slots=self._minibatch_size,
      minibatches=1,
      row_length=self._row_length,
      row_buckets=self._row_buckets,
      row_multiple=self.row_parts,
    )
    # Inside a segment every token but the first has a predecessor.
    scored = batch._replace(action_mask=batch.positions > 0)
    logprobs = self.score_packed(params, scored)
    lengths = [len(t.tokens) for t in trajectories]
    return packing.unpack(batch, logprobs, lengths)

  def score_packed(
    self, params: parameters.Parameters, batch: types.PackedBatch
  ) -> np.ndarray:
    """Returns [M, B, S] float32 nats where the action mask is set, else 0."""
    self._announce('score', batch._asdict())
    with jax.set_mesh(self.mesh):
      return np.asarray(self._score(self._frozen, params, self._spread(batch)))

  def _spread(self, batch: types.PackedBatch) -> types.PackedBatch:
    return mesh_lib.place(batch, self._mesh.rows(batch))


def _shapes(batch: types.PackedBatch) -> tuple[tuple[int, ...], ...]:
  return tuple(x.shape for x in batch)
