"""Trains a few steps on GPUs, and tells how much of the exchanges between them ran under computations.

    python benchmarks/hidden_exchanges.py --model synthetic:llama-3-8b --sequence-length 2048 --strategy replicas \
        --gradient-exchange synchronous overlapped delayed

takes the options of `python -m zagora_jax.train`; several values of --gradient-exchange are run one after the other.
Steps 4 to 6 are traced with JAX's profiler, and for each GPU the kernels of its streams are read: those of NCCL are
exchanges, all others but copies are computations. --traces FOLDER keeps the traces, which XProf and Perfetto show.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import jax
from jax.profiler import ProfileData

from zagora_jax import trainer
from zagora_jax.command_line import parse
from zagora_jax.config import TrainConfig

FIRST, LAST = 4, 6
EXCHANGE, COPY = re.compile("nccl", re.IGNORECASE), re.compile("^(memcpy|memset)", re.IGNORECASE)

Interval = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gradient-exchange", nargs="+", default=["synchronous"])
    parser.add_argument("--traces", type=Path, help="folder that keeps the traces")
    known, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        traces = known.traces or Path(temporary, "traces")
        if len(known.gradient_exchange) > 1:  # each in a process of its own, which has the GPUs to itself
            for exchange in known.gradient_exchange:
                command = [sys.executable, __file__, "--gradient-exchange", exchange, "--traces", str(traces)]
                subprocess.run([*command, *options], check=True)
            return
        (exchange,) = known.gradient_exchange
        fixed = ["--gradient-exchange", exchange, "--max-steps", str(LAST + 1), "--gradient-accumulation-steps", "1"]
        config = parse(TrainConfig, [*fixed, *options, "--output", str(Path(temporary, "run"))])
        train_with_trace(config, traces / exchange)
        (trace,) = (traces / exchange).rglob("*.xplane.pb")
        for line in report(ProfileData.from_file(str(trace))):
            print(f"{exchange}: {line}", flush=True)


def train_with_trace(config: TrainConfig, folder: Path) -> None:
    """Train as `config` says, and write a trace of the steps FIRST to LAST."""
    run = trainer._Run(config, trainer.Reporter())
    step = run._step

    def traced(function, state, number):
        if number == FIRST:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(str(folder), profiler_options=options)
        result = step(function, state, number)
        if number == LAST:
            jax.block_until_ready(result[0])
            jax.profiler.stop_trace()
        return result

    run._step = traced
    run.train()


def report(profile: ProfileData) -> list[str]:
    """A line for each GPU of a trace."""
    lines = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        exchanges, computations = [], []
        for line in plane.lines:
            for event in line.events if line.name.startswith("Stream") else ():
                if not COPY.search(event.name):
                    kind = exchanges if EXCHANGE.search(event.name) else computations
                    kind.append((event.start_ns, event.start_ns + event.duration_ns))
        exchanging, computing = union(exchanges), union(computations)
        total, hidden = length(exchanging), length(overlap(exchanging, computing))
        lines.append(
            f"{plane.name}: in {LAST - FIRST + 1} steps {length(computing) / 1e6:.1f} ms of computations, "
            f"{total / 1e6:.1f} ms of exchanges, {100 * hidden / max(total, 1):.0f} % of these under computations"
        )
    return lines or ["no GPU in the trace"]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times in intervals that are in order and apart."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def overlap(some: list[Interval], others: list[Interval]) -> list[Interval]:
    """The times that are in both; either is what `union` returns."""
    found, j = [], 0
    for start, end in some:
        while j < len(others) and others[j][1] <= start:
            j += 1
        k = j
        while k < len(others) and others[k][0] < end:
            found.append((max(start, others[k][0]), min(end, others[k][1])))
            k += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


if __name__ == "__main__":
    main()
