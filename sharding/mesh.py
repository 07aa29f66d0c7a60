"""The named device mesh.

Axes:
    stage: consecutive blocks of layers, one for each group of devices along the other axes.
    data: replicas; each trains on its own rows, and gradients are exchanged between them.
    fsdp: weights, adapters and optimizer state are spread over these devices; rows too.
    tensor: heads and feed-forward columns are spread over these devices; they share rows.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("stage", "data", "fsdp", "tensor")

# The axes that rows are spread over.
ROW_AXES = ("data", "fsdp")

# The axes that a layer's adapters, their gradients and moments are spread over.
SHARD_AXES = ("fsdp", "tensor")

# The axes that parameters are spread over: layers over "stage", tables of words over all of them.
PARAMETER_AXES = ("stage", *SHARD_AXES)


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Arrange devices in a mesh with the axes AXES; an axis that `sizes` leaves out has size 1.

    Args:
        sizes: devices along each axis.
        devices: the devices to use, by default all of them; the product of the sizes must be their number.

    Raises:
        ValueError: an unknown axis, a size below 1, or a product that is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    if unknown := sorted(sizes.keys() - set(AXES)):
        raise ValueError(f"mesh axis {unknown[0]!r} is not known; the axes are {', '.join(AXES)}")
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    if min(shape) < 1:
        raise ValueError(f"mesh sizes must be at least 1, found {dict(sizes)}")
    if math.prod(shape) != len(devices):
        product = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
        raise ValueError(f"the mesh {product} has {math.prod(shape)} places, but there are {len(devices)} devices")
    # Not jax.make_mesh: its axes are Explicit by default, and it reorders devices.
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def rows_divisor(mesh: Mesh) -> int:
    """Return how many groups of devices share the rows of a micro-batch."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def shard_count(mesh: Mesh) -> int:
    """Return over how many devices an adapter is spread."""
    return math.prod(mesh.shape[axis] for axis in SHARD_AXES)


def parameter_parts(mesh: Mesh) -> int:
    """Return over how many devices a table of words is spread."""
    return math.prod(mesh.shape[axis] for axis in PARAMETER_AXES)


def stage_mesh(mesh: Mesh, stage: int) -> Mesh:
    """Return the mesh of one stage's devices; its "stage" axis has size 1."""
    devices = mesh.devices[stage : stage + 1]
    return Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
