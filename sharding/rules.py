"""Which mesh axis each logical axis of an array is laid over: one line an axis."""

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The memory kind of arrays that wait on the host where a device can copy them from.
PINNED = "pinned_host"

MeshAxes = str | tuple[str, ...] | None

RULES: dict[str, MeshAxes] = {
    # Batches.
    "accumulation": None,
    "rows": ("data", "fsdp"),
    "tokens": None,
    # Everything of a layer that is spread lies flat (see sharding.flat): adapters and their moments, frozen parameters
    # that devices along tensor have alike, and frozen matrices that each of them has a part of (see sharding.tensor).
    "layers": "stage",
    "flat": ("fsdp", "tensor"),
    "flat_frozen": "fsdp",
    "flat_parts": ("tensor", "fsdp"),
    "part": "tensor",
    "runs": None,
    # Embedding and head, and what a quantised row of theirs has of codes and scales.
    "vocab": ("stage", "fsdp", "tensor"),
    "hidden": None,
    "rank": None,
    "codes": None,
    "blocks": None,
    "groups": None,
    # Error feedback of the gradient exchange: a residual a device.
    "devices": ("data", "fsdp", "tensor"),
}


def partition_spec(axes: tuple[str | None, ...], rules: Mapping[str, MeshAxes] = RULES) -> PartitionSpec:
    """Map an array's logical axes to a PartitionSpec; None is an axis that is never cut.

    Raises:
        ValueError: a logical axis without a rule, or two that would be cut over one mesh axis.
    """
    used: dict[str, str] = {}
    spec = []
    for axis in axes:
        if axis is not None and axis not in rules:
            raise ValueError(f"logical axis {axis!r} has no rule; known: {', '.join(rules)}")
        mesh_axes = rules[axis] if axis is not None else None
        for mesh_axis in (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ():
            if mesh_axis in used:
                raise ValueError(
                    f"logical axes {used[mesh_axis]!r} and {axis!r} would both be laid over mesh axis {mesh_axis!r}"
                )
            used[mesh_axis] = str(axis)
        spec.append(mesh_axes)
    return PartitionSpec(*spec)


def named_sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """Return the sharding of an array with these logical axes."""
    return NamedSharding(mesh, partition_spec(axes))


def pinned(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Return the sharding of an array in pinned host memory, to describe it to the compiler; devices may be absent."""
    # Absent devices have no memories: over a mesh of them, a sharding would silently drop its memory kind.
    return NamedSharding(mesh.abstract_mesh, spec, memory_kind=PINNED)
