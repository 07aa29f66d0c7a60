"""The processes of one run, on one or many machines: joining them, and what they agree on.

JAX's multi-controller runtime carries what they exchange: its coordination service, which process 0 runs, for words,
and collectives between devices for numbers. All processes run the same program, and do what is exchanged in the same
order; process 0, the first, writes what is written once.
"""

import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.spanning import gather, place, total, whole_everywhere
from zagora_jax import exiting, hanging, interruption
from zagora_jax.config import TrainConfig
from zagora_jax.devices import know_limits, memory_limit
from zagora_jax.errors import UserError
from zagora_jax.interruption import STOPPED, Interrupted
from zagora_jax.launch import Place, find_place
from zagora_jax.peers import Peers, say_when_aborted

T = TypeVar("T")

JOINING = 300  # seconds that a process waits for the others at the start
CHUNK = 2**20  # characters of a word to the coordination service
WAITING = 7 * 24 * 3600  # seconds for an answer: `Peers` ends a process whose peers are lost


class Processes:
    """The processes of a run, seen from this one.

    Attributes:
        index: of this one.
        count: of all.
        scratch: where all but the first write what only the first one's is kept of; None at the first.
    """

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count
        self.scratch: Path | None = None
        self._calls = self._run = 0
        self._client: Any = None
        self._peers: Peers | None = None
        self._hosts: list[str] = [socket.gethostname()]

    @property
    def alone(self) -> bool:
        """Whether there are no others."""
        return self.count == 1

    @property
    def is_first(self) -> bool:
        """Whether this one writes what is written once."""
        return self.index == 0

    def host(self, index: int) -> str:
        """Return the name of a process's machine."""
        return self._hosts[index]

    def name(self, index: int) -> str:
        """Return how messages call a process."""
        return f"process {index} of {self.count} ({self._hosts[index]})"

    def doing(self, what: str) -> None:
        """Let the others know what this process is at."""
        if self._peers is not None:
            self._peers.doing = what

    def behind(self) -> str:
        """Say, for a message, which processes are at something else."""
        return "" if self._peers is None else self._peers.behind()

    def gathered(self, value: T) -> list[T]:
        """Return what each process gives, in their order, as JSON has it."""
        if self.alone:
            return [value]
        self._say(value)
        values = [self._hear(index) for index in range(self.count)]
        self._calls += 1
        return values

    def from_first(self, value: T) -> T:
        """Return what the first process gives, as JSON has it; what the others give does not matter."""
        if self.alone:
            return value
        if self.is_first:
            self._say(value)
        found = self._hear(0)
        self._calls += 1
        return found

    def meet(self, what: str) -> None:
        """Wait until every process is here."""
        self.doing(f"waiting for the others, {what}")
        self.gathered(None)
        self.doing(what)

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Tell for each flag whether any process has it set; an exchange between devices, for use amid training."""
        if self.alone:
            return flags
        sharding = NamedSharding(self._devices, PartitionSpec("devices"))
        rows = np.broadcast_to(np.array(flags, np.int32), (self._devices.size, len(flags)))
        found = np.asarray(whole_everywhere(place(rows, sharding)).addressable_data(0))
        return tuple(bool(column.any()) for column in found.T)

    def is_to_stop(self) -> bool:
        """Tell whether a signal has asked any process to stop; then all of them are asked, and none earlier."""
        (stops,) = self.any_of(interruption.requested())
        if stops:
            interruption.ask()
        return stops

    def arrays_from_first(self, tree: T) -> T:
        """Return the first process's arrays on the host, bit for bit; what those of the others hold does not matter."""
        if self.alone:
            return tree

        def from_first(leaf: Any) -> np.ndarray:
            own = _bytes_of([np.asarray(leaf)])
            # What the others give is added to it.
            found = np.asarray(total(own if self.is_first else np.zeros_like(own), self._first_devices))
            return _arrays_of(found, [np.asarray(leaf)])[0]

        return jax.tree.map(from_first, tree)

    def arrays_of_each(self, tree: T) -> list[T]:
        """Return the arrays that each process gives, in their order, bit for bit, on the host.

        Shapes and dtypes are the same everywhere. The arrays travel as bytes, a tree in one piece.
        """
        leaves, structure = jax.tree.flatten(tree)
        arrays = [np.asarray(leaf) for leaf in leaves]
        rows = np.asarray(gather(_bytes_of(arrays), self._first_devices))
        return [jax.tree.unflatten(structure, _arrays_of(row, arrays)) for row in rows]

    def meet_devices(self) -> None:
        """Exchange what each process knows of its devices, which are used from now on."""
        if not self.alone:
            for of_process in self.gathered({str(device.id): memory_limit(device) for device in jax.local_devices()}):
                know_limits({int(number): limit for number, limit in of_process.items()})

    def processes_here(self) -> list[int]:
        """Return the processes on this machine."""
        return [index for index, host in enumerate(self._hosts) if host == self._hosts[self.index]]

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse to go on where processes have begun something else.

        Raises:
            UserError: one of the facts is not what it is in the first process.
        """
        first, *others = self.gathered(dict(facts))
        for index, found in enumerate(others, start=1):
            if differing := [name for name in first if first[name] != found.get(name)]:
                name = differing[0]
                raise UserError(
                    f"{name} is {found.get(name)} in {self.name(index)}, but {first[name]} in {self.name(0)}: all "
                    "processes need the same command, files and versions"
                )

    def begin(self, client: Any, service: str, run: int) -> None:
        """Get to know the others, and watch over them."""
        self._client, self._run = client, run
        self._hosts = self.gathered(socket.gethostname())
        pids = self.gathered(os.getpid())
        names = [f"{self.name(index)[:-1]}, pid {pid})" for index, pid in enumerate(pids)]
        hanging.say_too(self.behind)
        self._peers = Peers(client, service, self.index, names, run)
        exiting.tell_before(self._peers.end)

    def close(self) -> None:
        """Watch over the others no longer."""
        hanging.say_too(str)
        exiting.tell_before(None)
        if self._peers is not None:
            self._peers.close()

    def end(self, error: BaseException) -> None:
        """Tell the others why this process ends, unless it ends because one of them is lost."""
        hanging.leave_at_once()  # JAX would wait for the others
        if self._peers is None:
            return
        if _is_of_exchange(error):
            self._peers.wait_for_verdict()
        message = str(error) if isinstance(error, UserError | Interrupted) else f"{type(error).__name__}: {error}"
        status = STOPPED if isinstance(error, Interrupted) else hanging.FAILED
        self._peers.end(status, message)

    def _say(self, value: Any) -> None:
        text = json.dumps(value)
        chunks = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
        for number, chunk in enumerate(chunks):
            self._client.key_value_set(self._key(self.index, number), f"{len(chunks)}:{chunk}")

    def _key(self, index: int, number: int) -> str:
        return f"zagora/word/{self._run}/{self._calls}/{index}/{number}"

    def _hear(self, index: int) -> Any:
        text, number, chunks = "", 0, 1
        while number < chunks:
            found = self._client.blocking_key_value_get(self._key(index, number), WAITING * 1000)
            count, _, chunk = found.partition(":")
            text, number, chunks = text + chunk, number + 1, int(count)
        return json.loads(text)

    @cached_property
    def _devices(self) -> Mesh:
        return Mesh(np.array(jax.devices()), ("devices",))

    @cached_property
    def _first_devices(self) -> Mesh:
        first: dict[int, jax.Device] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        return Mesh(np.array([first[index] for index in range(self.count)]), ("processes",))


def _bytes_of(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the bytes of arrays, one behind the other, and zeros up to one of few sizes: each size is compiled for."""
    data = np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
    unit = 2 ** max(10, data.size.bit_length() - 4)  # an eighth more at most
    return np.pad(data, (0, -data.size % unit))


