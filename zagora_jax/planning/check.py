"""What `train` asks before it reads a weight: whether the compiled step fits, and else what is the first that would."""

import math
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Any

import jax
from jax.sharding import Mesh

from models.remat import OFFLOADABLE, REMATS
from zagora_jax.arrange import check_ends, ends_trained
from zagora_jax.base import BaseModel
from zagora_jax.config import TrainConfig
from zagora_jax.devices import lacking_memory, memory_limit
from zagora_jax.errors import UserError
from zagora_jax.kernels import forward_options
from zagora_jax.planning.analytic import ERROR, estimate_memory
from zagora_jax.planning.candidates import changed, on_mesh
from zagora_jax.planning.compiled import compile_planned
from zagora_jax.planning.machine import budget_here
from zagora_jax.planning.shapes import Shapes

GIB = 2**30
MOST_COMPILED = 3
SEQUENCE_MULTIPLE = 128

Settings = dict[str, Any]


def require_fit(planned: Mapping[jax.Device, int], config: TrainConfig, base: BaseModel, mesh: Mesh) -> None:
    """Refuse a step that cannot fit, before it is run.

    Args:
        planned: bytes that the compiled step needs of each device. A CPU's memory has no limit of XLA's.
        config: the run's options.
        base: its model.
        mesh: its devices.

    Raises:
        UserError: a device's allocator may take less; names the first change with which the step would fit.
    """
    if lacking := lacking_memory(planned):
        raise UserError(
            f"{lacking}. {_advice(max(planned.values()), config, base, mesh)} (--no-plan-check tries to run it as it "
            "is.)"
        )


def _fits(planned: Mapping[jax.Device, int]) -> bool:
    return lacking_memory(planned) is None


def _advice(planned: int, config: TrainConfig, base: BaseModel, mesh: Mesh) -> str:
    here = None if mesh.devices.flat[0].platform == "cpu" else budget_here(mesh.size)
    total = None if here is None else here.total
    if here is not None and planned <= here.limit and config.device_memory_limit is None:
        # By itself JAX takes three quarters of the card.
        return f"It would fit with --device-memory-limit {math.floor(here.limit / GIB * 10) / 10}."
    limit = min(limit for device in mesh.devices.flat if (limit := memory_limit(device)) is not None)
    explicit = on_mesh(config, mesh)
    shapes, compiled = Shapes(base), 0
    one_program, ends = shapes.in_one_program(explicit), ends_trained(base.model)
    for settings in _changes(explicit):
        if "stage_form" in settings and not one_program:
            continue  # nothing would change
        try:
            other = changed(explicit, settings)
            check_ends(other, ends)
            kernel = forward_options(other, base, mesh.devices.flat[0].platform).kernel
        except (ValueError, UserError):
            continue  # what does not go together
        if max(memory.peak for memory in estimate_memory(other, shapes, kernel, total)) > limit / (1 + ERROR):
            continue
        exact = compile_planned(other, mesh, base).planned_memory()
        compiled += 1
        if _fits(exact):
            peak = max(exact.values())
            flags = " ".join(f"--{name.replace('_', '-')} {_written(value)}" for name, value in settings.items())
            return f"The first change that fits is {flags}: {peak / GIB:.2f} GiB."
        if compiled == MOST_COMPILED:
            break
    return (
        "No change of optimizer, remat, offload, embeddings, micro-batch or sequence length makes it fit: use more "
        "devices."
    )


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _changes(config: TrainConfig) -> Iterator[Settings]:
    """Go through changes from cheap to dear: one, then two, then three kinds of them."""
    found = (
        _form(config),
        _optimizer(config),
        _kept(config),
        _rows(config),
        _weights(config),
        _embeddings(config),
        _tokens(config),
    )
    kinds = [kind for kind in found if kind]
    for number in (1, 2, 3):
        for chosen in combinations(kinds, number):
            for settings in product(*chosen):
                yield {name: value for part in settings for name, value in part.items()}


def _optimizer(config: TrainConfig) -> list[Settings]:
    smaller: list[Settings] = [{"optimizer": "adamw_8bit"}] if config.optimizer == "adamw" else []
    return smaller if config.offload.optimizer else [*smaller, {"offload.optimizer": True}]


def _form(config: TrainConfig) -> list[Settings]:
    in_stages = config.strategy == "layerwise"
    return [{"stage_form": "programs"}] if in_stages and config.stage_form != "programs" else []


def _embeddings(config: TrainConfig) -> list[Settings]:
    return [{"embeddings": "int8"}] if config.embeddings == "none" else []


def _weights(config: TrainConfig) -> list[Settings]:
    """Let frozen layers wait in host memory: as many as needed, of which the compiled step streams all."""
    streamed = config.streamed_weights
    if isinstance(streamed, int):
        return [{"offload.weights": "all"}]
    shards = (config.mesh.tensor or 1) > 1 or config.strategy in ("tensor", "layerwise")
    if streamed != "none" or shards or config.gradient_exchange != "synchronous":
        return []
    settings: Settings = {"offload.weights": "auto", "remat": "full"}
    if config.planned_remat == "full":
        del settings["remat"]
    return [settings] if config.offload.activations else [settings, settings | {"offload.activations": True}]


def _kept(config: TrainConfig) -> list[Settings]:
    others = ("nested",) if config.strategy == "layerwise" else ("nested", "stage")
    less = [remat for remat in REMATS[REMATS.index(config.planned_remat) + 1 :] if remat not in others]
    offloads = config.offload.activations
    found: list[Settings] = [{"remat": remat} for remat in less if not offloads]
    if not offloads and config.planned_remat in OFFLOADABLE:
        found.insert(0, {"offload.activations": True})
    if not offloads and config.planned_remat != "full":
        found.append({"remat": "full", "offload.activations": True})
    return found


def _rows(config: TrainConfig) -> list[Settings]:
    found = []
    rows, times = config.micro_batch_size, config.gradient_accumulation_steps
    while rows % 2 == 0:
        rows, times = rows // 2, times * 2
        found.append({"micro_batch_size": rows, "gradient_accumulation_steps": times})
    return found


def _tokens(config: TrainConfig) -> list[Settings]:
    length, found = config.sequence_length, []
    while (length := length * 3 // 4 // SEQUENCE_MULTIPLE * SEQUENCE_MULTIPLE) >= SEQUENCE_MULTIPLE:
        found.append({"sequence_length": length})
    return found
