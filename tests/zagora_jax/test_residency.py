"""How many layers wait in host memory, and when that is decided."""

from types import SimpleNamespace

import jax
import numpy as np
import oracles
import pytest
import runs

from sharding.mesh import make_mesh
from zagora_jax import residency, trainer
from zagora_jax.base import open_base
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig, OffloadConfig
from zagora_jax.planning.candidates import train_config
from zagora_jax.residency import settle_form, settle_remat
from zagora_jax.streaming import fitting_order, streamed_of_stages
from zagora_jax.trainer import train

GIB = 2**30


@pytest.mark.parametrize(("limit", "streamed"), [(8, 80), (10, 80), (12, 76), (24, 52), (50, None)])
def test_what_a_streaming_step_leaves_is_filled_with_layers(limit, streamed):
    order = fitting_order(80, GIB // 2, planned=9 * GIB, limit=limit * GIB)
    assert (order and order.streamed_layers) == streamed


@pytest.mark.parametrize(
    ("weights", "streamed"),
    [("none", [0, 0, 0]), ("all", [3, 5, 2]), ("auto", [3, 5, 2]), (1, [0, 0, 1]), (7, [2, 3, 2])],
)
def test_a_number_of_layers_is_shared_out_over_the_stages(weights, streamed):
    assert streamed_of_stages(weights, [3, 5, 2]) == streamed


def test_a_bad_row_is_named_before_anything_is_compiled(tmp_path, monkeypatch):
    def compiles(*_):
        raise AssertionError("compiled before the rows were read")

    monkeypatch.setattr(trainer, "settle_streaming", compiles)
    rows = runs.write_rows(tmp_path / "rows.jsonl", 3)
    rows.write_text(rows.read_text() + '{"messages": 1}\n')
    model = oracles.tiny_llama(tmp_path / "m")
    config = runs.tiny_config(
        model, tmp_path / "run", rows, remat="full", strategy="streaming", offload=OffloadConfig(weights="auto")
    )
    with pytest.raises(UserError, match=r"rows\.jsonl, line 4"):
        train(config, runs.recorder()[0])


NEEDED = {"none": 10, "mlp": 8, "attention": 6, "full": 4}  # GiB


@pytest.fixture
def settle(monkeypatch):
    """Settle remat for a device with a limit, in GiB; returns what was chosen, compiled and said."""
    base = open_base("synthetic:smollm2-135m?layers=2", quantization="nf4", dtype="bfloat16", lora=LoraConfig(rank=2))
    mesh = make_mesh({}, jax.devices()[:1])

    def settle(limit, **settings):
        compiled, said = [], []

        def compile_planned(config, *_):
            compiled.append(config.remat)
            return SimpleNamespace(planned_memory=lambda: {"device": NEEDED[config.remat] * GIB})

        def estimate_memory(config, *_):
            return (SimpleNamespace(peak=NEEDED[config.remat] * GIB),)

        monkeypatch.setattr(residency, "memory_limit", lambda _: None if limit is None else int(limit * GIB))
        monkeypatch.setattr(residency, "compile_planned", compile_planned)
        monkeypatch.setattr(residency, "estimate_memory", estimate_memory)
        settled = settle_remat(train_config({"model": "x", **settings}), base, mesh, said.append)
        return settled.remat, compiled, said

    return settle


@pytest.mark.parametrize(
    ("limit", "chosen", "compiled"),
    [
        (11, "none", []),
        (10.1, "none", ["none"]),  # the estimate may be a little wrong: the compiler decides
        (9.8, "mlp", ["none"]),
        (8.1, "mlp", ["mlp"]),
        (7, "attention", []),
        (5, "full", []),
        (None, "full", []),
    ],
)
def test_the_device_gets_what_computes_least_again(settle, limit, chosen, compiled):
    remat, tried, said = settle(limit)
    assert (remat, tried) == (chosen, compiled)
    assert said == (
        [] if chosen == "full" else [f"remat: {chosen}, with about {NEEDED[chosen]:.2f} of {limit:.2f} GiB a device"]
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"offload.activations": True},
        {"offload.optimizer": True},
        {"offload.weights": 1},
        {"strategy": "layerwise", "offload.activations": True},
    ],
)
def test_where_memory_is_short_remat_is_full(settle, settings):
    assert settle(11, **settings)[:2] == ("full", [])


@pytest.mark.parametrize(
    ("limit", "settings", "chosen"),
    [
        (11, {}, "none"),
        (5, {}, "full"),
        (3, {}, "stage"),
        (11, {"offload.optimizer": True}, "full"),
        (3, {"offload.optimizer": True}, "stage"),
        (3, {"offload.activations": True, "stage_form": "one-jit"}, "stage"),
        (None, {}, "full"),
    ],
)
def test_stages_that_have_no_room_for_layers_keep_their_input(settle, limit, settings, chosen):
    assert settle(limit, strategy="layerwise", **settings)[0] == chosen


def test_a_remat_that_was_asked_for_stays(settle):
    assert settle(5, remat="none")[:2] == ("none", [])


@pytest.mark.parametrize(
    ("limit", "programs_need", "compiled", "form"),
    [
        (11, 8, None, "auto"),
        (9, 8, None, "programs"),
        (9, 12, None, "auto"),
        (None, 8, None, "auto"),
        (10.5, 8, 10.4, "auto"),  # nearer than the estimate is exact, either way
        (10.5, 8, 10.6, "programs"),
        (9.5, 8, 9.4, "auto"),
        (9.5, 8, 9.6, "programs"),
    ],
)
def test_stages_have_programs_of_their_own_where_one_has_no_room(monkeypatch, limit, programs_need, compiled, form):
    base = open_base("synthetic:smollm2-135m?layers=4", quantization="nf4", dtype="bfloat16", lora=LoraConfig(rank=2))
    (device,), said = jax.devices()[:1], []
    mesh = SimpleNamespace(shape={"stage": 2, "data": 1, "fsdp": 1, "tensor": 1}, devices=np.array([device]))

    def estimate_memory(config, *_):
        peak = programs_need if config.stage_form == "programs" else 10
        return (SimpleNamespace(peak=peak * GIB),)

    monkeypatch.setattr(residency, "memory_limit", lambda _: None if limit is None else limit * GIB)

    def compile_planned(*_):
        assert compiled is not None
        return SimpleNamespace(planned_memory=lambda: {device: compiled * GIB})

    monkeypatch.setattr(residency, "estimate_memory", estimate_memory)
    monkeypatch.setattr(residency, "compile_planned", compile_planned)
    config = train_config({"model": "x", "strategy": "layerwise", "mesh.stage": 2})
    assert settle_form(config, base, mesh, said.append).stage_form == form
    assert len(said) == (form == "programs")
    given = config.model_copy(update={"stage_form": "one-jit"})
    assert settle_form(given, base, mesh, said.append).stage_form == "one-jit"