def _arrays_of(data: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Undo `_bytes_of`; `like` gives shapes and dtypes."""
    ends = np.cumsum([array.nbytes for array in like])
    parts = zip(np.split(data[: ends[-1]], ends[:-1]), like, strict=True)
    return [part.view(array.dtype).reshape(array.shape) for part, array in parts]


def _is_of_exchange(error: BaseException) -> bool:
    """Tell whether an error may come of a peer that is gone: one of XLA's, but for memory; some are ValueErrors."""
    causes = [cause for cause in (error, error.__cause__) if isinstance(cause, jax.errors.JaxRuntimeError | ValueError)]
    return any(
        "RESOURCE_EXHAUSTED" not in str(cause)
        if isinstance(cause, jax.errors.JaxRuntimeError)
        else "Gloo" in str(cause)
        for cause in causes
    )


_present = Processes()
_runs = 0  # of this process, together with others


def present() -> Processes:
    """Return the processes of the run that goes on, or this one alone."""
    return _present


@contextmanager
def joined(config: TrainConfig) -> Iterator[Processes]:
    """Join the other processes of a run, where there are any, for the time of the block.

    Where it fails in one process, the others end too; see `Peers`. To be called before anything uses a device.

    Raises:
        UserError: the options contradict the launcher, or JAX cannot join.
    """
    global _present
    own = find_place(config)
    if own is None and not jax.distributed.is_initialized():
        yield _present
        return
    _present = processes = _join(own)
    try:
        with _scratch(processes):
            yield processes
            processes.meet("at the end")
        processes.close()
    except BaseException as error:
        processes.end(error)
        if isinstance(error, UserError) and not processes.is_first:
            raise UserError(f"{processes.name(processes.index)}: {error}") from error
        raise
    finally:
        _present = Processes()


@contextmanager
def _scratch(processes: Processes) -> Iterator[None]:
    if processes.is_first:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="zagora-jax-") as folder:
        processes.scratch = Path(folder) / "run"
        yield


def _join(place: Place | None) -> Processes:
    """Initialise JAX's distributed runtime, if a program that calls us has not, and begin to watch over the others."""
    global _runs
    from jax._src.distributed import global_state  # the coordination service's client has no public name

    if not jax.distributed.is_initialized():
        assert place is not None
        _initialize(place)
    index, count = global_state.process_id, global_state.num_processes
    if (
        place is not None
        and (place.count, place.index) != (None, None)
        and (count, index) != (place.count, place.index)
    ):
        raise UserError(
            f"this program has joined JAX's distributed runtime as process {index} of {count}, but {place.by} says "
            f"{place.index} of {place.count}"
        )
    _runs += 1
    processes = Processes(index, count)
    processes.begin(global_state.client, str(global_state.coordinator_address), _runs)
    return processes


def _initialize(place: Place) -> None:
    jax.config.update("jax_enable_preemption_service", False)  # signals are ours: see zagora_jax.interruption
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    where = place.coordinator or f"the address that {place.by} tells"
    say_when_aborted(
        f"process {place.index} of {place.count}: not all processes came together at {where} within {JOINING} s. Start "
        "all of them, with the same --coordinator, and see that its port is open to all machines"
    )
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            local_device_ids=place.gpus(),
            cluster_detection_method=place.method or "deactivate",
            initialization_timeout=JOINING,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the processes cannot be joined ({where}, by {place.by}): {error}") from error
