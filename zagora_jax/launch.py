"""Which process of how many this is: as the options say, or as the launcher that started it tells its processes."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zagora_jax.config import TrainConfig
from zagora_jax.devices import installed_gpus
from zagora_jax.errors import UserError

# Variables that jax's own detection reads (https://docs.jax.dev/en/latest/multi_process.html), and torchrun's.
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_OPEN_MPI_ADDRESS = "OMPI_MCA_orte_hnp_uri"  # until version 4
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Place:
    """A process's place among those of a run.

    Attributes:
        by: who says so: "options", or the launcher's name.
        coordinator: HOST:PORT at which process 0 listens; None: jax's detection knows.
        count: of processes; None likewise.
        index: of this one; None likewise.
        method: the name of jax's detection; None where it is not needed.
        local: which process of how many on its machine this is; None where nobody says: it takes all GPUs it sees.
    """

    by: str
    coordinator: str | None
    count: int | None
    index: int | None
    method: str | None = None
    local: tuple[int, int] | None = None

    def gpus(self) -> list[int] | None:
        """Return the numbers of the visible GPUs that this process takes; None: all."""
        if self.local is None:
            return None
        rank, size = self.local
        visible = len(installed_gpus())
        if visible == 0:
            return [0]  # said, or else jax's detection would say it
        if size == 1 or visible < size or os.environ.get("SLURM_GPUS_PER_TASK"):
            return list(range(visible))  # its own: the launcher shows no process those of another
        share = visible // size
        return list(range(rank * share, (rank + 1) * share))


def find_place(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place; None where it is alone.

    Raises:
        UserError: the options contradict the launcher, or say too little.
    """
    told = _told(environment)
    if told is None or (told.count is None and config.process_count == 1):
        return _of_options(config)
    _require_agreement(config, told)
    place = replace(
        told,
        coordinator=config.coordinator or told.coordinator,
        count=told.count if config.process_count is None else config.process_count,
        index=told.index if config.process_index is None else config.process_index,
    )
    if place.method is None and place.coordinator is None:
        raise UserError(
            f"{told.by} started {told.count} processes, but does not tell where the first one is: give --coordinator "
            "HOST:PORT, a free port of the machine of process 0"
        )
    return place


def _of_options(config: TrainConfig) -> Place | None:
    options = {
        "--coordinator": config.coordinator,
        "--process-count": config.process_count,
        "--process-index": config.process_index,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if not given or (config.process_count == 1 and config.process_index in (None, 0)):
        return None
    if missing := [name for name in options if name not in given]:
        raise UserError(
            f"{' '.join(f'{name} {value}' for name, value in given.items())}: give {' and '.join(missing)} too; no "
            "launcher (SLURM, Open MPI, Kubernetes, torchrun) tells it"
        )
    assert config.process_count is not None
    assert config.process_index is not None
    if config.process_index >= config.process_count:
        raise UserError(
            f"--process-index {config.process_index}: there are {config.process_count} processes "
            f"(--process-count), numbered from 0 to {config.process_count - 1}"
        )
    return Place("options", config.coordinator, config.process_count, config.process_index)


def _require_agreement(config: TrainConfig, told: Place) -> None:
    for option, given, found in (
        ("--process-count", config.process_count, told.count),
        ("--process-index", config.process_index, told.index),
        ("--coordinator", config.coordinator, told.coordinator),
    ):
        if given is not None and found is not None and given != found:
            raise UserError(
                f"{option} {given}: contradicts {told.by}, in whose environment it is {found}. Leave the option out, "
                f"or unset the variables of {told.by}"
            )


def _told(environment: Mapping[str, str]) -> Place | None:
    """Return what a launcher says of this process; None where there is none, or it started one process alone.

    The innermost comes first: torchrun may be started by SLURM, once a machine.
    """

    def number(name: str) -> int:
        text = environment[name]
        if not re.fullmatch(r"\d+", text):
            raise UserError(f"the environment has {name}={text}: expected a number")
        return int(text)

    def has(names: tuple[str, ...]) -> bool:
        return all(environment.get(name) for name in names)

    if has(_TORCHRUN) and number("WORLD_SIZE") > 1:
        # torchrun's own store listens at MASTER_PORT.
        port = number("MASTER_PORT") + (environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
        is_local = has(("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        local = (number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE")) if is_local else None
        return Place(
            "torchrun", f"{environment['MASTER_ADDR']}:{port}", number("WORLD_SIZE"), number("RANK"), None, local
        )
    if has(_SLURM) and number("SLURM_NTASKS") > 1:
        local = (number("SLURM_LOCALID"), _slurm_tasks_here(environment))
        return Place("SLURM", None, number("SLURM_NTASKS"), number("SLURM_PROCID"), "slurm", local)
    if has(_OPEN_MPI) and number("OMPI_COMM_WORLD_SIZE") > 1:
        local = (number("OMPI_COMM_WORLD_LOCAL_RANK"), int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1))
        method = "ompi" if environment.get(_OPEN_MPI_ADDRESS) else None
        return Place("Open MPI", None, number("OMPI_COMM_WORLD_SIZE"), number("OMPI_COMM_WORLD_RANK"), method, local)
    if has(_KUBERNETES):
        return Place("Kubernetes", None, None, number("JOB_COMPLETION_INDEX"), "k8s")
    return None


def _slurm_tasks_here(environment: Mapping[str, str]) -> int:
    """Return how many tasks SLURM started on this machine, of a text such as 2(x3),1: three machines with two, one."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or "1"
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UserError(f"the environment has SLURM_STEP_TASKS_PER_NODE={text}: expected such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    node = int(environment.get("SLURM_NODEID") or 0)
    return counts[min(node, len(counts) - 1)]
