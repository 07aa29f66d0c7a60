"""Measures how a checkpoint is loaded, against the storage that it lies on: rate, host memory, device memory.

    python benchmarks/loading.py --layers 16 --folder /path/on/the/disk

writes a bfloat16 checkpoint of full-size layers of Llama 3 70B (1.7 GB a layer, and 4.2 GB of embedding and head) in
Hugging Face's layout, and then measures, each in a process of its own and after the files have left the page cache:

- storage: the files read from end to end, by one thread and by as many as the loader has;
- load: onto the device, without the cache of quantised models; the first in the process, which compiles, and a second;
- first start: the same with the cache, which is written meanwhile;
- second start: read from the cache, out of the page cache and in it.

`--destination pinned` leaves all layers in pinned host memory, as for streaming. Peaks are above what is held in the
end.
Remove FOLDER afterwards; a second run uses the checkpoint in it again.
"""

import argparse
import concurrent.futures
import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from models.config import ModelConfig
from models.llama import Llama
from models.stream_order import stream_order
from sharding.mesh import make_mesh
from zagora_jax.base import BaseModel, open_base
from zagora_jax.checkpoints.checkpoint import plan_shards
from zagora_jax.checkpoints.load import expected_tensors
from zagora_jax.checkpoints.read_ahead import READERS
from zagora_jax.checkpoints.safetensors_writer import write_safetensors
from zagora_jax.checkpoints.synthetic import PREFIX, synthetic_config
from zagora_jax.distribution import Distribution

SHARD_BYTES = 5 * 10**9
BLOCK_BYTES = 16 * 2**20
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def write_model(folder: Path, name: str, layers: int) -> None:
    """Write a checkpoint of random weights, unless it is there."""
    if (folder / "config.json").exists():
        return
    config = synthetic_config(f"{PREFIX}{name}?layers={layers}")
    model = Llama(ModelConfig.from_hf(config), quantization="none", dtype=jnp.dtype(jnp.bfloat16))
    shapes = {name: tensor.shape for name, tensor in expected_tensors(model).items()}
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in shapes.items()}
    rng = np.random.default_rng(0)
    pool = (rng.standard_normal(2**25, np.float32) * 0.02).astype(BFLOAT16)

    def draw(name: str) -> np.ndarray:
        """Take a long stretch out of the pool again and again, from another place for every tensor."""
        return np.resize(np.roll(pool, int(rng.integers(len(pool)))), shapes[name])

    folder.mkdir(parents=True, exist_ok=True)
    placed = plan_shards(sizes, SHARD_BYTES)
    for file in sorted(set(placed.values())):
        specs = {name: (shapes[name], BFLOAT16) for name in placed if placed[name] == file}
        with (folder / file).open("wb") as opened:
            write_safetensors(opened, specs, draw, {"format": "pt"})
            os.fsync(opened.fileno())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(config))


def drop(folder: Path) -> None:
    """Have the files leave the page cache."""
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_plainly(folder: Path, readers: int) -> float:
    """Return the GB/s at which threads read the files, each thread one file after the other."""

    def read(path: Path) -> int:
        buffer, total = bytearray(BLOCK_BYTES), 0
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while count := file.readinto(buffer):
                total += count
        return total

    drop(folder)
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(readers) as pool:
        total = sum(pool.map(read, sorted(folder.glob("*.safetensors"))))
    return total / 1e9 / (time.perf_counter() - started)


def status(key: str) -> int:
    """Return a number of bytes that the kernel keeps of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def load(base: BaseModel, destination: str, said: list[str]) -> Any:
    """Load the model onto one device, or its layers into pinned memory of the host."""
    layers = base.model.config.num_layers
    order = stream_order(layers, layers) if destination == "pinned" else None
    distribution = Distribution(make_mesh({"fsdp": 1}, jax.devices()[:1]), base.model, stream=order)
    frozen = distribution.load(lambda place: base.load(destination=place, say=said.append))
    return jax.block_until_ready(frozen)


def measured(folder: Path, bytes_read: int, run: Callable[[], Any]) -> dict[str, float]:
    """Return seconds, rate and peaks of a load of files that were not in the page cache; memory in GiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # begins the high-water mark anew
    started = time.perf_counter()
    frozen = run()
    seconds = time.perf_counter() - started
    peak = status("VmHWM")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    leaves = jax.tree.leaves(frozen)
    found = {
        "seconds": seconds,
        "GB/s": bytes_read / 1e9 / seconds,
        "host peak above rest": (peak - status("VmRSS")) / 2**30,
        "held": sum(leaf.nbytes for leaf in leaves) / 2**30,
    }
    if stats := jax.devices()[0].memory_stats():
        found["device peak above rest"] = (stats["peak_bytes_in_use"] - stats["bytes_in_use"]) / 2**30
        found["device held"] = stats["bytes_in_use"] / 2**30
    return found


def child(arguments: argparse.Namespace) -> None:
    """Load in this process as `arguments.child` says, and print what was measured as JSON."""
    cache = None if arguments.child == "load" else arguments.folder / "cache"
    base = open_base(
        str(arguments.folder / "model"), quantization=arguments.quantization, dtype="bfloat16", lora=None,
        quantized_cache=cache,
    )  # fmt: skip
    model_bytes = sum(path.stat().st_size for path in (arguments.folder / "model").glob("*.safetensors"))
    largest = max(int(np.prod(tensor.shape)) for tensor in expected_tensors(base.model).values() if tensor.layer == 0)
    found, said = [], []
    for _ in range(2 if arguments.child == "load" else 1):
        if arguments.child != "second start, in the page cache":
            drop(arguments.folder)
        jax.block_until_ready(jnp.zeros(1))
        found.append(measured(arguments.folder, model_bytes, lambda: load(base, arguments.destination, said)))
    started = time.perf_counter()
    for thread in threading.enumerate():
        if thread.name.startswith("quantized-cache"):
            thread.join()
    waited = time.perf_counter() - started
    print(json.dumps({"found": found, "said": said, "still writing": waited, "two tensors": 4 * largest / 2**30}))


def run_child(arguments: argparse.Namespace, what: str) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{what}: ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--quantization", default="nf4")
    parser.add_argument("--destination", choices=("device", "pinned"), default="device")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    model = arguments.folder / "model"
    write_model(model, arguments.model, arguments.layers)
    shutil.rmtree(arguments.folder / "cache", ignore_errors=True)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    print(f"{arguments.model}, {arguments.layers} layers, {size / 1e9:.1f} GB in bfloat16, {arguments.quantization}")
    storage = {readers: read_plainly(model, readers) for readers in (1, READERS)}
    for readers, rate in storage.items():
        print(f"storage, {readers} threads: {rate:.2f} GB/s", flush=True)
    for what in ("load", "first start", "second start", "second start, in the page cache"):
        answer = run_child(arguments, what)
        for number, found in enumerate(answer["found"]):
            label = what if len(answer["found"]) == 1 else f"{what} {number + 1}"
            numbers = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
            ratio = "" if "second" in what else f", {found['GB/s'] / max(storage.values()):.0%} of the storage's rate"
            print(f"{label}: {numbers}{ratio}", flush=True)
        if what == "first start":
            print(f"  written to the cache {answer['still writing']:.1f} s after that")
        for line in answer["said"]:
            print(f"  {line}", flush=True)
    print(f"two tensors of a layer in bfloat16: {answer['two tensors']:.2f} GiB")


if __name__ == "__main__":
    main()
