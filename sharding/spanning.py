"""Arrays over devices of several processes, of which each process holds its own devices' pieces alone."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

Index = tuple[slice, ...]


def place(array: jax.Array | np.ndarray, sharding: Sharding) -> jax.Array:
    """Put a whole array, which every process has, onto devices: each process copies to its own ones alone."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    pieces = []
    for device, index in _own_indices(sharding, array.shape).items():
        piece = array if _is_whole(index, array.shape) else array[index]
        pieces.append(jax.device_put(piece, SingleDeviceSharding(device, memory_kind=sharding.memory_kind)))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, pieces)


def whole_on_first(array: jax.Array | np.ndarray) -> np.ndarray:
    """Return a whole array on the host of the process with index 0; the others get zeros that take no memory.

    All processes have to call this at the same place, since devices exchange pieces where the first process lacks any.
    What no other process shares is returned whole.
    """
    if isinstance(array, np.ndarray) or array.sharding.is_fully_addressable:
        return np.asarray(array)
    is_first = jax.process_index() == 0
    if not _first_has_all(array.sharding, array.shape):
        array = whole_everywhere(array)
    if not is_first:
        return np.broadcast_to(np.zeros((), array.dtype), array.shape)
    return _assembled(array)


def whole_everywhere(array: jax.Array) -> jax.Array:
    """Bring the pieces of an array together, on every device; to be called by all processes at the same place."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    plain = NamedSharding(sharding.mesh, sharding.spec)
    if array.sharding.memory_kind != plain.memory_kind:
        on_devices = [jax.device_put(shard.data, shard.device) for shard in array.addressable_shards]
        array = jax.make_array_from_single_device_arrays(array.shape, plain, on_devices)
    return _replicate(NamedSharding(sharding.mesh, PartitionSpec()))(array)


def on_host(array: jax.Array | np.ndarray) -> np.ndarray:
    """Return a whole array on the host of every process, which all have to ask for at the same place."""
    if isinstance(array, np.ndarray) or array.sharding.is_fully_addressable or array.sharding.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(whole_everywhere(array).addressable_data(0))


def own_rows(sharding: Sharding, shape: tuple[int, ...], axis: int) -> list[int]:
    """Return which indices along `axis` of an array of this shape lie on devices of this process, in order."""
    found: set[int] = set()
    for index in _own_indices(sharding, shape).values():
        found.update(range(*index[axis].indices(shape[axis])))
    return sorted(found)


def gather(array: jax.Array | np.ndarray, mesh: Mesh) -> jax.Array:
    """Return [processes, *shape] with the array that each process gives, on this process's device of `mesh`.

    Args:
        array: of the same shape and dtype everywhere.
        mesh: one axis, with one device of every process in their order.
    """
    return _replicate(NamedSharding(mesh, PartitionSpec()))(_of_each(array, mesh)).addressable_data(0)


def total(array: jax.Array | np.ndarray, mesh: Mesh) -> jax.Array:
    """Return the sum of the arrays that the processes give, in their dtype; see `gather`."""
    return _sum(NamedSharding(mesh, PartitionSpec()))(_of_each(array, mesh)).addressable_data(0)


def _of_each(array: jax.Array | np.ndarray, mesh: Mesh) -> jax.Array:
    """Make one array [processes, *shape] of what each process gives, a row on each one's device."""
    (axis,) = mesh.axis_names
    devices: list[jax.Device] = list(mesh.devices.flat)
    own = [device for device in devices if device.process_index == jax.process_index()]
    shape = (mesh.size, *array.shape)
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    pieces = [jax.device_put(array, device)[None] for device in own]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


@cache
def _replicate(sharding: NamedSharding) -> Any:
    return jax.jit(lambda array: array, out_shardings=sharding)


@cache
def _sum(sharding: NamedSharding) -> Any:
    return jax.jit(lambda rows: rows.sum(axis=0, dtype=rows.dtype), out_shardings=sharding)


def _own_indices(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[jax.Device, Index]:
    return sharding.addressable_devices_indices_map(shape)  # type: ignore[return-value]


def _first_has_all(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether the pieces on the first process's devices make up the whole."""
    indices: Mapping[jax.Device, Any] = sharding.devices_indices_map(shape)
    pieces = {
        tuple(cut.indices(size)[:2] for cut, size in zip(index or (), shape, strict=True))
        for device, index in indices.items()
        if device.process_index == 0
    }
    size = sum(int(np.prod([stop - start for start, stop in piece])) for piece in pieces)
    return size == int(np.prod(shape))


def _assembled(array: jax.Array) -> np.ndarray:
    """Copy the pieces here, which make up the whole, to the host."""
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = np.asarray(shard.data)
    return whole


def _is_whole(index: Index, shape: tuple[int, ...]) -> bool:
    return all(cut.indices(size) == (0, size, 1) for cut, size in zip(index, shape, strict=True))
