"""One entry in the cache of quantised models serves all strategies."""

import threading

import eight_devices
import jax
import numpy as np
import oracles
import pytest

from models.stream_order import stream_order
from sharding.mesh import make_mesh
from zagora_jax.base import open_base
from zagora_jax.checkpoints.huggingface import HuggingFaceCheckpoint
from zagora_jax.distribution import Distribution
from zagora_jax.pipeline import Pipeline

pytestmark = pytest.mark.eight_devices

LAYERS = 5

ARRANGEMENTS = {
    "fsdp": lambda model: Distribution(make_mesh({"fsdp": 4}, jax.devices()[:4]), model),
    "tensor": lambda model: Distribution(make_mesh({"tensor": 2, "fsdp": 2}, jax.devices()[:4]), model),
    "streaming": lambda model: Distribution(
        make_mesh({"fsdp": 2}, jax.devices()[:2]), model, stream=stream_order(LAYERS, 4)
    ),
    "layerwise": lambda model: Pipeline(make_mesh({"stage": 2, "fsdp": 2}, jax.devices()[:4]), model, [3, 2]),
}


def test_on_eight_devices():
    eight_devices.run(__file__)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return oracles.tiny_llama(folder / "tiny", tokenizer=False, num_hidden_layers=LAYERS, intermediate_size=64)


@pytest.fixture(scope="module")
def cache(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    opened(model, folder).load()
    for thread in threading.enumerate():
        if thread.name.startswith("quantized-cache"):
            thread.join()
    return folder


def opened(model, cache):
    return open_base(str(model), quantization="nf4", dtype="float32", lora=None, quantized_cache=cache)


def load(model, cache, arrange):
    base = opened(model, cache)
    return jax.tree.leaves(arrange(base.model).load(lambda destination: base.load(destination=destination)))


@pytest.mark.parametrize("strategy", ARRANGEMENTS)
def test_all_strategies_read_the_same_bits(model, cache, monkeypatch, strategy):
    expected = load(model, None, ARRANGEMENTS[strategy])
    read_rows = HuggingFaceCheckpoint.read_rows

    def not_of_layers(self, name, start, stop):
        assert "layers" not in name
        return read_rows(self, name, start, stop)

    monkeypatch.setattr(HuggingFaceCheckpoint, "read_rows", not_of_layers)
    found = load(model, cache, ARRANGEMENTS[strategy])
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.sharding) == (theirs.dtype, theirs.sharding)
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8))
