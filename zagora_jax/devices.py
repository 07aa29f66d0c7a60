"""The mesh that a run's options ask for."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from sharding.mesh import AXES, make_mesh
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError


def choose_mesh(config: TrainConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lay devices out as `mesh` says; the axis that `strategy` names takes all others, unless `mesh` gives its size.

    Raises:
        UserError: more devices are asked for than there are, or they cannot be shared out evenly.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: size for axis in AXES if (size := getattr(config.mesh, axis, None)) is not None}
    asked = " ".join(f"--mesh.{axis} {size}" for axis, size in sizes.items())
    product = math.prod(sizes.values())
    if product > len(devices):
        names = ", ".join(f"{device.platform}:{device.id}" for device in devices)
        raise UserError(f"{asked}: needs {product} devices, but there are {len(devices)}: {names}")
    filled = "data" if config.strategy == "replicas" else "fsdp"
    if filled not in sizes:
        if len(devices) % product:
            raise UserError(
                f"{asked}: {len(devices)} devices cannot be shared out evenly over {filled}; give --mesh.{filled} too"
            )
        sizes[filled] = len(devices) // product
    return make_mesh(sizes, devices[: math.prod(sizes.values())])
