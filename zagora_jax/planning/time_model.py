"""How long a train step takes.

    step = micro-batches x (passes over the layers + output head) + gradient exchange + update

See `zagora_jax.planning.micro_batch` for what is counted, and where the constants come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sharding.compression import wire_bytes
from sharding.schedule import simulate
from sharding.targets import Gpu
from zagora_jax.config import TrainConfig
from zagora_jax.planning.links import Link
from zagora_jax.planning.micro_batch import HIDDEN, MicroBatch, Work
from zagora_jax.planning.shapes import mesh_shape
from zagora_jax.streaming import streamed_of_stages


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, and how many tokens it has over all devices.

    Attributes:
        products: arithmetic of matrix products and attention.
        traffic: reading and writing device memory beside them: dequantisation, element-wise work, the update.
        waiting: for transfers that are not hidden, and for other stages.
        tokens: padding included.
    """

    products: float
    traffic: float
    waiting: float
    tokens: int

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.products + self.traffic + self.waiting

    @property
    def tokens_per_second(self) -> float:
        """Over all devices."""
        return self.tokens / self.seconds


def step_time(
    config: TrainConfig,
    work: Work,
    gpu: Gpu,
    link: Link,
    kernel: str,
    layers: Sequence[int],
    *,
    one_program: bool = False,
) -> StepTime:
    """Estimate one optimizer step.

    Args:
        config: with every mesh axis given.
        work: of its model.
        gpu: the card.
        link: between cards, and to the host.
        kernel: of attention, as `models.attention.choose_kernel` names it.
        layers: of each stage; all of them in one where there are no stages.
        one_program: whether equal stages share one, see `sharding.lockstep`.
    """
    mesh, times = mesh_shape(config), config.gradient_accumulation_steps
    batch = MicroBatch(config, work, gpu, link, kernel)
    tokens = batch.tokens * times * mesh["data"] * mesh["fsdp"]
    shards = mesh["fsdp"] * mesh["tensor"]
    trained = work.adapters * max(layers) + work.tables.elements
    update = 40 * trained / shards / batch.bandwidth  # parameters, gradients and moments
    waiting = work.moment_bytes(config) * max(layers) / shards / (link.host_gb_s * 1e9)
    waiting += exchanged_bytes(config, work, mesh) / (link.gpu_gb_s * 1e9)
    if len(layers) == 1:
        products, traffic = batch.products + batch.head, batch.traffic + batch.head_traffic
        return StepTime(products * times, traffic * times + update, batch.waiting(times) + waiting, tokens)
    if one_program:
        return _in_one_program(batch, len(layers), update, waiting)
    stages = _Stages(batch, layers, streamed_of_stages(config.streamed_weights, layers))
    products, traffic = stages.products * times / len(layers), stages.traffic * times / len(layers)
    return StepTime(products, traffic + update, stages.seconds - products - traffic + waiting, tokens)


def _in_one_program(batch: MicroBatch, stages: int, update: float, waiting: float) -> StepTime:
    """Of equal stages, which wait in every tick for each other."""
    times, mesh = batch.config.gradient_accumulation_steps, mesh_shape(batch.config)
    again = batch.config.planned_remat == "stage"  # a forward pass, as a whole
    products = batch.products + again * batch.forward_products
    traffic = batch.traffic + again * batch.forward_traffic
    of_tick = (products + traffic) / stages
    # The last stage's result goes to all, whose terms of its gradient are summed: float32.
    size = (2 + 4) * batch.tokens * batch.work.shapes.hidden_size
    shared = 2 * (stages - 1) / stages * size / (batch.link.gpu_gb_s * 1e9)
    return StepTime(
        (products + batch.head) * times / stages,
        (traffic + batch.head_traffic) * times / stages + update,
        (stages - 1) * of_tick + times * shared + waiting,
        batch.tokens * times * mesh["data"] * mesh["fsdp"],
    )


