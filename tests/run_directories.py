"""Run directories as training leaves them, without a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zagora_jax.run_directory import MetricsFile


def make_run(path: Path, steps: int = 0, total: int = 10, report: dict[str, Any] | None = None, **numbers: Any) -> Path:
    """A run of so many finished steps; `numbers` are in each of their lines."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("model: any\n")
    (path / "report.json").write_text(json.dumps({"total_steps": total, **(report or {})}))
    with MetricsFile(path / "metrics.jsonl", after_step=0) as file:
        for step in range(1, steps + 1):
            file.write({"step": step, "loss": 5.0 - step / 10, "seconds": 2.0, "tokens_per_second": 100.0} | numbers)
    return path
