"""The check that train makes before it reads a weight."""

import re
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from sharding.mesh import make_mesh
from sharding.program import memory
from zagora_jax.base import open_base
from zagora_jax.checkpoints.known_models import KNOWN_MODELS
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig
from zagora_jax.planning import check, compile_planned_step, compiled
from zagora_jax.planning.check import require_fit
from zagora_jax.planning.machine import gpu_budget

GIB = 2**30
SMALL = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 256, "num_hidden_layers": 6}
CONFIG = TrainConfig(
    model="synthetic:small",
    lora=LoraConfig(rank=1, targets=["q_proj"]),
    sequence_length=256,
    micro_batch_size=4,
    remat="none",
    compute_dtype="float32",
)


@pytest.fixture(scope="module")
def base():
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KNOWN_MODELS, "small", KNOWN_MODELS["smollm2-135m"] | SMALL | heads)
        return open_base(CONFIG.model, quantization="nf4", dtype="float32", lora=CONFIG.lora)


@pytest.fixture(scope="module")
def planned(base):
    return memory(compile_planned_step(CONFIG, make_mesh({}, jax.devices()[:1]), base)).peak


@dataclass(eq=False)
class Card:
    """A device that tells a limit as a GPU's allocator does."""

    limit: float | None
    platform: str = "cpu"
    device_kind: str = "RTX 4090"
    id: int = 0

    def memory_stats(self):
        return self.limit and {"bytes_limit": self.limit}


def require(planned, base, limit, platform="cpu"):
    """`require_fit` for a step that needs `planned` bytes of one card, and whose alternatives this CPU compiles."""
    card, real = Card(limit, platform), make_mesh({}, jax.devices()[:1])

    def compile_planned(config, mesh, base):
        (peak,) = compiled.compile_planned(config, real, base).planned_memory().values()
        return SimpleNamespace(planned_memory=lambda: {card: peak})

    mesh = SimpleNamespace(devices=np.array([card]), shape=real.shape, size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "compile_planned", compile_planned)
        require_fit({card: planned}, CONFIG, base, mesh)


def test_what_fits_passes_and_so_does_a_cpu_without_limits(base, planned):
    require(planned, base, limit=planned)
    require(99 * GIB, base, limit=None)


def test_what_cannot_fit_names_the_first_change_that_does(base, planned):
    with pytest.raises(
        UserError, match=r"the step needs .* of RTX 4090 0, which has .* for it. The first change"
    ) as raised:
        require(planned, base, limit=planned * 0.75)
    found = re.search(r"The first change that fits is --remat (\w+): (\d+\.\d+) GiB", str(raised.value))
    remat, peak = found[1], float(found[2])
    assert "--no-plan-check" in str(raised.value)
    # It is as good as its word.
    mesh = make_mesh({}, jax.devices()[:1])
    again = memory(compile_planned_step(CONFIG.model_copy(update={"remat": remat}), mesh, base)).peak
    assert again == pytest.approx(peak * GIB, abs=0.01 * GIB)
    assert again <= planned * 0.75


def test_where_nothing_helps_it_says_so(base, planned):
    with pytest.raises(UserError, match=r"No change of .* makes it fit: use more devices"):
        require(planned, base, limit=planned / 100)


def test_a_card_that_jax_takes_three_quarters_of_is_opened_first(base, planned, monkeypatch):
    monkeypatch.setattr(check, "budget_here", lambda count: gpu_budget(round(23.64 * GIB), 2))
    with pytest.raises(UserError, match=r"It would fit with --device-memory-limit 22.1\."):
        require(18 * GIB, base, limit=17.7 * GIB, platform="gpu")


def test_layers_that_wait_in_host_memory_are_offered_where_they_can():
    def offered(**options):
        changes = list(check._changes(CONFIG.model_copy(update=options)))
        assert len(changes) > 3
        return [change for change in changes if "offload.weights" in change]

    assert {"offload.weights": "auto", "remat": "full"} in offered()
    assert {"offload.weights": "auto"} in offered(remat="full")
    some = CONFIG.offload.model_copy(update={"weights": 2})
    assert {"offload.weights": "all"} in offered(remat="full", offload=some)
    assert not offered(remat="full", strategy="streaming")  # all of them in the compiled step already
    assert not offered(strategy="layerwise")
    assert not offered(mesh=CONFIG.mesh.model_copy(update={"tensor": 2}))
    assert not offered(gradient_exchange="overlapped")


def test_a_program_for_each_stage_is_offered_first_where_one_runs_them_all():
    assert next(check._changes(CONFIG.model_copy(update={"strategy": "layerwise"}))) == {"stage_form": "programs"}
    for other in ({"strategy": "fsdp"}, {"strategy": "layerwise", "stage_form": "programs"}):
        assert not any("stage_form" in change for change in check._changes(CONFIG.model_copy(update=other)))
