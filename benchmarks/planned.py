"""Compares plans with runs on GPUs: planned memory with the allocator's peak, predicted tokens/s with measured ones.

    python benchmarks/planned.py                                     # one GPU, all settings
    python benchmarks/planned.py --gpus 2                            # the settings of two
    python benchmarks/planned.py --only full int8 half               # those whose names contain one of these
    python benchmarks/planned.py --model 'synthetic:smollm2-135m?layers=2' --sequence-length 128   # on a CPU, a trial

Each setting trains a few steps in a process of its own. "planned" is what XLA planned for the step on these devices,
"estimated" the analytic estimate without a compiler; both are compared with the allocator's peak. The time model gets
the vendor's figures of the GPU, and links as they are measured first. Results are also lines of results/planned.jsonl.
A CPU has no such figures, and no allocator that tells a peak: there, plan and estimate alone stand side by side.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import psutil
from compare import measure, table

from sharding.targets import gpu as find_gpu
from zagora_jax.base import open_base
from zagora_jax.option_groups import LoraConfig
from zagora_jax.planning.candidates import Candidate, train_config
from zagora_jax.planning.evaluate import Evaluator
from zagora_jax.planning.links import Link
from zagora_jax.planning.machine import Machine
from zagora_jax.planning.model import PlannedModel

RESULTS = Path(__file__).parent / "results" / "planned.jsonl"
Settings = dict[str, Any]

ONE: Settings = {"mesh.data": 1, "mesh.fsdp": 1, "remat": "full"}
STAGES: Settings = {"strategy": "layerwise", "remat": "full", "gradient_accumulation_steps": 8}
WAITING: Settings = {"offload.activations": True}
CASES: dict[int, dict[str, Settings]] = {
    1: {
        "full": ONE,
        "attention": ONE | {"remat": "attention"},
        "mlp": ONE | {"remat": "mlp"},
        "none": ONE | {"remat": "none"},
        "offload.activations": ONE | WAITING,
        "offload.optimizer": ONE | {"offload.optimizer": True},
        "embeddings int8": ONE | {"embeddings": "int8"},
        "embeddings nf4, 4 rows": ONE | {"embeddings": "nf4", "micro_batch_size": 4},
        "4 rows": ONE | {"micro_batch_size": 4},
        "4 rows, attention, 8-bit": ONE | {"micro_batch_size": 4, "remat": "attention", "optimizer": "adamw_8bit"},
        "streaming all": ONE | {"offload.weights": "all"},
        "streaming half, offload.activations, 8-bit": ONE
        | WAITING
        | {"offload.weights": "half", "gradient_accumulation_steps": 4, "optimizer": "adamw_8bit"},
        "streaming all, 4 x 4 rows": ONE
        | WAITING
        | {"offload.weights": "all", "micro_batch_size": 4, "gradient_accumulation_steps": 4},
    },
    2: {
        "fsdp": {"mesh.data": 1, "mesh.fsdp": 2, "remat": "full"},
        "fsdp, attention": {"mesh.data": 1, "mesh.fsdp": 2, "remat": "attention"},
        "replicas": {"mesh.data": 2, "mesh.fsdp": 1, "remat": "full"},
        "tensor": {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 2, "remat": "full"},
        "fsdp, streaming all": {"mesh.data": 1, "mesh.fsdp": 2, "offload.weights": "all"},
        "layerwise, one program": STAGES | {"mesh.stage": 2, "stage_form": "one-jit"},
        "layerwise, programs": STAGES | {"mesh.stage": 2, "stage_form": "programs"},
    },
}

PROBE = """
import json, math, jax
from zagora_jax.planning.probe import gpu_gb_s, host_gb_s
devices = jax.devices()
found = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
if found["platform"] != "cpu":
    found |= {"host": host_gb_s(devices[0]), "between": gpu_gb_s(devices) if len(devices) > 1 else math.inf}
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:llama-3-8b?layers=8")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--max-steps", type=int, default=8, help="steps a setting, three of warm-up included")
    parser.add_argument("--gpus", type=int, choices=CASES, default=1)
    parser.add_argument("--only", nargs="+", default=[""], help="settings whose names contain one of these")
    arguments = parser.parse_args()
    machine = probe(arguments.gpus)
    jax.config.update("jax_platforms", "cpu")  # this process only reckons: the GPUs are for those that it starts
    base = open_base(arguments.model, quantization="nf4", dtype="bfloat16", lora=LoraConfig(), seed=0)
    evaluator = Evaluator(
        PlannedModel(base, arguments.model, arguments.model, LoraConfig()), machine, "analytic", print
    )
    results = []
    RESULTS.parent.mkdir(exist_ok=True)
    for name, settings in CASES[arguments.gpus].items():
        if any(part in name for part in arguments.only):
            common = {"sequence_length": arguments.sequence_length, "gradient_accumulation_steps": 1}
            results.append(compare(name, common | settings, evaluator, arguments.max_steps))
            print(json.dumps(results[-1]), flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
    print(table(results))


def probe(count: int) -> Machine:
    """Describe the GPUs of this machine, from a process of its own."""
    found = subprocess.run([sys.executable, "-c", PROBE], stdout=subprocess.PIPE, text=True)
    if found.returncode:
        sys.exit("error: the GPUs of this machine could not be measured")
    measured = json.loads(found.stdout.splitlines()[-1])
    if measured["count"] < count:
        sys.exit(f"error: --gpus {count}: this machine has {measured['count']}")
    if measured["platform"] == "cpu":
        return Machine("CPU", count, psutil.virtual_memory().total, None, None, None, tuple(jax.devices("cpu")[:count]))
    gpu = find_gpu(measured["kind"])
    link = Link("measured", measured["between"], measured["host"], measured=True)
    between = f", device to device {link.gpu_gb_s:.1f}" if count > 1 else ""
    print(f"{count} x {gpu.name}; GB/s: host to device {link.host_gb_s:.1f}{between}")
    return Machine(gpu.name, count, gpu.memory_bytes, gpu, link, None)


def compare(name: str, settings: Settings, evaluator: Evaluator, steps: int) -> Settings:
    """Train with these settings, and put beside it what was foretold."""
    model = evaluator.model.base
    if settings.get("offload.weights") == "half":
        settings = settings | {"offload.weights": model.model.config.num_layers // 2}
    config = train_config({"model": model.name, **settings})
    foretold = evaluator.estimate(Candidate(name, settings, config))
    flags = {key.replace("_", "-"): str(value).lower() for key, value in settings.items()}
    found = measure({"model": evaluator.model.train_name, "max-steps": steps, **flags}, name)
    if "error" in found:
        return {"settings": name, "error": found["error"]}
    estimated, predicted = foretold.memory.peak / 2**30, foretold.tokens_per_second
    # A CPU tells the process's resident memory, which is something else.
    peak = None if evaluator.machine.gpu is None else found["peak_gib"]
    return {
        "settings": name,
        "peak GiB": peak,
        "planned": found["planned_gib"],
        "off by": _off(found["planned_gib"], peak),
        "estimated": round(estimated, 2),
        "estimate off by": _off(estimated, peak or found["planned_gib"]),
        "tokens/s": found["tokens_per_second"],
        "predicted": None if predicted is None else round(predicted),
        "prediction off by": _off(predicted, found["tokens_per_second"]),
        "devices": found["devices"],
        "jax": found["jax"],
    }


def _off(foretold: float | None, found: float | None) -> str | None:
    """Say by how much of what was found a forecast is too high."""
    return None if foretold is None or found is None else f"{foretold / found - 1:+.1%}"


if __name__ == "__main__":
    main()