@dataclass(frozen=True)
class _Stages:
    """The tasks of stages that pass micro-batches on, in seconds.

    A stage before the last computes a forward pass in its forward task, and again in its backward task, unless the
    forward task has kept something of its layers. The last stage has both passes in one task. Streamed layers come for
    every task anew, and hide under that task alone.

    Attributes:
        batch: a micro-batch, through all stages.
        layers: of each stage.
        streamed: those of them that wait in host memory.
    """

    batch: MicroBatch
    layers: Sequence[int]
    streamed: Sequence[int]

    @property
    def seconds(self) -> float:
        """Of an optimizer step, but for exchange and update."""
        batch, stages = self.batch, range(len(self.layers))
        sent = 2 * batch.tokens * batch.work.shapes.hidden_size / (batch.link.gpu_gb_s * 1e9)
        forward, backward = [self._forward(stage) for stage in stages], [self._backward(stage) for stage in stages]
        return simulate(forward, backward, batch.config.gradient_accumulation_steps, transfer=sent).seconds

    @property
    def products(self) -> float:
        """Of a micro-batch, in all stages."""
        return self.batch.products + self._again * self.batch.forward_products + self.batch.head

    @property
    def traffic(self) -> float:
        """The same of memory traffic."""
        return self.batch.traffic + self._again * self.batch.forward_traffic + self.batch.head_traffic

    def _forward(self, stage: int) -> float:
        """Of a stage's forward task; what the last stage waits for is counted with its backward pass."""
        seconds, (codes, inputs) = self._share(stage) * self._pass, self._copies(stage)
        if self._is_last(stage):
            return seconds
        return seconds + max(0.0, max(codes, inputs if self._keeps(stage) else 0) - HIDDEN * seconds)

    def _backward(self, stage: int) -> float:
        batch, (codes, inputs) = self.batch, self._copies(stage)
        busy = self._share(stage) * (batch.products + batch.traffic)
        if self._is_last(stage):
            waiting = max(0.0, 2 * (codes + inputs) - HIDDEN * busy)
            return busy - self._forward(stage) + batch.head + batch.head_traffic + waiting
        if self._keeps(stage):
            seconds = busy - self._share(stage) * self._pass
            return seconds + max(0.0, codes + inputs - HIDDEN * seconds)
        return busy + max(0.0, 2 * (codes + inputs) - HIDDEN * busy)

    @property
    def _pass(self) -> float:
        return self.batch.forward_products + self.batch.forward_traffic

    @property
    def _again(self) -> float:
        """The part of all layers whose forward pass is computed in two tasks."""
        return sum(self._share(stage) for stage in range(len(self.layers) - 1) if not self._keeps(stage))

    def _keeps(self, stage: int) -> bool:
        config = self.batch.config
        return config.offload.activations if self.streamed[stage] else config.planned_remat != "stage"

    def _is_last(self, stage: int) -> bool:
        return stage == len(self.layers) - 1

    def _share(self, stage: int) -> float:
        return self.layers[stage] / sum(self.layers)

    def _copies(self, stage: int) -> tuple[float, float]:
        """Return how long the stage's streamed layers take from the host, and its layers' inputs."""
        batch, rate = self.batch, self.batch.link.host_gb_s * 1e9
        return self.streamed[stage] * batch.layer_bytes / rate, self.layers[stage] * batch.offloaded_bytes / rate


def exchanged_bytes(config: TrainConfig, work: Work, mesh: dict[str, int]) -> float:
    """Return the bytes of gradients that a device sends in a step.

    Devices that share the words of a trained table sum no gradients of it: each has those of its own words.
    """
    elements, shards, replicas = work.adapters * work.shapes.num_layers, mesh["fsdp"] * mesh["tensor"], mesh["data"]
    compression = config.gradient_compression
    times = 1 if config.streamed_weights != "none" else config.gradient_accumulation_steps
    sent = times * wire_bytes(elements, shards, compression, "reduce_scatter") if shards > 1 else 0
    of_replica = (elements + work.tables.elements) // shards
    return sent + (wire_bytes(of_replica, replicas, compression) if replicas > 1 else 0)
