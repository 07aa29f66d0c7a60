"""How much host memory loading takes beside the loaded weights, measured in a process of its own.

On a CPU the "device" is host memory too. So the high-water mark of the process's resident memory, above what it held
before loading, counts three things: the tensors being read (the bound is about them), the device's scratch space while
it quantises one of them, and the loaded weights. The third is no cost of loading. It is taken off, as the bytes of all
live arrays; the second stays in, so that what is measured here is more than what the host holds beside a GPU.
"""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models.config import ModelConfig
from models.llama import Llama
from zagora_jax.checkpoints.checkpoint import plan_shards
from zagora_jax.checkpoints.load import expected_tensors
from zagora_jax.checkpoints.safetensors_writer import write_safetensors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self says what a process's memory was at most")

PROGRAM = """
import ctypes, gc, sys
import jax
from zagora_jax.base import open_base

def status(key):  # bytes
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

def reset_high_water_mark():
    open("/proc/self/clear_refs", "w").write("5")

def load(directory, on_tensor=lambda _: None):
    base = open_base(directory, quantization="nf4", dtype="bfloat16", lora=None)
    return jax.block_until_ready(base.load(on_tensor))

jax.block_until_ready(jax.numpy.zeros(1))
if sys.argv[2:] == ["warm"]:  # so that nothing is compiled, which takes memory too
    load(sys.argv[1])
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before, worst = status("VmRSS"), 0

def on_tensor(_):
    global worst
    live = sum(array.nbytes for array in jax.live_arrays())
    worst = max(worst, status("VmHWM") - before - live)
    reset_high_water_mark()

reset_high_water_mark()
frozen = load(sys.argv[1], on_tensor)
on_tensor(0)
print(worst, sum(leaf.nbytes for leaf in jax.tree.leaves(frozen)))
"""


def write_model(directory, shard_bytes, **config):
    """Write a bfloat16 model of random finite numbers; returns the bytes of its tensors, sorted."""
    config = {"model_type": "llama", "rms_norm_eps": 1e-5} | config
    model = Llama(ModelConfig.from_hf(config), quantization="none", dtype=jnp.dtype(jnp.bfloat16))
    shapes = {name: tensor.shape for name, tensor in expected_tensors(model).items()}
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in shapes.items()}
    rng = np.random.default_rng(0)

    def draw(name):
        bits = np.frombuffer(rng.bytes(sizes[name]), np.uint16) & 0xBFFF  # of magnitude below 2
        return bits.view(ml_dtypes.bfloat16).reshape(shapes[name])

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    placed = plan_shards(sizes, shard_bytes)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    for file in set(placed.values()):
        specs = {name: (shapes[name], np.dtype(ml_dtypes.bfloat16)) for name in placed if placed[name] == file}
        with open(directory / file, "wb") as opened:
            write_safetensors(opened, specs, draw, {"format": "pt"})
    return sorted(sizes.values())


def measure(directory, *, warm=False):
    """The bytes that loading a model takes beside its weights, on the first load or else a second, and the weights'."""
    # Of whatever size, freed memory goes back to the system at once and is not counted for ever.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PROGRAM, str(directory), *["warm"][:warm]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


def test_loading_holds_a_few_tensors_at_a_time(tmp_path):
    tensors = write_model(
        tmp_path / "model",
        10**8,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=4096,
        num_hidden_layers=6,
    )
    overhead, loaded = measure(tmp_path / "model", warm=True)
    # In tensors, of 16 bits: one, its copy for the device, the four that are read meanwhile, and scratch space of 2.5;
    # the rest is the allocator's. A shard would be 11 of them, the model 22.
    assert sum(tensors) > 20 * tensors[-1]
    assert 0 < overhead < 10 * tensors[-1]
    assert loaded < sum(tensors) / 2


@pytest.mark.slow  # 2.3 GB are written and quantised
def test_peak_memory_is_bounded_by_the_largest_tensor(tmp_path):
    tensors = write_model(
        tmp_path / "model",
        10**9,
        hidden_size=4096,
        intermediate_size=32768,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        num_hidden_layers=2,
    )
    assert sum(tensors) > 2 * 10**9
    overhead, _ = measure(tmp_path / "model")
    assert overhead < 3 * tensors[-1] + 2**30
