"""What each device holds, reckoned for devices that are not there."""

import functools

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from models.parameters import split
from sharding.mesh import AXES
from zagora_jax.base import open_base
from zagora_jax.distribution import Distribution
from zagora_jax.optimizer import make_optimizer
from zagora_jax.option_groups import LoraConfig
from zagora_jax.train_state import initial_state

KINDS = ("codes", "scales", "embeddings", "LoRA", "optimizer")


@functools.cache
def subject(model: str):
    base = open_base(f"synthetic:{model}", quantization="nf4", dtype="bfloat16", lora=LoraConfig(rank=16))
    make = functools.partial(initial_state, optimizer=make_optimizer("adamw_8bit", 1e-4, 0.0), compute_dtype="bfloat16")
    return base.model, jax.eval_shape(make, split(base.model)[2])


def device_bytes(model: str, **options):
    declared, state = subject(model)
    sizes = {axis: options.pop(axis, 1) for axis in AXES}
    mesh = AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return Distribution(mesh, declared, **options).device_bytes(state)


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("model", ["llama-3-70b", "smollm2-135m"])
def test_no_device_holds_more_than_its_share(model: str, devices: int) -> None:
    """Of each kind, and of all together, with whatever is padded or everywhere: at most a tenth more."""
    whole, own = device_bytes(model), device_bytes(model, fsdp=devices)
    for kind in KINDS:
        assert whole[kind] / devices <= own[kind] <= 1.1 * whole[kind] / devices, kind
    assert sum(own.values()) <= 1.1 * sum(whole.values()) / devices


def test_replicas_hold_the_same_and_what_their_exchange_keeps() -> None:
    whole, own = device_bytes("smollm2-135m"), device_bytes("smollm2-135m", data=4)
    assert own == whole
    compressed = device_bytes("smollm2-135m", data=4, compression="int8")
    # Residuals in bfloat16 of what a device sends, and of the sum that it owns a quarter of.
    assert compressed["residuals"] == pytest.approx(own["LoRA"] / 2 * 1.25, rel=1e-3)
    delayed = device_bytes("smollm2-135m", data=4, exchange="delayed")
    assert delayed["pending gradients"] == own["LoRA"] + 1  # and whether they are usable
