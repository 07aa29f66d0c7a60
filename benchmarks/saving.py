"""Measures how long a save holds up training: the call that begins it, and the step after it.

    python benchmarks/saving.py --model synthetic:llama-3-8b?layers=8 --sequence-length 512

takes the options of `python -m zagora_jax.train`; a run of --steps (24) in a temporary directory, saved at every
fourth. A save that is due while the one before is still being written is put off: where steps are short, give so many
that several saves are begun.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from zagora_jax import trainer
from zagora_jax.command_line import parse
from zagora_jax.config import TrainConfig
from zagora_jax.saving import Saver

SAVE_EVERY = 4


def measure(config: TrainConfig) -> dict[str, float]:
    """Train as `config` says, and return milliseconds (and the state's MiB)."""
    assert config.max_steps is not None
    begin_to_save, calls = Saver.save, {}

    def timed(saver, state):
        started = time.perf_counter()
        begin_to_save(saver, state)
        calls[saver._saved] = 1e3 * (time.perf_counter() - started)

    with patch.object(Saver, "save", timed):
        trainer.train(config)
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    # Of the first steps, and of the last, whose save waits for the one before, nothing is counted.
    counted = range(SAVE_EVERY, config.max_steps)
    seconds = {line["step"]: 1e3 * line["seconds"] for line in lines if line["step"] - 1 in counted}
    after = [value for step, value in seconds.items() if step - 1 in calls]
    others = [value for step, value in seconds.items() if step - 1 not in calls]
    saves = [value for step, value in calls.items() if step in counted]
    if not after:
        sys.exit(f"no save was begun between steps {SAVE_EVERY} and {config.max_steps}: give more --steps")
    newest = max((config.output / "checkpoints").iterdir(), key=lambda path: int(path.name))
    return {
        "state_mib": sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()) / 2**20,
        "step_ms": statistics.median(others),
        "step_after_save_ms": statistics.median(after),
        "saves": len(saves),
        "put_off": sum("save_put_off" in line for line in lines),
        "call_ms": statistics.median(saves),
        "stall_ms": statistics.median(saves) + max(0.0, statistics.median(after) - statistics.median(others)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    known, options = parser.parse_known_args()
    given = ["--max-steps", str(known.steps), "--save-every", str(SAVE_EVERY), "--gradient-accumulation-steps", "1"]
    with tempfile.TemporaryDirectory() as folder:
        config = parse(TrainConfig, [*options, *given, "--output", str(Path(folder) / "run")])
        print(json.dumps({name: round(value, 1) for name, value in measure(config).items()}))


if __name__ == "__main__":
    main()
