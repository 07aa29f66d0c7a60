"""What the forward program of a stage hands to its backward program: what `remat` keeps of every layer.

Each device has arrays of its own, whatever they mean together: they travel as one array with a row for each device.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from sharding.kept import Pullback, keeping
from sharding.rules import pinned
from zagora_jax.data.batches import Batch
from zagora_jax.distribution import shardings_of, specs_of
from zagora_jax.stage import ACTIVATION_SPEC, Place, Stage
from zagora_jax.step import ForwardOptions


@dataclass(frozen=True)
class KeptLayers:
    """What is kept of a micro-batch.

    Attributes:
        arrays: described, [devices, ...]; in pinned host memory where `offload_activations` puts them.
        pull_back: makes gradients of them.
    """

    stage: Stage
    options: ForwardOptions
    dropout_seed: int | None
    arrays: list[jax.ShapeDtypeStruct]
    pull_back: Pullback

    @classmethod
    def of(cls, stage: Stage, options: ForwardOptions, dropout_seed: int | None, batch: Batch) -> "KeptLayers":
        """Find out by tracing the forward pass; `batch` gives shapes."""
        mesh = stage.distribution.mesh
        found: dict[str, Any] = {}
        row = PartitionSpec(mesh.axis_names)

        def kept(*arguments: Any) -> list[jax.Array]:
            _, arrays, found["pull_back"] = _run(stage, options, dropout_seed, *arguments)
            found["waits"] = [jax.typeof(array).memory_space == jax.memory.Space.Host for array in arrays]
            return _as_rows(arrays)

        arguments = stage.arguments(batch)
        mapped = jax.shard_map(
            kept, mesh=mesh.abstract_mesh, in_specs=specs_of(arguments), out_specs=row, check_vma=False
        )
        bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
        arrays = [
            jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=pinned(mesh, row) if waits else NamedSharding(mesh, row)
            )
            for array, waits in zip(jax.eval_shape(mapped, *bare), found["waits"], strict=True)
        ]
        return cls(stage, options, dropout_seed, arrays, found["pull_back"])

    def compile_forward(self, batch: Batch) -> jax.stages.Compiled:
        """Compile (adapters, frozen, batch, place, inputs) -> (activations, what is kept)."""

        def forward(*arguments: Any) -> tuple[jax.Array, list[jax.Array]]:
            out, arrays, _ = _run(self.stage, self.options, self.dropout_seed, *arguments)
            return out, _as_rows(arrays)

        out_specs = (ACTIVATION_SPEC, shardings_of(self.arrays))
        return self.stage.distribution.compile(forward, self.stage.arguments(batch), out_specs)

    def gradients(self, adapters: Any, frozen: Any, kept: list[jax.Array], cotangent: jax.Array) -> tuple[Any, Any]:
        """Return the gradients with regard to adapters and inputs, from a device's rows of what was kept."""
        return self.pull_back([array.reshape(array.shape[1:]) for array in kept], (adapters, frozen), cotangent)


def _run(
    stage: Stage,
    options: ForwardOptions,
    dropout_seed: int | None,
    adapters: Any,
    frozen: Any,
    batch: Batch,
    place: Place,
    inputs: Any,
) -> tuple[jax.Array, list[jax.Array], Pullback]:
    def run(adapters: Any, inputs: Any) -> jax.Array:
        return stage.run(adapters, frozen, batch, place, inputs, options, dropout_seed)

    return keeping(run, (adapters, inputs), (adapters, frozen))


def _as_rows(arrays: list[jax.Array]) -> list[jax.Array]:
    return [array.reshape(1, *array.shape) for array in arrays]
