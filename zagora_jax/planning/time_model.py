"""How long a train step takes: arithmetic, memory traffic and what travels, from the vendor's figures of the cards.

    step = micro-batches x (passes over the layers + output head) + gradient exchange + update

A pass takes its arithmetic and memory traffic one after the other, and hides what travels under them, as far as it can:
gathered weights, layer inputs that wait in host memory, and layers that are streamed from there, twice a step however
many micro-batches there are. Sums of activations, between devices that compute a layer together, hide under nothing.
The layers' products count 2 operations a weight and token forwards, 2 backwards (the frozen weights have no gradient),
and 2 for what the backward pass computes again. The constants below stand for what the figures leave out. They were
fitted to the runs in benchmarks/README.md (H200), and to Answer.AI's published runs of another trainer for GeForce and
RTX A5000 cards (see docs/configure.md); those of other cards are by analogy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from models.config import ModelConfig
from models.llama import linear_modules
from sharding.compression import wire_bytes
from sharding.schedule import simulate
from sharding.targets import Gpu
from zagora_jax.config import TrainConfig
from zagora_jax.planning.links import Link
from zagora_jax.planning.shapes import Shapes, mesh_shape

# Part of the published bfloat16 rate that large matrix products sustain. GeForce cards come close, since theirs is
# half of what the chip could do; workstation and data-centre cards are held back by their power limits.
SUSTAINED = {"rtx": 0.8, "a4": 0.5, "a5": 0.5, "a6": 0.5, "l4": 0.4, "l40s": 0.6, "a100": 0.8, "h": 0.7}
ATTENTION = {"cudnn": 0.5, "chunked": 0.2, "reference": 0.1}  # of the sustained rate
BANDWIDTH = 0.85  # of the published memory bandwidth
HIDDEN = 0.85  # of the computing time that transfers can hide under
GATHERS, LATENCY = 25, 20e-6  # a layer and pass: exchanges of codes, scales and adapters; seconds to start one
ADAPTER_GATHERS = 14  # the same of adapters alone
BYTES_A_WIDTH, BYTES_AN_INTERMEDIATE = 48, 20  # read and written by element-wise work, a token, layer and pass


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


@dataclass(frozen=True)
class Work:
    """What of a model decides how long it takes: numbers of weights of one layer, and widths."""

    shapes: ModelConfig
    weights: int  # of the linear modules
    down: int  # of the last one, whose result the backward pass does without
    adapters: int
    weight_bytes: float  # stored, a weight

    @classmethod
    def of(cls, shapes: Shapes) -> "Work":
        """Measure a declared model."""
        model = shapes.base.model
        sizes = {path: module.in_features * module.out_features for path, module in linear_modules(model).items()}
        weights = sum(sizes.values())
        down = next(size for path, size in sizes.items() if path.endswith("down_proj"))
        return cls(model.config, weights, down, shapes.layer_adapter_elements, shapes.layer_weight_bytes / weights)


def sustained(gpu: Gpu) -> float:
    """Return the operations a second that large products reach."""
    prefix = max((prefix for prefix in SUSTAINED if gpu.kind.startswith(prefix)), key=len)
    return gpu.bf16_tflop_s * 1e12 * SUSTAINED[prefix]


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
    update = 40 * work.adapters * max(layers) / shards / batch.bandwidth  # parameters, gradients and moments
    exchanged = _exchanged(config, work, mesh) / (link.gpu_gb_s * 1e9)
    if len(layers) == 1:
        products, traffic = (batch.products + batch.head) * times, batch.traffic * times + update
        return StepTime(products, traffic, batch.waiting(times) + exchanged, tokens)
    if one_program:
        stages = len(layers)
        of_tick = (batch.products + batch.traffic) / stages
        # The last stage's result goes to all, whose terms of its gradient are summed: float32.
        shared = 2 * (stages - 1) / stages * (2 + 4) * batch.tokens * work.shapes.hidden_size / (link.gpu_gb_s * 1e9)
        products, traffic = (batch.products + batch.head) * times / stages, batch.traffic * times / stages + update
        return StepTime(products, traffic, (stages - 1) * of_tick + times * shared + exchanged, tokens)
    # A stage's forward task is one pass of its layers; its backward task computes that again, and the rest.
    shares = [count / sum(layers) for count in layers]
    busy, forward = batch.products + batch.traffic, 1 / (2 + batch.again)
    backward = [share * busy * (1 - forward) + (batch.head if index == len(layers) - 1 else 0)
                for index, share in enumerate(shares)]  # fmt: skip
    sent = 2 * batch.tokens * work.shapes.hidden_size / (link.gpu_gb_s * 1e9)
    timeline = simulate([share * busy * forward for share in shares], backward, times, transfer=sent)
    products = (batch.products + batch.head) * times / len(layers)
    traffic = batch.traffic * times / len(layers) + update
    return StepTime(products, traffic, timeline.seconds + update - products - traffic + exchanged, tokens)


@dataclass(frozen=True)
class MicroBatch:
    """Seconds of one micro-batch on a device, or through all stages."""

    config: TrainConfig
    work: Work
    gpu: Gpu
    link: Link
    kernel: str

    @property
    def tokens(self) -> int:
        """Of a device."""
        return self.config.micro_batch_size * self.config.sequence_length

    @property
    def parts(self) -> int:
        """Devices that compute each layer together."""
        return mesh_shape(self.config)["tensor"]

    @property
    def rate(self) -> float:
        """Operations a second of products."""
        return sustained(self.gpu)

    @property
    def bandwidth(self) -> float:
        """Bytes a second of device memory."""
        return self.gpu.bandwidth_gb_s * 1e9 * BANDWIDTH

    @property
    def again(self) -> float:
        """Forward passes of a layer that come again in its backward pass; stages compute theirs again as a whole."""
        return {"none": 0.0, "nested": 2.0}.get(self.config.remat, 1.0) + (self.config.strategy == "layerwise")

    @property
    def recomputed(self) -> float:
        """The same of its products: the last one's result is not needed again."""
        return self.again - self.work.down / self.work.weights if self.again else 0.0

    @property
    def products(self) -> float:
        """Of the layers: linear modules and attention."""
        shapes = self.work.shapes
        linear = 2 * self.tokens * shapes.num_layers * self.work.weights * (2 + self.recomputed)
        # Scores and values of half of all pairs, forwards; backwards it is two and a half times that.
        width = shapes.num_heads * shapes.head_dim
        attention = 2 * self.tokens * self.config.sequence_length * width * shapes.num_layers
        passes = 3.5 + self.again - (self.config.remat == "attention")
        return (linear / self.rate + passes * attention / (self.rate * ATTENTION[self.kernel])) / self.parts

    @property
    def head(self) -> float:
        """Of the loss: logits, and the gradient of the hidden states."""
        return 4 * self.tokens * self.work.shapes.vocab_size * self.work.shapes.hidden_size / self.rate / self.parts

    @property
    def traffic(self) -> float:
        """Of device memory beside the products: weights dequantised, element-wise work, what is kept."""
        shapes = self.work.shapes
        wide = 0 if self.config.quantization == "none" else 2  # bytes of a dequantised weight, written and read again
        dequantised = self.work.weights * (2 + self.recomputed) * (self.work.weight_bytes + 2 * wide) / self.parts
        of_width = BYTES_A_WIDTH * shapes.hidden_size
        element_wise = of_width + BYTES_AN_INTERMEDIATE * shapes.intermediate_size / self.parts
        of_token = element_wise * (2 + self.again) + 2 * _kept_bytes(self.config, shapes)
        return shapes.num_layers * (dequantised + self.tokens * of_token) / self.bandwidth

    def waiting(self, times: int) -> float:
        """Of `times` micro-batches, for transfers that are not hidden under the layers' computation."""
        # Streamed layers, and what is brought together, serve all micro-batches at once.
        streamed = self.streamed_layers
        rounds = 1 if streamed else times
        at_once = times // rounds
        busy = at_once * (self.products + self.traffic)
        forward, backward = HIDDEN * busy / (2 + self.again), HIDDEN * busy * (1 + self.again) / (2 + self.again)
        seconds = at_once * (self._vocabulary + self._summed) + self._gathered(forward + backward)
        codes = streamed * self._layer_bytes / mesh_shape(self.config)["fsdp"]
        inputs = 0
        if self.config.offload.activations:
            inputs = 2 * at_once * self.tokens * self.work.shapes.num_layers * self.work.shapes.hidden_size
        # Forwards, inputs go to the host while codes come from there; backwards both come, one after the other.
        rate = self.link.host_gb_s * 1e9
        seconds += max(0.0, max(codes, inputs) / rate - forward) + max(0.0, (codes + inputs) / rate - backward)
        return rounds * seconds

    @property
    def streamed_layers(self) -> int:
        """Layers that wait in host memory; where it is to be settled by the card, all."""
        asked, layers = self.config.streamed_weights, self.work.shapes.num_layers
        return asked if isinstance(asked, int) else 0 if asked == "none" else layers

    @property
    def _layer_bytes(self) -> float:
        return self.work.weights * self.work.weight_bytes

    def _gathered(self, hideable: float) -> float:
        """Of bringing each layer's weights and adapters together, once forwards and once backwards."""
        mesh = mesh_shape(self.config)
        shards, rate, layers = mesh["fsdp"], self.link.gpu_gb_s * 1e9, self.work.shapes.num_layers
        if shards * self.parts == 1:
            return 0.0
        passes = 2.0 if self.streamed_layers else max(2.0, 1 + self.again)  # each gathers them
        codes = self._layer_bytes / self.parts * (shards - 1) / shards
        adapters = 2 * self.work.adapters * (shards * self.parts - 1) / (shards * self.parts)
        exchanges = GATHERS if shards > 1 else ADAPTER_GATHERS
        return max(0.0, passes * layers * (codes + adapters) / rate - hideable) + exchanges * LATENCY * layers * passes

    @property
    def _vocabulary(self) -> float:
        """Of looking words up and of the loss, whose tables are cut over the devices: hidden states both ways."""
        mesh, width = mesh_shape(self.config), self.tokens * self.work.shapes.hidden_size
        others = width * (2 * 2 + 2 + 4) * (mesh["fsdp"] - 1)
        same = width * (2 + 4) * 2 * (self.parts - 1) / self.parts
        return (others + same) / (self.link.gpu_gb_s * 1e9)

    @property
    def _summed(self) -> float:
        """Of the sums of attention's and the feed-forward block's results, and of their inputs' gradients."""
        if self.parts == 1:
            return 0.0
        sums = 4 + self.again  # what the feed-forward block adds is not needed again
        size = 2 * 2 * self.tokens * self.work.shapes.hidden_size * (self.parts - 1) / self.parts
        return self.work.shapes.num_layers * sums * (size / (self.link.gpu_gb_s * 1e9) + LATENCY)


def _kept_bytes(config: TrainConfig, shapes: ModelConfig) -> int:
    """Bytes that the forward pass keeps of a layer's token for the backward pass, written and read."""
    heads = (shapes.num_heads + 2 * shapes.num_kv_heads) * shapes.head_dim
    match config.remat:
        case "none":
            return 2 * (6 * shapes.hidden_size + 3 * heads + 4 * shapes.intermediate_size)
        case "attention":
            return 2 * (shapes.hidden_size + shapes.num_heads * shapes.head_dim)
        case _:
            return 2 * shapes.hidden_size


def _exchanged(config: TrainConfig, work: Work, mesh: dict[str, int]) -> float:
    """Bytes of gradients that a device sends in a step."""
    elements, shards, replicas = work.adapters * work.shapes.num_layers, mesh["fsdp"] * mesh["tensor"], mesh["data"]
    compression = config.gradient_compression
    times = 1 if config.streamed_weights != "none" else config.gradient_accumulation_steps
    sent = times * wire_bytes(elements, shards, compression, "reduce_scatter") if shards > 1 else 0
    return sent + (wire_bytes(elements // shards, replicas, compression) if replicas > 1 else 0)
