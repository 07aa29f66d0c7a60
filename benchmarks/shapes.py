"""Times steps of several shapes over weights that are loaded once: tokens/s, and planned and real memory.

    python benchmarks/shapes.py --model synthetic:llama-3-70b --optimizer adamw_8bit --offload.activations true \
        --offload.weights 74 --device-memory-limit 15 --shapes 4x2x2048 2x2x4096 1x2x8192
    python benchmarks/shapes.py --model 'synthetic:smollm2-135m?layers=4' --shapes 1x1x64 1x2x64   # on a CPU

A shape is rows a micro-batch x micro-batches x tokens a row. The other options are those of `python -m
zagora_jax.train`. Give shapes that need less memory first: the allocator's peak is that of the process so far.
"""

import argparse
import statistics
import time
from collections.abc import Iterator

import jax

from models.lora import initial_adapter
from models.parameters import split
from zagora_jax.arrange import arrange
from zagora_jax.base import open_base
from zagora_jax.command_line import parse
from zagora_jax.compaction import compact
from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import Batch
from zagora_jax.data.prepare import training_batches
from zagora_jax.devices import choose_mesh, limit_memory
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.planning import compile_planned
from zagora_jax.reporting.progress import Reporter
from zagora_jax.reporting.sensors import GIB, peak_memory_gib
from zagora_jax.train_state import initial_state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", required=True, metavar="MxAxS")
    parser.add_argument("--steps", type=int, default=3, help="of each shape; the first is not counted")
    known, options = parser.parse_known_args()
    config = parse(TrainConfig, [*options, "--max-steps", str(known.steps)])
    if config.device_memory_limit is not None:
        limit_memory(config.device_memory_limit)
    base = open_base(
        config.model, quantization=config.quantization, dtype=config.compute_dtype, lora=config.lora, seed=config.seed
    )
    mesh = choose_mesh(config)
    arrangement = arrange(config, base.model, mesh)
    started = time.perf_counter()
    frozen = arrangement.load(lambda destination: base.load(destination=destination))
    jax.block_until_ready(frozen)
    print(f"loaded in {time.perf_counter() - started:.1f} s", flush=True)
    schedule = make_schedule(config.schedule, config.learning_rate, config.warmup_steps, known.steps)
    optimizer = make_optimizer(config.optimizer, schedule, config.weight_decay)
    # Nothing but the result may stay on the device.
    state = initial_state(initial_adapter(split(base.model)[2], config.seed), optimizer, config.compute_dtype)
    state = arrangement.put_state(arrangement.begin(state))
    print("| micro-batch | micro-batches | tokens a row | tokens/s | step | planned | peak so far |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for shape in known.shapes:
        rows, micro_batches, tokens = map(int, shape.split("x"))
        update = {"micro_batch_size": rows, "gradient_accumulation_steps": micro_batches, "sequence_length": tokens}
        of_shape = config.model_copy(update=update)
        step = compile_planned(of_shape, mesh, base)
        frozen, state = compact((frozen, state), step.planned_memory())
        seconds = []
        for batch in batches(of_shape, base, arrangement.rows_divisor, known.steps):
            started = time.perf_counter()
            state, metrics = step(state, frozen, batch)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - started)
        median = statistics.median(seconds[1:])
        rate = rows * micro_batches * tokens * arrangement.rows_divisor / median
        planned = max(step.planned_memory().values()) / GIB
        print(
            f"| {rows} | {micro_batches} | {tokens:,} | {rate:,.0f} | {1e3 * median:,.0f} ms | {planned:.2f} GiB | "
            f"{peak_memory_gib():.2f} GiB |",
            flush=True,
        )


def batches(config: TrainConfig, base, rows_divisor: int, steps: int) -> Iterator[Batch]:
    """Random rows of full length."""
    iterator = training_batches(config, base, rows_divisor, Reporter()).from_step(0, steps)
    yield from (next(iterator) for _ in range(steps))


if __name__ == "__main__":
    main()
