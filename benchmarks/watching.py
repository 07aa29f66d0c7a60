"""Measures what it costs a training that its cards are read and that its report is written.

    python benchmarks/watching.py --model synthetic:llama-3-8b?layers=8 --sequence-length 512

takes the options of `python -m zagora_jax.train`. Runs of 60 steps, saved at every tenth, in turns without any of it,
with sensors, and with sensors and report.html. Without an NVIDIA driver the sensors are those of four cards that are
not there, whose reading takes as long as NVML takes for PCIe traffic, 40 ms each.
"""

import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from zagora_jax import trainer
from zagora_jax.command_line import parse
from zagora_jax.config import TrainConfig
from zagora_jax.reporting.card_watch import CardWatch
from zagora_jax.reporting.cards import Card, CardReading, Cards, NoCardsError
from zagora_jax.reporting.report_page import render_report
from zagora_jax.reporting.run_view import RunView

STEPS, SAVE_EVERY, ROUNDS, WARM = 60, 10, 3, 10
FAKE_CARDS = 4


class FakeCards:
    """Cards that are not there."""

    cards = tuple(Card(index, "none", 24.0, 450.0, 94.0) for index in range(FAKE_CARDS))

    def read(self) -> list[CardReading]:
        """Take as long as NVML does."""
        time.sleep(0.04 * FAKE_CARDS)
        return [CardReading(card.index, 20.0, 97.0, 65.0, 430.0, 1000.0, 500.0) for card in self.cards]


class NoCards:
    """What a run without cards sees."""

    def __init__(self) -> None:
        raise NoCardsError("none")


def measure(arguments: list[str]) -> dict[str, float]:
    """Return milliseconds: the median step of each kind of run, a reading, a page."""
    try:
        Cards()
        opened: type = Cards
    except NoCardsError:
        opened = FakeCards
    kinds = {"without": (NoCards, False), "sensors": (opened, False), "sensors_and_report": (opened, True)}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    of_runs: dict[str, float] = {}
    for _ in range(ROUNDS):
        for kind, (make, has_report) in kinds.items():
            with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
                config = parse(TrainConfig, [*arguments, "--output", str(Path(folder) / "run")])
                watch = lambda say, limit, make=make: CardWatch(say, limit, open_cards=make)  # noqa: E731
                patches.enter_context(patch.object(trainer, "CardWatch", watch))
                if not has_report:
                    patches.enter_context(patch.object(trainer, "attached", lambda *_: []))
                trainer.train(config)
                lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
                seconds[kind] += [line["seconds"] for line in lines[WARM:]]
                if has_report:
                    started = time.perf_counter()
                    page = render_report(RunView(config.output))
                    of_runs = {"page_ms": 1e3 * (time.perf_counter() - started), "page_kib": len(page) / 1024}
    started = time.perf_counter()
    readings = opened().read()
    of_runs["reading_ms"] = 1e3 * (time.perf_counter() - started)
    steps = {f"{kind}_step_ms": 1e3 * statistics.median(found) for kind, found in seconds.items()}
    return {"cards": len(readings), **steps, **of_runs}


def main() -> None:
    given = ["--max-steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--gradient-accumulation-steps", "1"]
    print(json.dumps({name: round(value, 2) for name, value in measure([*sys.argv[1:], *given]).items()}))


if __name__ == "__main__":
    main()
