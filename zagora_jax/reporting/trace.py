"""A profiler's trace of one optimizer step: what each device did, for how long, and what lay under what."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileOptions

from zagora_jax.errors import UserError
from zagora_jax.reporting.progress import Reporter

COMPUTATION, HOST_COPY, EXCHANGE = "computation", "copies to and from the host", "exchange between devices"
KINDS = (COMPUTATION, HOST_COPY, EXCHANGE)

# As CUDA names copies, NCCL its kernels, and XLA the operations of its CPU devices.
_HOST_COPIES = ("MemcpyH2D", "MemcpyD2H")
_EXCHANGES = ("nccl", "MemcpyP2P", "all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

MOST_KERNELS = 30  # in the table of a step
KERNEL_COLUMNS = ("kernel", "count", "ms", "of the step")

Interval = tuple[float, float]  # seconds


@dataclass(frozen=True)
class Activity:
    """One kernel or copy on a device; times in seconds of the trace's clock."""

    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if self.name.startswith(_HOST_COPIES):
            return HOST_COPY
        return EXCHANGE if self.name.startswith(_EXCHANGES) else COMPUTATION


@dataclass(frozen=True)
class KernelTime:
    """All activities of one name in a step, summed."""

    name: str
    kind: str
    count: int
    seconds: float


@dataclass(frozen=True)
class DeviceTrace:
    """What one device did in a step."""

    device: str
    activities: tuple[Activity, ...]

    @property
    def seconds(self) -> float:
        """From the first activity's start to the last one's end."""
        return max(a.end for a in self.activities) - min(a.start for a in self.activities)

    def busy(self, *kinds: str) -> float:
        """Seconds in which some activity of these kinds ran."""
        return _length(self._intervals(kinds))

    def exposed(self, kind: str) -> float:
        """Seconds in which activities of `kind` ran and no computation did."""
        both = self.busy(kind, COMPUTATION)
        return both - self.busy(COMPUTATION)

    def kernels(self) -> list[KernelTime]:
        """Sum the activities by name, the longest first."""
        found: dict[str, list[Activity]] = defaultdict(list)
        for activity in self.activities:
            found[activity.name].append(activity)
        times = [KernelTime(name, of[0].kind, len(of), sum(a.end - a.start for a in of)) for name, of in found.items()]
        return sorted(times, key=lambda kernel: -kernel.seconds)

    def _intervals(self, kinds: tuple[str, ...]) -> list[Interval]:
        return _union((a.start, a.end) for a in self.activities if a.kind in kinds)


@contextmanager
def tracing(directory: Path) -> Iterator[None]:
    """Write a trace of what runs inside into `directory`, for this module, TensorBoard and Perfetto."""
    options = ProfileOptions()
    options.python_tracer_level = 0  # it slows down what it watches
    jax.profiler.start_trace(directory, profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def read_trace(directory: Path) -> list[DeviceTrace]:
    """Read the newest trace in `directory`, a DeviceTrace for each device.

    Raises:
        UserError: there is no trace, or none of a device's work.
    """
    files = sorted(directory.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise UserError(f"{directory}: no trace (*.xplane.pb) here")
    devices = []
    for plane in ProfileData.from_file(str(files[-1])).planes:
        if plane.name.startswith("/device:GPU"):
            lines = [line for line in plane.lines if line.name.startswith("Stream")]
            events = [event for line in lines for event in line.events]
        elif plane.name == "/host:CPU":
            lines = [line for line in plane.lines if line.name.startswith("tf_XLA")]
            events = [e for line in lines for e in line.events if any(name == "hlo_op" for name, _ in e.stats)]
        else:
            continue
        if events:
            seconds = [Activity(e.name, e.start_ns / 1e9, (e.start_ns + e.duration_ns) / 1e9) for e in events]
            devices.append(DeviceTrace(plane.name.removeprefix("/device:").removeprefix("/host:"), tuple(seconds)))
    if not devices:
        raise UserError(f"{files[-1]}: the trace holds no work of a device. Was the profiler's library (CUPTI) found?")
    return devices


def show_trace(directory: Path, step: int, reporter: Reporter) -> None:
    """Print the newest trace in `directory`, of one step: what each device did, and the first one's longest kernels."""
    try:
        devices = read_trace(directory)
    except UserError as error:  # no reason to end a training
        reporter.say(f"warning: step {step} could not be profiled: {error}")
        return
    reporter.table(f"step {step}, in ms", ("", *(trace.device for trace in devices)), device_rows(devices))
    reporter.table(f"kernels of {devices[0].device}", KERNEL_COLUMNS, kernel_rows(devices[0], MOST_KERNELS))


def device_rows(devices: list[DeviceTrace]) -> list[list[str]]:
    """Rows (what, ms of each device): the step, each kind, how much of it no computation hid, and idle time."""
    rows = [
        ("step", [trace.seconds for trace in devices]),
        *((kind, [trace.busy(kind) for trace in devices]) for kind in KINDS),
        ("bare copies", [trace.exposed(HOST_COPY) for trace in devices]),
        ("bare exchange", [trace.exposed(EXCHANGE) for trace in devices]),
        ("idle", [trace.seconds - trace.busy(*KINDS) for trace in devices]),
    ]
    return [[what, *(f"{1e3 * time:,.1f}" for time in seconds)] for what, seconds in rows]


def kernel_rows(trace: DeviceTrace, most: int) -> list[list[str]]:
    """Rows (kernel, count, ms, part of the step) of the `most` longest kernels, and one of all others."""
    kernels = trace.kernels()
    rows = [(kernel.name, kernel.count, kernel.seconds) for kernel in kernels[:most]]
    if rest := kernels[most:]:
        rows.append((f"{len(rest)} others", sum(k.count for k in rest), sum(k.seconds for k in rest)))
    return [
        [name, f"{count:,}", f"{1e3 * seconds:,.2f}", f"{seconds / trace.seconds:.1%}"] for name, count, seconds in rows
    ]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Join intervals that overlap."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
