"""Prints what stages of a pipeline idle, and where layerwise is faster than fsdp. Needs no GPU.

    JAX_PLATFORMS=cpu python benchmarks/layerwise.py bubble            # predicted, and measured on simulated devices
    JAX_PLATFORMS=cpu python benchmarks/layerwise.py links             # tokens/s by the time model of configure

`bubble` runs both forms of stages on simulated devices whose tasks sleep. Stages with a program each: the order, the
bound on queues and the clock are those of training, which writes its own idle share to metrics.jsonl. Equal stages in
one program: the loop is that of training, and what a step takes beyond its tasks counts as idle. `links` compares
estimates; fsdp gives every card rows of its own, so that its number of micro-batches does not matter.
"""

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from sharding import lockstep
from sharding.balance import choose_cut
from sharding.schedule import Task, dispatch_order, producer, simulate
from sharding.targets import GPUS
from sharding.watch import Watch
from zagora_jax.base import open_base
from zagora_jax.calibration import estimated_costs
from zagora_jax.option_groups import LoraConfig
from zagora_jax.pipeline_step import MOST_QUEUED, idle_share
from zagora_jax.planning.candidates import train_config
from zagora_jax.planning.links import find_link
from zagora_jax.planning.micro_batch import Work
from zagora_jax.planning.shapes import Shapes
from zagora_jax.planning.time_model import step_time

FORWARD, BACKWARD = 0.2, 0.4  # seconds that a task sleeps: long, so that a busy machine disturbs little
MOST_STAGES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["bubble", "links"])
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--gpu", default="rtx4090")
    parser.add_argument("--sequence-length", type=int, default=2048)
    options = parser.parse_args()
    if options.table == "bubble":
        jax.config.update("jax_num_cpu_devices", MOST_STAGES)
        rows = list(bubbles())
    else:
        rows = list(links(options.model, options.gpu, options.sequence_length))
    print("\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]))


def bubbles() -> Iterator[list[str]]:
    """Idle shares of equal stages by their number and that of micro-batches."""
    yield ["stages", "micro-batches", "programs: predicted", "measured", "one-jit: predicted", "measured"]
    for stages in (2, 4, 8):
        for micro_batches in (1, 4, 8, 16):
            predicted = simulate([FORWARD] * stages, [BACKWARD] * stages, micro_batches).idle
            shares = [predicted, measured(stages, micro_batches)]
            shares += [lockstep.idle_share(stages, micro_batches), measured_in_one_program(stages, micro_batches)]
            yield [str(stages), str(micro_batches), *(f"{share:.1%}" for share in shares)]


class Sleeper(ThreadPoolExecutor):
    """A device in simulation: runs what it is given in order, each task when its input is there."""

    def __init__(self):
        super().__init__(max_workers=1)

    def dispatch(self, seconds: float, x: "Result | None") -> "Result":
        def task() -> None:
            if x is not None:
                x.block_until_ready()
            time.sleep(seconds)

        return Result(self.submit(task))


@dataclass(frozen=True)
class Result:
    """What a task will give; all that a Watch asks of an array."""

    future: Future

    def block_until_ready(self) -> None:
        self.future.result()


def measured(stages: int, micro_batches: int) -> float:
    """Run the schedule on devices that sleep, watched as in training."""
    devices = [Sleeper() for _ in range(stages)]
    watches = [Watch(MOST_QUEUED) for _ in devices]
    done: dict[Task | None, Result | None] = {None: None}
    for task in dispatch_order(stages, micro_batches):
        seconds = FORWARD if task.kind == "forward" else BACKWARD
        seconds += FORWARD if task.stage == stages - 1 else 0
        x = done[producer(task, stages)]
        watches[task.stage].wait_for_place()
        done[task] = devices[task.stage].dispatch(seconds, x)
        watches[task.stage].dispatched(task.kind, x, done[task])
    work = [watch.take() for watch in watches]
    for watch in watches:
        watch.close()
    return idle_share(work)


def measured_in_one_program(stages: int, micro_batches: int) -> float:
    """Run the loop of equal stages on CPU devices that sleep."""

    def asleep(x: jax.Array, seconds: float) -> jax.Array:
        def sleep(x: jax.Array) -> jax.Array:
            time.sleep(seconds)
            return x

        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def layers(weight: jax.Array, x: jax.Array) -> jax.Array:
        return weight * asleep(x, FORWARD)

    def backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight, x = kept
        gradient = asleep(gradient, BACKWARD)
        return x * gradient, weight * gradient

    layers.defvjp(lambda weight, x: (weight * x, (weight, x)), backward)
    functions = lockstep.StageFunctions(
        lambda micro_batch: jnp.ones(8) * micro_batch, lambda weight, x, _: layers(weight, x), lambda y, _: y.sum()
    )

    def step(weight: jax.Array) -> jax.Array:
        return lockstep.pipeline_gradients(functions, weight, micro_batches, jnp.float32(1))[0]

    of_stage = PartitionSpec(lockstep.AXIS)
    mesh = Mesh(jax.devices()[:stages], (lockstep.AXIS,))
    compiled = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=of_stage, out_specs=of_stage, check_vma=False))
    weights = jnp.ones((stages * 8,))
    compiled(weights).block_until_ready()
    started = time.perf_counter()
    compiled(weights).block_until_ready()
    return 1 - micro_batches * (FORWARD + BACKWARD) / (time.perf_counter() - started)


def links(model: str, gpu: str, tokens: int) -> Iterator[list[str]]:
    """Estimated tokens/s of both strategies, over links and micro-batches."""
    base = open_base(f"synthetic:{model}", quantization="nf4", dtype="bfloat16", lora=LoraConfig())
    work = Work.of(Shapes(base))
    yield ["cards", "link", "micro-batches", "fsdp tok/s", "layerwise: programs", "one-jit", "faster"]
    slow, fast = ("pcie3-x4", False), ("pcie4-x16", True)
    for count in (2, 4):
        for name, peer_to_peer in (slow, fast):
            link = find_link(name, GPUS[gpu], peer_to_peer)
            for micro_batches in (1, 4, 16):
                common = {
                    "model": f"synthetic:{model}",
                    "sequence_length": tokens,
                    "mesh.data": 1,
                    "remat": "full",
                    "optimizer": "adamw_8bit",
                }
                # As many tokens a step: fsdp gives every card rows of its own, layerwise shares each row.
                spread = common | {"mesh.fsdp": count, "gradient_accumulation_steps": max(1, micro_batches // count)}
                staged = common | {
                    "strategy": "layerwise",
                    "mesh.stage": count,
                    "gradient_accumulation_steps": micro_batches,
                }
                layers = work.shapes.num_layers
                cut = choose_cut(estimated_costs(base.model.config, count), layers)
                forms = [(spread, [layers], False), (staged, cut, False)]
                forms += [(staged, [layers // count] * count, True)] if layers % count == 0 else []
                times = [
                    step_time(
                        train_config(settings), work, GPUS[gpu], link, "cudnn", stages, one_program=one_program
                    ).tokens_per_second
                    for settings, stages, one_program in forms
                ]
                faster = ("fsdp", "programs", "one-jit")[times.index(max(times))]
                yield (
                    [str(count), f"{link.name}, {link.gpu_gb_s:.1f} GB/s", str(micro_batches)]
                    + [f"{rate:,.0f}" for rate in times]
                    + [faster]
                )


if __name__ == "__main__":
    main()
