"""Prints, and draws, which way of training together is fastest over which link, by estimate. Needs no GPU.

    JAX_PLATFORMS=cpu python benchmarks/site_links.py [--model llama-3-8b] [--gpu rtx4090] [--plot sites.svg]

Each machine has one card, and rows of its own; what a step takes on it, and what the strategies between cards do, is
the time model of `configure` (zagora_jax/planning/time_model.py), with the link put in place of that between cards.
Sites send one compressed update in every H steps and read those of all others, while they compute. No latency is
counted, which favours the synchronous strategies.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sharding.compression import message_bytes
from sharding.targets import GPUS
from zagora_jax.base import open_base
from zagora_jax.option_groups import LoraConfig
from zagora_jax.planning.candidates import train_config
from zagora_jax.planning.links import Link, find_link
from zagora_jax.planning.micro_batch import Work
from zagora_jax.planning.shapes import Shapes
from zagora_jax.planning.time_model import step_time

# TCP's data in a full Ethernet frame: 1,448 bytes of 1,538 with headers, preamble and gap (IEEE 802.3, RFC 7323).
ETHERNET = 1448 / 1538
MACHINES = (2, 8, 64, 512, 4096)
MICRO_BATCHES = 8


@dataclass(frozen=True)
class Line:
    """What joins a machine to the others, in bytes a second."""

    name: str
    up: float
    down: float


def lines(gpu: str) -> list[Line]:
    """The links, slowest first."""
    pcie = find_link("pcie4", GPUS[gpu], None).gpu_gb_s * 1e9
    return [
        # The world's averages of fixed broadband in Ookla's Speedtest Global Index of August 2020.
        Line("home: 44 Mb/s up, 84 down", 44.10e6 / 8, 84.33e6 / 8),
        Line("1 Gb Ethernet", 1e9 / 8 * ETHERNET, 1e9 / 8 * ETHERNET),
        Line("10 Gb Ethernet", 1e10 / 8 * ETHERNET, 1e10 / 8 * ETHERNET),
        Line("PCIe 4.0 through the host", pcie, pcie),
    ]


class Estimate:
    """Tokens a second of the ways to train one model together."""

    def __init__(self, model: str, gpu: str, tokens: int):
        base = open_base(f"synthetic:{model}", quantization="nf4", dtype="bfloat16", lora=LoraConfig())
        self.work, self.gpu, self.model, self.tokens = Work.of(Shapes(base)), GPUS[gpu], model, tokens
        self.layers = base.model.config.num_layers
        self.parameters = self.work.adapters * self.layers
        self.alone = self._step(lines(gpu)[-1], {})

    def _step(self, line: Line, options: dict, stages: int = 1) -> float:
        """Return the tokens a second of all devices."""
        common = {"model": f"synthetic:{self.model}", "sequence_length": self.tokens, "optimizer": "adamw_8bit"}
        common |= {"gradient_accumulation_steps": MICRO_BATCHES * stages, "mesh.data": 1, "mesh.fsdp": 1}
        link = Link(line.name, min(line.up, line.down) / 1e9, find_link("pcie4", self.gpu, None).host_gb_s)
        config = train_config(common | options)
        layers = [self.layers // stages] * stages
        return step_time(config, self.work, self.gpu, link, "cudnn", layers).tokens_per_second

    def rates(self, line: Line, machines: int) -> dict[str, float | None]:
        """Return the tokens a second by the way of training."""
        int8 = {"gradient_compression": "int8"}
        found: dict[str, float | None] = {
            "replicas": self._step(line, {"mesh.data": machines}),
            "replicas, int8": self._step(line, {"mesh.data": machines} | int8),
            "fsdp, int8": self._step(line, {"mesh.fsdp": machines} | int8),
        }
        fits = self.layers % machines == 0
        staged = {"strategy": "layerwise", "mesh.stage": machines}
        found["layerwise"] = self._step(line, staged, machines) if fits else None
        for every in (50, 500):
            found[f"sites, every {every}"] = self.sites(line, machines, every)
        return found

    def sites(self, line: Line, machines: int, every: int) -> float:
        """Sites with int4: what a round takes is the longer of its steps and its exchange."""
        size = message_bytes(self.parameters, "int4")
        steps = every * MICRO_BATCHES * self.tokens / self.alone
        exchange = size / line.up + (machines - 1) * size / line.down
        return machines * every * MICRO_BATCHES * self.tokens / max(steps, exchange)


def table(estimate: Estimate, gpu: str) -> Iterator[list[str]]:
    """Shares of the speed of as many machines that need no link.

    Marked is the way to choose: the first that is within 3 % of the fastest, since a synchronous step is worth more.
    """
    names = list(estimate.rates(lines(gpu)[0], 2))
    yield ["link", "machines", *names]
    for line in lines(gpu):
        for machines in MACHINES:
            rates = estimate.rates(line, machines)
            fastest = max(rate for rate in rates.values() if rate is not None)
            best = next(name for name, rate in rates.items() if rate is not None and rate > 0.97 * fastest)
            shares = {name: None if rate is None else rate / machines / estimate.alone for name, rate in rates.items()}
            marked = {name: "**" if name == best else "" for name in names}
            cells = ["" if one is None else f"{marked[name]}{one:.1%}{marked[name]}" for name, one in shares.items()]
            yield [line.name, f"{machines:,}", *cells]


def draw(estimate: Estimate, gpu: str, path: Path) -> None:
    """Draw the shares by the number of machines, a panel a link."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "sites"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 4, figsize=(13, 3.6), sharey=True)
    counts = [2**power for power in range(1, 13)]
    for panel, line in zip(panels, lines(gpu), strict=True):
        rates = [estimate.rates(line, count) for count in counts]
        for name in rates[0]:
            shares = [
                (count, rate / count / estimate.alone)
                for count, one in zip(counts, rates, strict=True)
                if (rate := one[name]) is not None
            ]
            panel.plot(*zip(*shares, strict=True), label=name, linestyle="-" if "sites" in name else "--")
        panel.set(xscale="log", title=line.name, xlabel="machines")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of the speed without a link")
    panels[2].legend(fontsize="small", loc="center right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--gpu", default="rtx4090")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    estimate = Estimate(options.model, options.gpu, options.sequence_length)
    size = message_bytes(estimate.parameters, "int4") / 1e6
    print(
        f"{options.model}, {options.gpu}: {estimate.parameters / 1e6:.1f} M trained parameters, {size:.1f} MB as int4;"
    )
    print(f"steps of {MICRO_BATCHES} x {estimate.tokens} tokens, {estimate.alone:,.0f} tokens/s on each machine")
    rows = list(table(estimate, options.gpu))
    print("\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]))
    if options.plot:
        draw(estimate, options.gpu, options.plot)


if __name__ == "__main__":
    main()
