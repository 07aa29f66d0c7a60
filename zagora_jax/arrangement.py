"""What a run asks of its devices, whether one program spreads over them or each stage has programs of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from zagora_jax.checkpoints.load import Destination
from zagora_jax.data.batches import Batch
from zagora_jax.layer_feed import LayerFeed
from zagora_jax.step import NEXT_TOKEN, ForwardOptions, Objective
from zagora_jax.train_state import TrainState

Say = Callable[[str], None]


def silent(_: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Recipe:
    """What an optimizer step computes, wherever it does.

    Attributes:
        optimizer: applied to the clipped gradient.
        schedule: the optimizer's learning rate by the number of updates, for the metrics.
        options: how the forward pass is computed.
        max_grad_norm: the global norm that gradients are clipped to; 0 does not clip.
        dropout_seed: seeds the adapters' dropout, None switches it off.
        total_steps: optimizer steps of the whole run.
        objective: what a step lowers.
    """

    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    options: ForwardOptions
    max_grad_norm: float
    dropout_seed: int | None
    total_steps: int
    objective: Objective = NEXT_TOKEN


class CompiledStep(Protocol):
    """An optimizer step that runs; it refuses other shapes instead of compiling again."""

    def __call__(self, state: Any, frozen: nnx.State, batch: Batch) -> tuple[Any, Mapping[str, Any]]:
        """Return the new state and the metrics; the old state is used up.

        Where layers have moved to other stages since the step, the metrics have their number, `moved_layers`.
        """

    def finish(self, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Apply what the last step left for a next one; returns the new state, and metrics of that if there was any."""

    def planned_memory(self) -> dict[jax.Device, int]:
        """Return the bytes that the step needs of each device."""

    def planned_host_memory(self) -> dict[jax.Device, int]:
        """Return the bytes of pinned host memory that the step needs for each device."""

    def wire_bytes(self) -> dict[str, int]:
        """Return the bytes that a device sends in a step, by kind and mesh axes: of all devices, the most."""


class CompiledEvaluation(Protocol):
    """A forward pass with its loss that runs."""

    def __call__(self, adapters: Any, frozen: nnx.State, batch: Batch) -> tuple[jax.Array, Any]:
        """Return the loss summed over supervised tokens, and the sum of their weights."""


class CompiledNextTokens(Protocol):
    """A forward pass that continues each row by a token."""

    def __call__(self, adapters: Any, frozen: nnx.State, batch: Batch) -> jax.Array:
        """Return int32 [M]: for each row of batch [1, M, S] the likeliest token behind the one whose weight is 1."""


class Arrangement(Protocol):
    """How a model and its training state lie on devices, and its programs for them.

    States are "whole" where they do not depend on the devices, as they are saved; what `put_state` makes of them is the
    arrangement's own.
    """

    @property
    def mesh(self) -> Mesh:
        """The devices."""

    @property
    def rows_divisor(self) -> int:
        """How many devices share the rows of a micro-batch."""

    def facts(self) -> dict[str, str]:
        """Say in words what lies where."""

    @property
    def feed(self) -> LayerFeed | None:
        """What reads layers from the disk while programs run, to be opened before; None where nothing does."""

    def load(self, read: Callable[[Destination], nnx.State]) -> Any:
        """Bring frozen parameters onto the devices: `read` is called with where they go. For steps and evaluations."""

    @property
    def exchange_state(self) -> dict[str, Any]:
        """Say what the residuals and pending gradients of a whole state belong to."""

    def begin(self, state: TrainState) -> TrainState:
        """Add to a whole state before the first step what the exchange of gradients keeps from step to step."""

    def put_state(self, whole: TrainState) -> Any:
        """Lay a whole training state out."""

    def whole_state(self, state: Any, like: TrainState) -> TrainState:
        """Undo `put_state`, on the host; `like` gives shapes."""

    def put_adapters(self, whole: nnx.State) -> Any:
        """Lay whole adapters out, as an evaluation takes them."""

    def layout(self, like: TrainState) -> dict[str, Any]:
        """Return the bytes that each device holds, by kind."""

    def compile_training(self, recipe: Recipe, whole: TrainState, batch: Batch, say: Say = silent) -> CompiledStep:
        """Compile the train step; `whole` and `batch` give shapes. `say` is told what is decided, then and later.

        Raises:
            ValueError: the devices' memory cannot hold the model.
        """

    def compile_evaluation(self, options: ForwardOptions, batch: Batch) -> CompiledEvaluation:
        """Compile an evaluation of batches of one shape."""

    def compile_next_tokens(self, options: ForwardOptions, batch: Batch) -> CompiledNextTokens:
        """Compile what continues the rows of batches [1, M, S] of one shape by a token each."""
