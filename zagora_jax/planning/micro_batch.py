"""What one micro-batch takes of a card: arithmetic, memory traffic and what travels, from the vendor's figures.

A pass takes its arithmetic and memory traffic one after the other, and hides what travels under them, as far as it can:
gathered weights, layer inputs that wait in host memory, and layers that are streamed from there or from the disk, twice
a step however many micro-batches there are. Sums of activations, between devices that compute a layer together, hide
under nothing.
The layers' products count 2 operations a weight and token forwards, 2 backwards (the frozen weights have no gradient),
and 2 for what the backward pass computes again. The constants below stand for what the figures leave out. They were
fitted to the runs in benchmarks/README.md (H200), and to Answer.AI's published runs of another trainer for GeForce and
RTX A5000 cards (see docs/configure.md); those of other cards are by analogy.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from models.config import ModelConfig
from models.cross_entropy import CHUNK_TOKENS
from models.modules import linear_modules
from models.quantization import bits_per_parameter
from sharding.targets import Gpu
from zagora_jax.config import TrainConfig
from zagora_jax.planning.kept import keeps_attention, kept_elements
from zagora_jax.planning.links import Link
from zagora_jax.planning.shapes import Shapes, mesh_shape
from zagora_jax.planning.trained_tables import TrainedTables
from zagora_jax.streaming import slots_of

# Part of the published bfloat16 rate that large matrix products sustain. GeForce cards come close, since theirs is
# half of what the chip could do; workstation and data-centre cards are held back by their power limits.
SUSTAINED = {"rtx": 0.8, "a4": 0.5, "a5": 0.5, "a6": 0.5, "l4": 0.4, "l40s": 0.6, "a100": 0.8, "h": 0.7}
ATTENTION = {"cudnn": 0.5, "chunked": 0.2, "reference": 0.1}  # of the sustained rate
BANDWIDTH = 0.85  # of the published memory bandwidth
HIDDEN = 0.85  # of the computing time that transfers can hide under
GATHERS, LATENCY = 25, 20e-6  # a layer and pass: exchanges of codes, scales and adapters; seconds to start one
DEQUANTISED = 4  # bytes of a dequantised weight, written and read again
ADAPTER_GATHERS = 14  # the same of adapters alone
BYTES_A_WIDTH, BYTES_AN_INTERMEDIATE = 48, 20  # read and written by element-wise work, a token, layer and pass


@dataclass(frozen=True)
class Work:
    """What of a model decides how long it takes: numbers of weights of one layer, and widths."""

    shapes: ModelConfig
    weights: int  # of the linear modules
    down: int  # of the last one, whose result the backward pass does without
    gates: int  # of those that the feed-forward block begins with
    adapters: int
    weight_bytes: float  # stored, a weight
    tables: TrainedTables

    def moment_bytes(self, config: TrainConfig) -> float:
        """Return the bytes of a layer's moments that come from host memory and go back there in a step."""
        if not config.offload.optimizer:
            return 0.0
        return 2 * self.adapters * (8 if config.optimizer == "adamw" else 2)

    @classmethod
    def of(cls, shapes: Shapes) -> "Work":
        """Measure a declared model."""
        model = shapes.base.model
        sizes = {path: module.in_features * module.out_features for path, module in linear_modules(model).items()}
        weights = sum(sizes.values())
        down = next(size for path, size in sizes.items() if path.endswith("down_proj"))
        gates = sum(size for path, size in sizes.items() if path.endswith(("gate_proj", "up_proj", "gate_up_proj")))
        stored = shapes.layer_weight_bytes / weights
        return cls(model.config, weights, down, gates, shapes.layer_adapter_elements, stored, shapes.trained_tables)


