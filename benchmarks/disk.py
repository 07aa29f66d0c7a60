"""Measures steps whose frozen layers are read from the disk, against the same step with the layers in host memory.

    python benchmarks/disk.py --folder FOLDER --shapes 4x2x2048 4x4x2048 --sources host disk 24 \
        --optimizer adamw_8bit --offload.activations true --device-memory-limit 23
    python benchmarks/disk.py --folder FOLDER --model smollm2-135m --layers 8 --shapes 1x2x64 --sources host disk

makes an entry of the cache of quantised models in FOLDER with random layers of full size (0.44 GB a layer of Llama 3
70B in NF4; the model's own file has a hole in their place), has it leave the page cache, and measures:

- disk: the entry's files read from end to end by as many threads as a run has;
- for each source, in a process of its own: steps of each shape, tokens/s, how long the device waited for the disk, GB a
  step from the disk, the rate at which that came, the losses, which must be equal, and what the process and its pinned
  memory held at most.

A shape is rows a micro-batch x micro-batches x tokens a row. A source is host, disk, or a number of layers that host
memory has room for (--offload.weights-from), or resident. The other options are those of `python -m zagora_jax.train`.
Remove FOLDER afterwards; a second run uses the entry in it again.
"""

import argparse
import json
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from loading import BFLOAT16, drop, read_plainly

from models.lora import initial_adapter
from models.parameters import split
from zagora_jax.arrange import arrange
from zagora_jax.base import BaseModel, open_base
from zagora_jax.checkpoints.cache_writer import write_layer
from zagora_jax.checkpoints.load import expected_tensors
from zagora_jax.checkpoints.quantized_cache import QuantizedCache
from zagora_jax.checkpoints.read_ahead import READERS
from zagora_jax.checkpoints.safetensors_writer import write_safetensors
from zagora_jax.checkpoints.synthetic import PREFIX, STANDARD_DEVIATION, synthetic_config
from zagora_jax.command_line import parse
from zagora_jax.compaction import compact
from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import Batch
from zagora_jax.devices import choose_mesh, limit_memory
from zagora_jax.distribution import Distribution
from zagora_jax.frozen_weights import load_weights
from zagora_jax.host_memory import allow_pinned_memory
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.option_groups import OffloadConfig
from zagora_jax.planning import compile_planned
from zagora_jax.reporting.sensors import GIB, peak_memory_gib
from zagora_jax.train_state import initial_state


