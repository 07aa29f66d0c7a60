"""The compiled programs that a stage of a pipeline runs in training, and the state that all stages' work on."""

import copy
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from sharding.flat import bare
from sharding.program import MemoryPlan, memory
from sharding.rules import PINNED
from zagora_jax.arrangement import Recipe
from zagora_jax.data.batches import Batch
from zagora_jax.distribution import shardings_of, specs_of
from zagora_jax.kept_layers import KeptLayers
from zagora_jax.stage import EVERYWHERE, Place, Stage
from zagora_jax.train_state import TrainState, is_spike, next_guard, next_scale, verdict
from zagora_jax.update import as_rows, changed, chosen

# Tasks that a stage may have in its queue, the running one among them.
MOST_QUEUED = 3


class PipelineState(NamedTuple):
    """The training state of every stage: its own adapters and their optimizer state, and the same counters."""

    stages: tuple[TrainState, ...]

    @property
    def adapters(self) -> tuple[nnx.State, ...]:
        """The adapters of every stage."""
        return tuple(state.adapters for state in self.stages)


class StagePrograms:
    """What a stage runs in training, compiled. The first argument of each is used up, but for `forward`.

    Attributes:
        kept: what the forward task leaves for the backward task, described; None where that computes the forward pass
            again.
        forward: (adapters, frozen, batch, place, inputs) -> activations, and what it leaves, if anything; the last
            stage has none.
        backward: (gradients, adapters, frozen, batch, place, inputs, cotangent) -> (gradients, gradient of the inputs,
            loss). What the forward task has left takes the place of the inputs. The cotangent is that of the
            activations; in the last stage, what the loss is multiplied by. Before the last stage the loss is 0.
        exchange: (gradients, residuals, scale) -> (gradients, new residuals, squared norm), gradients over `scale`.
        update: (state, gradients, residuals, norm, loss) -> (state, learning rate, verdict); see `train_state.verdict`.
    """

    _kept_layers: KeptLayers | None = None

    def __init__(self, stage: Stage, recipe: Recipe, whole: TrainState, batch: Batch):
        """Compile the programs; `whole`, the stage's part, and `batch` give shapes."""
        self.stage, self._recipe = stage, recipe
        distribution = stage.distribution
        self._state = jax.tree.map(lambda spread: spread.abstract(), distribution.state(whole))
        self._gradients = stage.abstract_gradients()
        self.kept: Any = None
        self.forward = None if stage.is_last else self._compile_forward(batch)
        self.backward = self._compile_backward(batch)
        self.activation_bytes = _device_bytes(stage.abstract_activation(batch))
        self.exchange = self._compile_exchange()
        self.update = self._compile_update()
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._gradients)
        self.zeros = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._gradients),
            out_shardings=shardings,
        )

    def at(self, stage: Stage) -> "StagePrograms":
        """Return the same programs for a stage with as many layers, but other ones."""
        programs = copy.copy(self)
        programs.stage = stage
        return programs

    def _compile_forward(self, batch: Batch) -> jax.stages.Compiled:
        stage, options, seed = self.stage, self._recipe.options, self._recipe.dropout_seed
        if stage.distribution.stream is not None and options.offload_activations:
            self.kept = stage.abstract_layer_inputs(batch)
            return stage.compile_keeping_forward(options, seed, batch)
        if stage.distribution.stream is None and options.remat != "stage":
            self._kept_layers = KeptLayers.of(stage, options, seed, batch)
            self.kept = self._kept_layers.arrays
            return self._kept_layers.compile_forward(batch)
        return stage.compile_forward(options, seed, batch)

    def _compile_backward(self, batch: Batch) -> jax.stages.Compiled:
        stage, recipe, of_layers = self.stage, self._recipe, self._kept_layers

        def backward(
            gradients: nnx.State,
            adapters: nnx.State,
            frozen: Any,
            batch: Batch,
            place: Place,
            inputs: Any,
            cotangent: jax.Array,
        ) -> tuple[nnx.State, Any, jax.Array]:
            loss = jnp.float32(0)
            if of_layers is not None:
                gradient, d_inputs = of_layers.gradients(adapters, frozen, inputs, cotangent)
            else:
                arguments = (adapters, frozen, batch, place, inputs, cotangent)
                out, gradient, d_inputs = stage.gradients(*arguments, recipe.options, recipe.dropout_seed)
                loss = stage.distribution.group.total(out) if stage.is_last else loss
            gradients = jax.tree.map(lambda total, term: total + term[None], gradients, gradient)
            return gradients, d_inputs, loss

        *others, inputs = self.stage.arguments(batch)
        cotangent = stage.everywhere(jnp.float32) if stage.is_last else stage.abstract_activation(batch)
        out_specs = (specs_of(self._gradients), specs_of(inputs), EVERYWHERE)
        arguments = (self._gradients, *others, inputs if self.kept is None else self.kept, cotangent)
        return stage.distribution.compile(backward, arguments, out_specs, donated=(0,))

    def _compile_exchange(self) -> jax.stages.Compiled:
        group = self.stage.distribution.group

        def exchange(gradients: nnx.State, residuals: Any, scale: jax.Array) -> tuple[nnx.State, Any, jax.Array]:
            own, errors = jax.tree.map(lambda row: row[0], (gradients, residuals))
            total, errors = group.exchange(jax.tree.map(lambda g: g / scale, own), errors)
            return total, as_rows(errors), group.squared_norm(total)

        arguments = (self._gradients, self._state.residuals, self.stage.everywhere(jnp.float32))
        out_specs = (specs_of(self._state.adapters), specs_of(self._state.residuals), EVERYWHERE)
        return self.stage.distribution.compile(exchange, arguments, out_specs, donated=(0,))

    def _compile_update(self) -> jax.stages.Compiled:
        recipe = self._recipe

        def update(
            state: TrainState, gradients: nnx.State, residuals: Any, norm: jax.Array, loss: jax.Array
        ) -> tuple[TrainState, jax.Array, dict[str, jax.Array]]:
            rate = jnp.asarray(recipe.schedule(state.updates), jnp.float32)
            finite, spike = jnp.isfinite(norm) & jnp.isfinite(loss), is_spike(state.spike_guard, loss)
            accepted = finite & ~spike
            of_adapters = bare(nnx.to_pure_dict(gradients))
            new = changed(
                recipe.optimizer,
                state,
                of_adapters,
                norm,
                accepted,
                recipe.max_grad_norm,
                moments_on_host=self.stage.distribution.moments_on_host,
            )
            new = new._replace(
                step=state.step + 1,
                loss_scale=next_scale(state.loss_scale, finite),
                residuals=chosen(accepted, residuals, state.residuals),
                spike_guard=next_guard(state.spike_guard, loss, accepted),
            )
            return new, rate, verdict(state, finite, spike)

        stage = self.stage
        numbers = (stage.everywhere(jnp.float32), stage.everywhere(jnp.float32))
        arguments = (self._state, self._state.adapters, self._state.residuals, *numbers)
        out_specs = (shardings_of(self._state), EVERYWHERE, EVERYWHERE)
        return stage.distribution.compile(update, arguments, out_specs, donated=(0,))

    def planned_memory(self, inputs: int, travelling: int) -> int:
        """Return the bytes that training needs of each of the stage's devices.

        What the stage holds all the time, and of its programs the most that one needs beside its arguments.

        Args:
            inputs: of how many micro-batches the stage has the inputs at most.
            travelling: how many activations are on their way at most.
        """
        waiting = inputs if self.kept is None else min(inputs, MOST_QUEUED)
        of_programs = [_beside_arguments(memory(program)) for program in self._programs if program is not self.forward]
        of_kept = _bytes_of(self.kept, on_host=False)
        if self.forward is not None:
            of_programs.append(_beside_arguments(memory(self.forward)) - of_kept)
        held = _bytes_of(self._held, on_host=False) + self._most_kept(inputs) * of_kept
        return held + (waiting + travelling) * self.activation_bytes + max(of_programs)

    def planned_host_memory(self, inputs: int) -> int:
        """Return the bytes of pinned host memory that training needs for each of the stage's devices."""
        kept = self._most_kept(inputs) * _bytes_of(self.kept, on_host=True)
        rest = max(plan.host_temporaries for plan in map(memory, self._programs))
        return _bytes_of(self._held, on_host=True) + kept + rest

    @staticmethod
    def _most_kept(inputs: int) -> int:
        """Of how many micro-batches something is kept: for one more room is made while the oldest is used."""
        return inputs + 1

    @property
    def _held(self) -> tuple[Any, ...]:
        return self.stage.distribution.abstract_frozen(), self._state, self._gradients

    @property
    def _programs(self) -> list[jax.stages.Compiled]:
        programs = (self.forward, self.backward, self.exchange, self.update)
        return [program for program in programs if program is not None]


def _bytes_of(tree: Any, *, on_host: bool) -> int:
    """Sum the bytes that a device holds of the arrays in a tree, or that the host does for it."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if (leaf.sharding.memory_kind == PINNED) == on_host]
    return sum(map(_device_bytes, leaves))


def _device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _beside_arguments(plan: MemoryPlan) -> int:
    return plan.temporaries + plan.outputs - plan.aliased
