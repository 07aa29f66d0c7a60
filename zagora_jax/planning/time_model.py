"""How long a train step takes: arithmetic, memory traffic and what travels, from the vendor's figures of the cards.

    step = micro-batches x (passes over the layers + output head) + gradient exchange + update

A pass takes its arithmetic and memory traffic one after the other, and hides what travels under them, as far as it can.
The layers' products count 2 operations a weight and token forwards, 2 backwards (the frozen weights have no gradient),
and 2 for what the backward pass computes again. The constants below stand for what the figures leave out. They were
fitted to the runs in benchmarks/README.md (H200), and to Answer.AI's published runs of another trainer for GeForce and
RTX A5000 cards (see docs/configure.md); those of other cards are by analogy.
"""

from dataclasses import dataclass

from models.config import ModelConfig
from models.llama import linear_modules
from sharding.compression import wire_bytes
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
BYTES_A_WIDTH, BYTES_AN_INTERMEDIATE = 48, 20  # read and written by element-wise work, a token, layer and pass


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, and how many tokens it has over all devices.

    Attributes:
        products: arithmetic of matrix products and attention.
        traffic: reading and writing device memory beside them: dequantisation, element-wise work, the update.
        links: what of the transfers is not hidden.
        tokens: padding included.
    """

    products: float
    traffic: float
    links: float
    tokens: int

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.products + self.traffic + self.links

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


def step_time(config: TrainConfig, work: Work, gpu: Gpu, link: Link | None, kernel: str) -> StepTime:
    """Estimate one optimizer step.

    Args:
        config: with every mesh axis given.
        work: of its model.
        gpu: the card.
        link: between cards; None where there is one.
        kernel: of attention, as `models.attention.choose_kernel` names it.
    """
    shapes, mesh = work.shapes, mesh_shape(config)
    tokens = config.micro_batch_size * config.sequence_length  # of a device and micro-batch
    layers, rate, bandwidth = shapes.num_layers, sustained(gpu), gpu.bandwidth_gb_s * 1e9 * BANDWIDTH
    again = {"none": 0.0, "nested": 2.0}.get(config.remat, 1.0)  # forward passes of a layer that come again
    recomputed = again - work.down / work.weights if again else 0.0
    head = shapes.vocab_size * shapes.hidden_size

    products = 2 * tokens * (layers * work.weights * (2 + recomputed) + 2 * head) / rate
    width = shapes.num_heads * shapes.head_dim
    attended = 2 * tokens * config.sequence_length * width * layers  # forwards: half of all pairs, scores and values
    passes = 3.5 + (0 if config.remat == "attention" else again)  # forwards 1, backwards 2.5
    products += passes * attended / (rate * ATTENTION[kernel])

    wide = 0 if config.quantization == "none" else 2  # bytes of a dequantised weight, written and read again
    dequantised = layers * work.weights * (2 + recomputed) * (work.weight_bytes + 2 * wide)
    element_wise = BYTES_A_WIDTH * shapes.hidden_size + BYTES_AN_INTERMEDIATE * shapes.intermediate_size
    moved = dequantised + tokens * layers * element_wise * (2 + again)
    moved += 2 * tokens * layers * _kept_bytes(config, shapes)
    traffic = moved / bandwidth

    hideable = HIDDEN * (products + traffic)
    links = 0.0
    if link is not None:
        links = max(0.0, _gathered(config, work, mesh["fsdp"], again) / (link.gpu_gb_s * 1e9) - hideable)
        links += GATHERS * LATENCY * layers * (2 + max(0.0, again - 1)) * (mesh["fsdp"] > 1)
        links += _vocabulary(tokens, shapes, mesh["fsdp"]) / (link.gpu_gb_s * 1e9)
    if config.offload.activations:
        host = link.host_gb_s if link is not None else gpu.pcie_lanes * 1.5
        links += max(0.0, 2 * tokens * layers * shapes.hidden_size * 2 / (host * 1e9) - hideable)
    times = config.gradient_accumulation_steps
    exchanged = 0.0 if link is None else _exchanged(config, work, mesh) / (link.gpu_gb_s * 1e9)
    update = 40 * work.adapters * layers / mesh["fsdp"] / bandwidth  # parameters, gradients and moments in float32
    replicas = mesh["data"] * mesh["fsdp"]
    return StepTime(products * times, traffic * times + update, links * times + exchanged, tokens * times * replicas)


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


def _gathered(config: TrainConfig, work: Work, shards: int, again: float) -> float:
    """Bytes of weights and adapters that a device receives in a micro-batch, in two passes, or three if nested."""
    passes = 2 + max(0.0, again - 1)
    of_layer = work.weights * work.weight_bytes + 2 * work.adapters
    return passes * work.shapes.num_layers * of_layer * (shards - 1) / shards


def _vocabulary(tokens: int, shapes: ModelConfig, shards: int) -> float:
    """Bytes of looking words up and of the loss, whose tables are cut over the devices: hidden states both ways."""
    return tokens * shapes.hidden_size * (2 * 2 + 2 + 4) * (shards - 1)


def _exchanged(config: TrainConfig, work: Work, mesh: dict[str, int]) -> float:
    """Bytes of gradients that a device sends in a step."""
    elements, shards, replicas = work.adapters * work.shapes.num_layers, mesh["fsdp"], mesh["data"]
    compression = config.gradient_compression
    times = config.gradient_accumulation_steps
    sent = times * wire_bytes(elements, shards, compression, "reduce_scatter") if shards > 1 else 0
    return sent + (wire_bytes(elements // shards, replicas, compression) if replicas > 1 else 0)
