"""What a run needs of the host."""

import pytest

from zagora_jax.base import open_base
from zagora_jax.option_groups import LoraConfig
from zagora_jax.planning.analytic import estimate_memory
from zagora_jax.planning.candidates import train_config
from zagora_jax.planning.host import host_needs
from zagora_jax.planning.shapes import Shapes

GIB = 2**30


@pytest.fixture(scope="module")
def shapes():
    return Shapes(open_base("synthetic:llama-3-70b", quantization="nf4", dtype="bfloat16", lora=LoraConfig()))


def needs(shapes, **settings):
    config = train_config({"model": "llama", "mesh.data": 1, "mesh.fsdp": 1, **settings})
    stages = estimate_memory(config, shapes, "cudnn", 24 * GIB)
    return host_needs(config, shapes, stages, host_memory=None, here=False), stages


def test_loading_takes_what_was_measured_with_layers_of_this_size(shapes):
    without, _ = needs(shapes, quantized_cache="off")
    assert 0.25 * GIB < without.loading < 0.40 * GIB  # docs/loading.md: 0.34
    with_cache, _ = needs(shapes)
    assert with_cache.loading == without.loading + 2 * GIB  # what may wait for a slow disk
    plain, _ = needs(shapes, quantization="none")
    assert plain.loading == without.loading
    streamed, (memory,) = needs(shapes, quantized_cache="off", **{"offload.weights": "all"})
    assert streamed.loading == without.loading + memory.waiting
    assert 30 * GIB < memory.waiting < 34 * GIB


def test_a_saved_state_has_the_moments_wherever_they_are(shapes):
    here, _ = needs(shapes)
    there, _ = needs(shapes, **{"offload.optimizer": True})
    assert there.saving == here.saving
    assert there.pinned - here.pinned == pytest.approx(2 * here.saving / 3, rel=0.01)  # two of three float32
