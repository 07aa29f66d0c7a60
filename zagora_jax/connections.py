"""Whether devices reach each other, tried with known numbers before a run relies on it.

Some cards and boards announce peer-to-peer access that they do not have: the first exchange then hangs, or a copy
arrives as zeros (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html).
"""

from functools import partial
from itertools import permutations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zagora_jax.errors import UserError
from zagora_jax.hanging import in_time

COUNT = 2**16  # numbers that are sent

ADVICE = (
    "The way between these devices is at fault, most often peer-to-peer access that the driver announces and the "
    "board does not carry. Try NCCL_P2P_DISABLE=1 in the environment; if copies still fail, switch the IOMMU (VT-d, "
    "AMD-Vi) and PCIe ACS off in the BIOS"
)


def try_connections(mesh: Mesh) -> None:
    """Copy numbers between any two devices, and sum some over each axis of the mesh whose devices exchange sums.

    Raises:
        UserError: numbers arrive wrong or not in time; the devices are named.
    """
    for source, target in permutations(mesh.devices.flat, 2):
        what = f"copying from {_name(source)} to {_name(target)}"
        _require(what, _numbers(), in_time(what, partial(_copy, source, target), ADVICE))
    for axis, size in mesh.shape.items():
        if size > 1 and axis != "stage":  # stages send to their neighbours
            what = f"summing over the {size} devices along the mesh's axis {axis}"
            # A device that is missing in the sum, or counts twice, shows.
            expected = _numbers() * (2**size - 1)
            for device, found in in_time(what, partial(_sum, mesh, axis), ADVICE).items():
                _require(f"{what}, as {_name(device)} has it", expected, found)


def _numbers() -> np.ndarray:
    return np.arange(1, COUNT + 1, dtype=np.int32) % 1000 + 1


def _copy(source: jax.Device, target: jax.Device) -> np.ndarray:
    return np.asarray(jax.device_put(jax.device_put(_numbers(), source), target))


def _sum(mesh: Mesh, axis: str) -> dict[jax.Device, np.ndarray]:
    """The sum, as each device has it, of the numbers times 1, 2, 4 ... along `axis`."""
    terms = np.outer(2 ** np.arange(mesh.shape[axis], dtype=np.int32), _numbers())  # [devices, COUNT]
    spread = jax.device_put(terms, NamedSharding(mesh, PartitionSpec(axis)))
    summed = jax.jit(
        jax.shard_map(
            lambda term: jax.lax.psum(term[0], axis), mesh=mesh, in_specs=PartitionSpec(axis), out_specs=PartitionSpec()
        )
    )(spread)
    return {shard.device: np.asarray(shard.data) for shard in summed.addressable_shards}


def _require(what: str, expected: np.ndarray, found: np.ndarray) -> None:
    if wrong := np.flatnonzero(expected != found).tolist():
        raise UserError(
            f"{what}: {len(wrong):,} of {len(expected):,} numbers arrive wrong, the first as {found[wrong[0]]} in "
            f"place of {expected[wrong[0]]}\n{ADVICE}"
        )


def _name(device: jax.Device) -> str:
    return f"{device.device_kind} {device.id}"