def write_model(folder: Path, name: str, layers: int) -> None:
    """Write a checkpoint whose layers are a hole in its file: they are only ever read from the cache."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = synthetic_config(f"{PREFIX}{name}?layers={layers}")
    (folder / "config.json").write_text(json.dumps(config))
    tensors = declared(name, layers)
    rng = np.random.default_rng(0)

    def draw(name: str) -> np.ndarray:
        shape = tensors[name].shape
        if "norm" in name:
            return np.ones(shape, BFLOAT16)
        pool = (rng.standard_normal(2**24, np.float32) * STANDARD_DEVIATION).astype(BFLOAT16)
        return np.resize(pool, shape)

    own = {name: (tensor.shape, BFLOAT16) for name, tensor in tensors.items() if tensor.layer is None}
    with (folder / "model-1.safetensors").open("wb") as file:
        write_safetensors(file, own, draw, {"format": "pt"})
    header, end = {}, 0
    for tensor_name, tensor in tensors.items():
        if tensor.layer is not None:
            start, end = end, end + 2 * int(np.prod(tensor.shape))
            header[tensor_name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with (folder / "model-2.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    placed = {name: f"model-{1 if name in own else 2}.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def declared(name: str, layers: int) -> dict[str, Any]:
    """Return the tensors of the model."""
    base = open_base(f"{PREFIX}{name}?layers={layers}", quantization="none", dtype="bfloat16", lora=None)
    return expected_tensors(base.model)


def fill_cache(base: BaseModel) -> None:
    """Write the layers that are missing: random codes, scales of one magnitude."""
    assert base.checkpoint is not None
    assert base.quantized_cache is not None
    cache = QuantizedCache(base.quantized_cache, base.checkpoint, base.quantization, base.model, print)
    cache.folder.mkdir(parents=True, exist_ok=True)
    rng, drawn = np.random.default_rng(0), {}

    def draw(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        kind = name.rpartition(".")[2]
        if kind == "codes":
            return rng.integers(0, 256, shape, dtype)
        if kind == "absmax":
            return rng.integers(0, 2, shape, dtype) * dtype.type(255)  # close to -1 and 1
        return np.full(shape, {"nested_absmax": 0.04, "offset": 0}.get(kind, 1), dtype)

    started = time.perf_counter()
    for layer in sorted(cache.layers.keys() - cache.found.keys()):
        arrays = {}
        for form in cache.layers[layer].values():
            for name, array in form.arrays.items():
                key = name.split(".", 3)[3]  # without the layer's number
                if key not in drawn:
                    drawn[key] = draw(name, array.shape, np.dtype(array.dtype))
                arrays[name] = drawn[key]
        write_layer(cache, layer, arrays, {})
    print(f"{len(cache.layers)} layers in {cache.folder}, written in {time.perf_counter() - started:.1f} s", flush=True)


def opened(known: argparse.Namespace, config: TrainConfig) -> BaseModel:
    """Open the model with its cache."""
    return open_base(
        str(known.folder / "model"), quantization=config.quantization, dtype=config.compute_dtype, lora=config.lora,
        quantized_cache=known.folder / "cache",
    )  # fmt: skip


def batches(config: TrainConfig, vocabulary: int, rows_divisor: int, steps: int) -> Iterator[Batch]:
    """Random rows of full length, the same for every source."""
    rng = np.random.default_rng(1)
    shape = (config.gradient_accumulation_steps, config.micro_batch_size * rows_divisor, config.sequence_length)
    positions = np.broadcast_to(np.arange(shape[2], dtype=np.int32), shape)
    for _ in range(steps):
        tokens, targets = rng.integers(0, vocabulary, (2, *shape), np.int32)
        yield Batch(tokens, targets, np.ones(shape, np.float32), np.ones(shape, np.int32), positions)


def child(known: argparse.Namespace, options: list[str]) -> None:
    """Measure one source in this process."""
    streamed = ["--offload.weights", known.streamed, "--offload.weights-from", known.child]
    streamed = [] if known.child == "resident" else streamed
    config = parse(TrainConfig, ["--model", str(known.folder / "model"), *streamed, *options])
    if known.child == "resident":  # everything
        config = config.model_copy(update={"offload": OffloadConfig(), "device_memory_limit": None})
    allow_pinned_memory(config)
    if config.device_memory_limit is not None:
        limit_memory(config.device_memory_limit)
    base, mesh = opened(known, config), choose_mesh(config)
    drop(known.folder)
    started = time.perf_counter()
    arrangement = arrange(config, base.model, mesh)
    assert isinstance(arrangement, Distribution)
    frozen = load_weights(base, arrangement, lambda _: None, lambda _: None)
    jax.block_until_ready(frozen)
    print(f"{known.child}: loaded in {time.perf_counter() - started:.1f} s", flush=True)
    schedule = make_schedule(config.schedule, config.learning_rate, config.warmup_steps, known.steps)
    optimizer = make_optimizer(config.optimizer, schedule, config.weight_decay)
    state = initial_state(initial_adapter(split(base.model)[2], config.seed), optimizer, config.compute_dtype)
    state = arrangement.put_state(arrangement.begin(state))
    feed = arrangement.feed
    layer_bytes = 0 if arrangement.waiting is None else arrangement.waiting.device_bytes * mesh.shape["fsdp"]
    for shape in known.shapes:
        rows, times, length = map(int, shape.split("x"))
        update = {"micro_batch_size": rows, "gradient_accumulation_steps": times, "sequence_length": length}
        of_shape = config.model_copy(update=update)
        # The program that reads layers belongs to the arrangement whose feed is open.
        step = compile_planned(of_shape, mesh, base, arrangement)
        frozen, state = compact((frozen, state), step.planned_memory())
        vocabulary, losses = base.model.config.vocab_size, []
        for batch in batches(of_shape, vocabulary, arrangement.rows_divisor, known.steps):
            read, started = feed.layers_read if feed else 0, time.perf_counter()
            state, metrics = step(state, frozen, batch)
            losses.append(float(metrics["loss"]))
            seconds = time.perf_counter() - started
            read = (feed.layers_read if feed else 0) - read
            gigabytes = read * layer_bytes / 1e9
            tokens = rows * times * length * arrangement.rows_divisor
            wait = f", waited {metrics['disk_wait_seconds']:.2f} s for the disk" if feed else ""
            print(
                f"{known.child} {shape}: {tokens / seconds:,.1f} tokens/s, {seconds:.2f} s{wait}, {read} layers read, "
                f"{gigabytes:.1f} GB, {gigabytes / seconds:.2f} GB/s, loss {losses[-1]:.6f}",
                flush=True,
            )
    if feed is not None:
        feed.close()
    planned = max(step.planned_memory().values()) / GIB
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    pinned = max(step.planned_host_memory().values()) / GIB
    print(f"{known.child}: {held:.1f} GiB of host memory at most, {pinned:.1f} pinned by the last step, "
          f"{peak_memory_gib() or 0:.2f} GiB on the device, planned {planned:.2f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--shapes", nargs="+", required=True, metavar="MxAxS")
    parser.add_argument("--sources", nargs="+", default=["host", "disk"])
    parser.add_argument("--steps", type=int, default=3, help="of each shape; the first one warms up")
    parser.add_argument("--streamed", default="all", help="layers that are streamed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    known, options = parser.parse_known_args()
    if known.child == "prepare":
        write_model(known.folder / "model", known.model, known.layers)
        fill_cache(opened(known, parse(TrainConfig, ["--model", str(known.folder / "model"), *options])))
        return
    if known.child:
        child(known, options)
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    subprocess.run([*command, "prepare"], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    (entry,) = (known.folder / "cache").iterdir()
    drop(known.folder)
    rate = read_plainly(entry, READERS)
    size = sum(path.stat().st_size for path in entry.glob("*.safetensors")) / 1e9
    print(f"disk: {size:.1f} GB of layers at {rate:.2f} GB/s by {READERS} threads: twice in {2 * size / rate:.1f} s",
          flush=True)  # fmt: skip
    for source in known.sources:
        subprocess.run([*command, source], check=True)


if __name__ == "__main__":
    main()
