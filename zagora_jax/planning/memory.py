"""Memory of a device by what it is for: exact from a compiled program, or estimated from shapes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

import jax

from models.config import ModelConfig
from sharding.program import Buffer, buffers, collectives, memory
from zagora_jax.planning.shapes import Arguments

Source = Literal["compiled", "analytic"]


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device at the peak of a train step, and of the host for it.

    Attributes:
        weights: frozen parameters: packed codes, scales, embeddings, norms.
        lora: the adapters.
        optimizer: the optimizer's moments.
        error_feedback: residuals of compressed gradient exchanges, and gradients that wait for theirs.
        activations: what the forward pass keeps of all layers for the backward pass.
        gathered: layers that are brought together from their parts, or from host memory.
        workspace: the rest: dequantised weights, one layer's activations, gradients, logits, the batch.
        host: pinned host memory for this device; not part of the peak.
        waiting: the part of that which streamed layers take.
        source: where the numbers come from.
    """

    weights: int
    lora: int
    optimizer: int
    error_feedback: int
    activations: int
    gathered: int
    workspace: int
    host: int
    source: Source
    waiting: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The bytes on the device by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("host", "source", "waiting")}

    @property
    def peak(self) -> int:
        """Bytes that arrays need on the device."""
        return sum(self.parts.values())


def read_memory(
    compiled: jax.stages.Compiled, mesh: Mapping[str, int], arguments: Arguments, shapes: ModelConfig
) -> DeviceMemory:
    """Split the memory that XLA planned.

    The peak is XLA's, and what the arguments take follows from their shapes. Of the temporaries, the activations and
    gathered layers are the sizes of the arrays that the program stores as such; the rest is the workspace.

    Args:
        compiled: the train step.
        mesh: sizes of the mesh's axes.
        arguments: what the arguments take.
        shapes: of the model.
    """
    plan, layers = memory(compiled), shapes.num_layers
    kept = _kept_for_backward(buffers(compiled), layers)
    gathered = sum(
        collective.bytes
        for collective in collectives(compiled, mesh)
        if collective.kind == "all-gather" and (collective.loop_trips or 0) >= layers // 2 and collective.group_size > 1
    )
    temporaries = plan.peak - arguments.total
    activations = min(kept, temporaries)
    gathered = min(gathered, temporaries - activations)
    return DeviceMemory(
        **asdict(arguments),
        activations=activations,
        gathered=gathered,
        workspace=temporaries - activations - gathered,
        host=plan.host_peak,
        source="compiled",
    )


def read_by_estimate(peak: int, arguments: Arguments, estimate: DeviceMemory, host: int | None = None) -> DeviceMemory:
    """Split what programs need of a device whose arrays do not show what they are for.

    The peak is that of the compiled programs. The activations and the layers that are brought together or streamed are
    the estimate's, which knows the schedule and what a layer keeps; the host's memory too, where it is not given.
    """
    temporaries = peak - arguments.total
    activations = min(estimate.activations, temporaries)
    gathered = min(estimate.gathered, temporaries - activations)
    return replace(
        estimate,
        **asdict(arguments),
        activations=activations,
        gathered=gathered,
        workspace=temporaries - activations - gathered,
        host=estimate.host if host is None else host,
        source="compiled",
    )


def _kept_for_backward(stored: list[Buffer], layers: int) -> int:
    """Sum the stacks of all layers' activations: each is written in place by the loop, so counts once."""
    stacks = {
        (buffer.dtype, buffer.shape)
        for buffer in stored
        if buffer.opcode != "parameter"
        and not buffer.host
        and len(buffer.shape) > 2  # a stack of gradients is flat: [L, n]
        and buffer.shape[0] == layers
    }
    return sum(next(b.bytes for b in stored if (b.dtype, b.shape) == stack) for stack in stacks)
