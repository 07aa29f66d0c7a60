"""What a run does otherwise where several processes share it: what they agree on, and who writes."""

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from models.llama import Llama
from sharding.rules import named_sharding
from sharding.spanning import own_rows, whole_on_first
from zagora_jax.arrange import why_not_one_jit
from zagora_jax.arrangement import Arrangement
from zagora_jax.checkpoints.atomic import write_bytes
from zagora_jax.config import TrainConfig
from zagora_jax.connections import Link, in_words, report, try_connections
from zagora_jax.data.batches import BatchIterator
from zagora_jax.distribution import BATCH_AXES, Distribution
from zagora_jax.equal_stages import EqualStages
from zagora_jax.errors import UserError
from zagora_jax.planning.probe import host_gb_s
from zagora_jax.processes import Processes
from zagora_jax.reporting.progress import Reporter
from zagora_jax.resume import Progress, SavedPoint
from zagora_jax.run_directory import RunDirectory
from zagora_jax.train_state import TrainState


def own_reporter(processes: Processes, reporter: Reporter, output: Path) -> Reporter:
    """Return where this process tells the run's story: the first to `reporter`, the others to files of their own."""
    if processes.is_first:
        return reporter
    output.mkdir(parents=True, exist_ok=True)
    file = (output / f"process-{processes.index}.log").open("a", encoding="utf-8", buffering=1)
    return Reporter(Console(file=file, width=120))


def require_shareable(config: TrainConfig, processes: Processes) -> None:
    """Refuse options that one process alone can do.

    Raises:
        UserError: there are several, and such an option.
    """
    if processes.alone:
        return
    reasons = {
        f"--lora.initialization {config.lora.initialization}": (
            config.lora.initialization != "default",
            "each process reads a part of the layers, and makes the factors of those alone; leave it out, or train in "
            "one process",
        ),
        "--stage-form programs": (config.stage_form == "programs", "a process cannot run the programs of another"),
        f"--offload.weights-from {config.offload.weights_from}": (
            config.offload.weights_from not in ("auto", "host"),
            "each process would need a cache of all layers; leave it out",
        ),
    }
    for option, (is_given, reason) in reasons.items():
        if is_given:
            raise UserError(f"{option} does not go with {processes.count} processes: {reason}")


def shareable(config: TrainConfig, processes: Processes) -> TrainConfig:
    """Return the options as several processes follow them: no layer moves from one to another."""
    if processes.alone:
        return config
    return config.model_copy(update={"balance": config.balance.model_copy(update={"threshold": 0.0})})


def require_one_program(arrangement: Arrangement, config: TrainConfig, model: Llama, processes: Processes) -> None:
    """Refuse an arrangement whose programs do not all run over all processes.

    Raises:
        UserError: there are several processes, and a program for each stage.
    """
    if processes.alone or isinstance(arrangement, Distribution | EqualStages):
        return
    why = why_not_one_jit(config, model, arrangement.mesh)
    raise UserError(
        f"--strategy layerwise runs a program for each stage here ({why}), which does not go with {processes.count} "
        "processes: take cards of one kind and a number of stages that divides the layers, or another --strategy"
    )


def require_spread_evenly(mesh: Mesh, processes: Processes) -> None:
    """Refuse a mesh in which a process has no device, or another number of them than the first.

    Raises:
        UserError: the process and what it has are named.
    """
    owners = [device.process_index for device in mesh.devices.flat]
    counts = [owners.count(index) for index in range(processes.count)]
    for index, count in enumerate(counts):
        if count != counts[0] or not count:
            raise UserError(
                f"the mesh has {count} devices of {processes.name(index)} and {counts[0]} of {processes.name(0)}: each "
                "process needs as many; change --mesh or --devices, or start fewer processes"
            )
    if owners != sorted(owners):
        raise UserError("--devices: name all devices of a process before those of the next one")


def require_same_run(
    processes: Processes, config: TrainConfig, progress: Progress, total_steps: int, held_out: Mapping[str, Any]
) -> None:
    """Refuse to go on where another process has other options, rows, weights or versions.

    Raises:
        UserError: the first difference, and the process, are named.
    """
    own = {"coordinator", "process_index", "process_count", "output", "model", "data", "eval_data", "quantized_cache"}
    options = {f"option {name}": value for name, value in config.model_dump(mode="json", exclude=own).items()}
    batches = {f"{name} of the batches": value for name, value in progress.data["batches"].items()}
    versions = {f"the version of {name}": importlib.metadata.version(name) for name in ("jax", "jaxlib", "zagora-jax")}
    sets = {f"eval data {name}".strip(): getattr(rows, "fingerprint", None) for name, rows in held_out.items()}
    facts = {"the model's fingerprint": progress.model, "the number of steps": total_steps}
    processes.require_same({**versions, **options, **facts, **batches, **sets})


def agreed_saved(
    processes: Processes, find: Callable[[], SavedPoint | None], batches: BatchIterator
) -> SavedPoint | None:
    """Return the saved step that the first process finds to go on from; then `batches` stands behind it everywhere."""
    if processes.alone:
        return find()
    found = find() if processes.is_first else None
    entry = processes.from_first(None if found is None else asdict(found))
    if entry is None or processes.is_first:
        return found
    saved = SavedPoint(entry["step"], Progress(**entry["progress"]))
    batches.set_state(saved.progress.data)
    return saved


def agreed_metrics(processes: Processes, lines: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """Return the metrics of earlier steps as the first process has them, and have them in this one's `file` too."""
    if processes.alone:
        return lines
    lines = processes.from_first(lines)
    if not processes.is_first and lines:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return lines


def restored(processes: Processes, restore: Callable[[], TrainState], like: TrainState) -> TrainState:
    """Return a saved state, which the first process alone has to find on its disk."""
    if processes.alone:
        return restore()
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    return jax.tree.map(np.asarray, processes.arrays_from_first(restore() if processes.is_first else empty))


def on_host(processes: Processes, state: Any) -> Any:
    """Bring what several processes share to the first one's host, so that the whole of it can be made there."""
    return state if processes.alone else jax.tree.map(whole_on_first, state)


def try_links(mesh: Mesh, processes: Processes, directory: RunDirectory, say: Callable[[str], None]) -> None:
    """See that devices reach each other, and write down how fast.

    Raises:
        UserError: they do not.
    """
    if mesh.size == 1:
        return
    links = try_connections(mesh, processes.host)
    host = None if mesh.local_devices[0].platform == "cpu" else host_gb_s(mesh.local_devices[0])
    all_links = [
        Link(**link) for of_process in processes.gathered([asdict(link) for link in links]) for link in of_process
    ]
    directory.write_connections(report(all_links, host))
    for line in in_words(all_links):
        say(line)


def split_rows(arrangement: Arrangement, batches: Any, processes: Processes) -> None:
    """Let each process read only the rows of its own devices."""
    if not processes.alone:
        sharding = named_sharding(arrangement.mesh, BATCH_AXES)
        batches.own = own_rows(sharding, batches.abstract().tokens.shape, axis=1)
