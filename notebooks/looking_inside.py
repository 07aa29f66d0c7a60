# %% [markdown]
# # Looking inside: where each array lives, what travels, and what 4 bits lose
#
# JAX sees the devices of a machine as a *mesh* with named axes, and an array knows over which of them it is cut. This
# notebook takes a model apart on four devices: where every array is, how much memory each device needs for what, what
# goes over the wire in a step, and how far quantised weights are from the real ones.
#
# On a CPU, JAX can pretend to have several devices; on a machine with GPUs leave the line out that asks for them.

# %%
import json
import os
import shutil
from pathlib import Path

import jax

if jax.config.jax_platforms in (None, "", "cpu"):
    jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from models.quantization import bits_per_parameter, dequantize, quantize
from zagora_jax import DistributedTrainer
from zagora_jax.arrange import arrange
from zagora_jax.base import open_base
from zagora_jax.config import TrainConfig
from zagora_jax.frozen_weights import load_weights
from zagora_jax.reporting.charts import Curve, bar_chart, grid_chart, line_chart
from zagora_jax.reporting.report_page import layer_shares
from zagora_jax.reporting.steps import Picture

MODEL = os.environ.get("MODEL", "../.cache/SmolLM2-135M-Instruct.Q4_1.gguf")
RUNS = Path(os.environ.get("RUNS", "../runs/notebooks")) / "looking_inside"
ROWS = ["../examples/zagora/train.jsonl"]
shutil.rmtree(RUNS, ignore_errors=True)
print(jax.devices())

# %% [markdown]
# ## Where each array lives
#
# With the strategy `fsdp` every device holds a share of every frozen weight. A 4-bit weight is not one array but a few:
# `codes` has two weights a byte, `absmax` a scale for every 64 weights, which are 8-bit themselves, with scales of their
# own (`nested_absmax`, `offset`). All layers are stacked, so that their number is the first axis; the rest is flat, and
# cut into equal parts wherever that falls.

# %%
config = TrainConfig(model=MODEL, data=ROWS, strategy="fsdp", compute_dtype="float32")
base = open_base(MODEL, quantization="nf4", dtype="float32", lora=config.lora)
arrangement = arrange(config, base.model)
frozen = load_weights(base, arrangement, lambda count: None, print)

table = Table("array", "shape", "dtype", "cut over", "on one device", title=f"mesh {dict(arrangement.mesh.shape)}")
for path, array in jax.tree_util.tree_leaves_with_path(frozen):
    name = jax.tree_util.keystr(path, simple=True, separator=".").replace(".value", "")
    if "mlp" in name and "down_proj" not in name:
        continue  # as down_proj
    part = array.addressable_shards[0].data
    table.add_row(name, str(array.shape), str(array.dtype), str(tuple(array.sharding.spec)), str(part.shape))
Console(width=150).print(table)

# %% [markdown]
# ## Memory by part, and which device has which layer
#
# Every run writes `layout.json`, which says what lies where, and what the compiled step needs besides. Two steps of two
# strategies show the difference: `fsdp` cuts each layer in four, `layerwise` gives each device whole layers of its own.
# Where these do not divide evenly, as 30 over four, it times a layer on each device and gives a faster one more; four devices
# that share the cores of one CPU are timed less evenly than cards are.


# %%
def layout_of(strategy: str, **options) -> dict:
    trainer = DistributedTrainer(
        MODEL, partition_strategy=strategy, output=RUNS / "-".join([strategy, *map(str, options.values())]),
        sequence_length=128, compute_dtype="float32", max_steps=2, **{"gradient_accumulation_steps": 4} | options,
    )  # fmt: skip
    trainer.train(ROWS)
    return json.loads((trainer.run_directory / "layout.json").read_text())


def memory_chart(layout: dict, title: str) -> Picture:
    rows = []
    for device, kinds in layout["bytes_a_device"].items():
        parts = {kind: size / 2**20 for kind, size in kinds.items()}
        parts["at work"] = layout["planned_bytes_a_device"][device] / 2**20 - sum(parts.values())
        rows.append((device, parts))
    return Picture(bar_chart(rows, title, " MiB"))


fsdp = layout_of("fsdp")

# %%
memory_chart(fsdp, "memory of each device by part, fsdp")

# %%
Picture(grid_chart(layer_shares(fsdp), "part of each layer that a device holds, fsdp", "layer"))

# %%
layerwise = layout_of("layerwise")

# %%
memory_chart(layerwise, "memory of each device by part, layerwise")

# %%
Picture(grid_chart(layer_shares(layerwise), "part of each layer that a device holds, layerwise", "layer"))

# %% [markdown]
# ## What travels
#
# The bytes that a step puts on the wire are read from the compiled program. `fsdp` gathers the packed 4-bit weights, a
# layer at a time, and sends gradients; `layerwise` sends activations between neighbours and no weight at all; compressed
# gradients are a quarter, or an eighth.

# %%
compressed = layout_of("replicas", gradient_compression="int4")
table = Table("what, each step and device", "MB", title="on the wire")
for strategy, layout in (("fsdp", fsdp), ("layerwise", layerwise), ("replicas, int4 gradients", compressed)):
    for what, size in (layout["wire_bytes_a_step"] or {}).items():
        table.add_row(f"{strategy}: {what}", f"{size / 1e6:,.2f}")
Console(width=110).print(table)

# %% [markdown]
# ## What quantisation loses
#
# Each linear weight is brought to few bits and back, and compared with itself: the norm of the difference over the norm
# of the weight. Here for one projection of every layer.

# %%
FORMATS = ("nf4", "hqq", "int8")
layers = base.model.config.num_layers
errors = {name: [] for name in FORMATS}
for layer in range(layers):
    weight = jnp.asarray(base.checkpoint.read(f"model.layers.{layer}.mlp.down_proj.weight").astype(np.float32))
    for name in FORMATS:
        back = dequantize(quantize(name, weight), jnp.float32)
        errors[name].append(float(jnp.linalg.norm(back - weight) / jnp.linalg.norm(weight)))

for name in FORMATS:
    print(
        f"{name}: {bits_per_parameter(name, weight.shape, jnp.float32):.3f} bits a weight, error {np.mean(errors[name]):.4f}"
    )
curves = [Curve(name, [(layer, e, e, e) for layer, e in enumerate(of)], dots=True) for name, of in errors.items()]
Picture(line_chart(curves, "relative error of down_proj", x_name="layer"))

# %% [markdown]
# NF4's sixteen values lie close together near zero, where most weights of a block are. The weights of one block of 64,
# and what becomes of them:

# %%
block = weight.reshape(-1)[:64]
held = dequantize(quantize("nf4", weight), jnp.float32).reshape(-1)[:64]
order = np.argsort(np.asarray(block))
sorted_curves = [
    Curve("weights, sorted", [(i, float(v), float(v), float(v)) for i, v in enumerate(block[order])]),
    Curve("as NF4 holds them", [(i, float(v), float(v), float(v)) for i, v in enumerate(held[order])], dots=True),
]
Picture(line_chart(sorted_curves, "one block of 64 weights", x_name="rank"))
