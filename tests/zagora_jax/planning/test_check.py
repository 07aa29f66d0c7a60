"""The check that train makes before it reads a weight."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from sharding.mesh import make_mesh
from sharding.program import memory
from zagora_jax.base import open_base
from zagora_jax.checkpoints.known_models import KNOWN_MODELS
from zagora_jax.config import LoraConfig, TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.planning import check, compile_planned_step
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


class Cards:
    """A mesh that compiles for this CPU, with devices that tell a limit as a GPU's allocator does."""

    def __init__(self, limit, platform="cpu"):
        real = make_mesh({}, jax.devices()[:1])
        card = SimpleNamespace(
            id=0, platform=platform, device_kind="RTX 4090", memory_stats=lambda: limit and {"bytes_limit": limit}
        )
        self.devices, self.shape, self.size, self.real = np.array([[[card]]]), real.shape, 1, real


@pytest.fixture(autouse=True)
def compiles_for_the_real_device(monkeypatch):
    compile_step = check.compile_planned_step
    monkeypatch.setattr(check, "compile_planned_step", lambda config, mesh, base: compile_step(config, mesh.real, base))


def test_what_fits_passes_and_so_does_a_cpu_without_limits(base, planned):
    require_fit(planned, CONFIG, base, Cards(planned))
    require_fit(99 * GIB, CONFIG, base, Cards(None))


def test_what_cannot_fit_names_the_first_change_that_does(base, planned):
    with pytest.raises(UserError, match=r"the step needs .* and RTX 4090 0 has .* for it. The first change") as raised:
        require_fit(planned, CONFIG, base, Cards(int(planned * 0.75)))
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
        require_fit(planned, CONFIG, base, Cards(planned // 100))


def test_a_card_that_jax_takes_three_quarters_of_is_opened_first(base, planned, monkeypatch):
    monkeypatch.setattr(check, "budget_here", lambda count: gpu_budget(round(23.64 * GIB), 2))
    with pytest.raises(UserError, match=r"It would fit with --device-memory-limit 22.1\."):
        require_fit(18 * GIB, CONFIG, base, Cards(17.7 * GIB, platform="gpu"))