def sustained(gpu: Gpu) -> float:
    """Return the operations a second that large products reach."""
    prefix = max((prefix for prefix in SUSTAINED if gpu.kind.startswith(prefix)), key=len)
    return gpu.bf16_tflop_s * 1e12 * SUSTAINED[prefix]


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
        """Forward passes of a layer that come again in its backward pass."""
        mlp = self.work.gates / self.work.weights
        return {"none": 0.0, "mlp": mlp, "nested": 2.0}.get(self.config.planned_remat, 1.0)

    @property
    def recomputed(self) -> float:
        """The same of its products: the last one's result is not needed again."""
        is_whole = self.config.planned_remat not in ("none", "mlp")
        return self.again - is_whole * self.work.down / self.work.weights

    @property
    def products(self) -> float:
        """Of the layers: linear modules and attention, whose backward pass is two and a half forward ones."""
        attention = 3.5 if keeps_attention(self.config.planned_remat) else 3.5 + self.again
        return self._products(2 + self.recomputed, attention)

    @property
    def forward_products(self) -> float:
        """The forward pass's part of it."""
        return self._products(1, 1)

    def _products(self, linear_passes: float, attention_passes: float) -> float:
        shapes = self.work.shapes
        linear = 2 * self.tokens * shapes.num_layers * self.work.weights
        # Scores and values of half of all pairs.
        width = shapes.num_heads * shapes.head_dim
        attention = 2 * self.tokens * self.config.sequence_length * width * shapes.num_layers
        seconds = linear_passes * linear + attention_passes * attention / ATTENTION[self.kernel]
        return seconds / self.rate / self.parts

    @property
    def head(self) -> float:
        """Of the loss: logits, and the gradients of the hidden states and of a head that is trained."""
        times = 6 if self.work.tables.head else 4
        return times * self.tokens * self.work.shapes.vocab_size * self.work.shapes.hidden_size / self.rate / self.parts

    @property
    def head_traffic(self) -> float:
        """Of device memory: gradients of trained tables, or a quantised head, dequantised twice for each piece."""
        embeddings, shapes = self.config.embeddings, self.work.shapes
        mesh, shape = mesh_shape(self.config), (shapes.vocab_size, shapes.hidden_size)
        shards = mesh["fsdp"] * mesh["tensor"]
        trained = self.work.tables.traffic(shards, self.tokens) / self.bandwidth
        if embeddings == "none":
            return trained
        weights = math.prod(shape) / shards
        stored = bits_per_parameter(embeddings, shape, jnp.dtype(self.config.compute_dtype)) / 8
        return trained + 2 * math.ceil(self.tokens / CHUNK_TOKENS) * weights * (stored + DEQUANTISED) / self.bandwidth

    @property
    def traffic(self) -> float:
        """Of device memory beside the products: weights dequantised, element-wise work, what is kept."""
        return self._traffic(2 + self.recomputed, 2 + self.again, 2)

    @property
    def forward_traffic(self) -> float:
        """The forward pass's part of it."""
        return self._traffic(1, 1, 1)

    def _traffic(self, dequantisations: float, passes: float, keepings: float) -> float:
        shapes = self.work.shapes
        wide = 0 if self.config.quantization == "none" else DEQUANTISED
        dequantised = self.work.weights * dequantisations * (self.work.weight_bytes + wide) / self.parts
        of_width = BYTES_A_WIDTH * shapes.hidden_size
        element_wise = of_width + BYTES_AN_INTERMEDIATE * shapes.intermediate_size / self.parts
        of_token = element_wise * passes + keepings * self._kept_bytes
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
        codes = streamed * self.layer_bytes / mesh_shape(self.config)["fsdp"]
        inputs = at_once * self.work.shapes.num_layers * self.offloaded_bytes
        # Forwards, inputs go to the host while codes come from there; backwards both come, one after the other.
        rate = self.link.host_gb_s * 1e9
        forward_moves, backward_moves = max(codes, inputs) / rate, (codes + inputs) / rate
        disk = self.layers_from_disk * self.layer_bytes / (self.link.disk_gb_s * 1e9)
        seconds += max(0.0, max(forward_moves, disk) - forward) + max(0.0, max(backward_moves, disk) - backward)
        return rounds * seconds

    @property
    def layers_from_disk(self) -> int:
        """Layers that are read in each pass: the last ones of a pass are still in host memory in the next."""
        streamed = self.streamed_layers
        return streamed - (slots_of(self.config, streamed) or streamed)

    @property
    def streamed_layers(self) -> int:
        """Layers that wait in host memory; where it is to be settled by the card, all."""
        asked, layers = self.config.streamed_weights, self.work.shapes.num_layers
        return asked if isinstance(asked, int) else 0 if asked == "none" else layers

    @property
    def offloaded_bytes(self) -> int:
        """Of what a layer keeps for its backward pass, where that waits in host memory."""
        return round(self.tokens * self._kept_bytes) if self.config.offload.activations else 0

    @property
    def layer_bytes(self) -> float:
        """Of a layer's weights as they are stored."""
        return self.work.weights * self.work.weight_bytes

    def _gathered(self, hideable: float) -> float:
        """Of bringing each layer's weights and adapters together, once forwards and once backwards."""
        mesh = mesh_shape(self.config)
        shards, rate, layers = mesh["fsdp"], self.link.gpu_gb_s * 1e9, self.work.shapes.num_layers
        if shards * self.parts == 1:
            return 0.0
        passes = 2.0 if self.streamed_layers else max(2.0, 1 + self.again)  # each gathers them
        codes = self.layer_bytes / self.parts * (shards - 1) / shards
        adapters = 2 * self.work.adapters * (shards * self.parts - 1) / (shards * self.parts)
        exchanges = GATHERS if shards > 1 else ADAPTER_GATHERS
        return max(0.0, passes * layers * (codes + adapters) / rate - hideable) + exchanges * LATENCY * layers * passes

    @property
    def _vocabulary(self) -> float:
        """Of looking words up and of the loss, whose tables are cut over the devices: hidden states both ways."""
        mesh, width = mesh_shape(self.config), self.tokens * self.work.shapes.hidden_size
        looked_up = 2 if self.work.tables.looked_up else 0  # its gradient
        others = width * (2 * 2 + 2 + 4 + looked_up) * (mesh["fsdp"] - 1)
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

    @property
    def _kept_bytes(self) -> float:
        """Of a token, that a layer keeps for the backward pass."""
        shapes = self.work.shapes
        elements = kept_elements(self.config.planned_remat, shapes, shapes.num_layers, self.parts)
        return 2 * elements / shapes.num_layers
