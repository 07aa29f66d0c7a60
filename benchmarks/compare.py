"""Compares training runs, a subprocess a case: tokens/s, peak memory, and held-out loss where there is eval data.

    python benchmarks/compare.py --model synthetic:llama-3-8b --remat full attention --micro-batch-size 1 4
    python benchmarks/compare.py --model 'synthetic:smollm2-135m?layers=4' --sequence-length 256   # on a CPU
    python benchmarks/compare.py --model MODEL --data train.jsonl --eval-data heldout.jsonl --max-steps 200 \
        --strategy replicas --gradient-exchange synchronous delayed --gradient-compression none int8 int4

Options of `python -m zagora_jax.train` are given as there; several values of an option make a case of each combination,
and every case has all devices that its options leave it. Each case is a line of results/compare.jsonl beside this file,
and a row of the table printed at the end: the median over the steps after the warm-up, the allocator's peak, what the
compiler planned, and the last held-out loss in percent above the first case's.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "compare.jsonl"
WARMUP_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:llama-3-8b")
    parser.add_argument("--max-steps", type=int, default=12, help="steps a case, warm-up included")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--label", default="", help="written beside each result")
    known, options = parser.parse_known_args()
    cases = [{"model": known.model, "max-steps": known.max_steps, **case} for case in combinations(options)]
    known.results.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for number, case in enumerate(cases, start=1):
        results.append(result := measure(case, known.label))
        with known.results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{number} of {len(cases)}: {json.dumps(result)}", file=sys.stderr)
    print(table(with_differences(results)))


def combinations(arguments: list[str]) -> list[dict[str, str]]:
    """Every combination of the options' values: `--a 1 2 --b 3` is a case with a = 1 and one with a = 2."""
    values: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.startswith("--"):
            values[argument[2:]] = []
        else:
            values[list(values)[-1]].append(argument)
    return [dict(zip(values, case, strict=True)) for case in itertools.product(*values.values())]


def measure(case: dict[str, Any], label: str) -> dict[str, Any]:
    """Train in a process of its own, so that peaks and compilations of one case are not another's."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        arguments = [f"--{name}={value}" for name, value in {"gradient-accumulation-steps": 1, **case}.items()]
        command = [sys.executable, "-m", "zagora_jax.train", "--output", str(run), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return {"label": label, **case, "error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARMUP_STEPS:]
        report = json.loads((run / "report.json").read_text())
        losses = {
            name: round(report[name], 4) for name in ("loss_before", "loss_after") if report.get(name) is not None
        }
        return {
            "label": label,
            "devices": report["facts"]["devices"],
            "jax": report["versions"]["jax"],
            **case,
            "tokens_per_second": round(statistics.median(step["tokens_per_second"] for step in steps), 1),
            "step_ms": round(1000 * statistics.median(step["seconds"] for step in steps), 1),
            "peak_gib": round(steps[-1]["peak_memory_gib"], 2),
            "planned_gib": round(report["planned_memory_gib"], 2),
            **losses,
        }


def with_differences(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results, each with how far its last held-out loss is above the first one's where both have one."""
    first = results[0].get("loss_after")
    return [
        result | {"above_first": f"{100 * (result['loss_after'] / first - 1):+.2f} %"}
        if first and "loss_after" in result
        else result
        for result in results
    ]


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table, without the columns that say the same in every row."""
    names = list(dict.fromkeys(name for result in results for name in result))
    names = [name for name in names if len(results) == 1 or len({str(result.get(name)) for result in results}) > 1]
    rows = [names, ["---"] * len(names), *([str(result.get(name, "")) for name in names] for result in results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
